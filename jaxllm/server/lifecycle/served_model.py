"""One model of a server, from its engine's start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from jaxllm.chat_template import template_variables
from jaxllm.config import ConfigError
from jaxllm.messages import EngineStats
from jaxllm.sampling.defaults import generation_config, sampling_defaults
from jaxllm.server.command_line.options import Options
from jaxllm.server.engine.client import EngineClient
from jaxllm.server.engine.connection import EngineDied
from jaxllm.server.engine.supervisor import EngineSupervisor
from jaxllm.server.errors import overloaded
from jaxllm.server.lifecycle.signals import Signals
from jaxllm.server.parsing.formats import format_name
from jaxllm.server.state import ServerState
from jaxllm.tokenizer import Tokenizer

logger = logging.getLogger("jaxllm.server")


class ServedModel:
    """A model with an engine process of its own.

    Attributes:
        name: its first served name.
        client: the way to its engine.
        state: what its routes share, once it is loaded.
    """

    state: ServerState

    def __init__(self, options: Options, model_dir: Path, command: tuple[str, ...]):
        self._options, self._model_dir = options, model_dir
        self.name = options.settings.served[0]
        self._defaults = read_generation_config(options, model_dir)
        self.client = EngineClient(
            dataclasses.replace(options.config, model=str(model_dir)),
            on_phase=lambda phase: logger.debug("%s took %.2f s", phase.name, phase.seconds),
        )
        self.client.max_queued_tokens = options.max_queued_tokens
        if options.visible_devices is not None:
            command = ("env", f"CUDA_VISIBLE_DEVICES={options.visible_devices}", *command)
        self._supervisor = EngineSupervisor(self.client, command, options.max_engine_restarts)

    async def load(self, signals: Signals) -> None:
        """Load the engine and the tokenizer side by side, until a signal comes. Raises ConfigError
        when one of them cannot be.

        While the tokenizer loads, signals end the process: its library may never return, or hold
        Python's lock, and the engine process ends with this one.
        """
        signals.end_process()
        loading = in_daemon_thread(lambda: load_tokenizer(self._options, self._model_dir))
        loading.add_done_callback(lambda _: signals.count())
        both = asyncio.gather(self._supervisor.start(), loading)
        try:
            await asyncio.wait((both, signals.first), return_when=asyncio.FIRST_COMPLETED)
            if both.done():
                _, tokenizer = both.result()
                self.state = ServerState(
                    self._options.settings, self.client, tokenizer, self._defaults
                )
                return
            both.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await both
        except EngineDied as error:
            raise ConfigError(str(error)) from None

    def announce(self) -> None:
        """Log how chats are read."""
        formats = self.state.formats
        logger.info(
            "chats with %s: reasoning as %s, tool calls as %s "
            "(--reasoning-parser, --tool-call-parser)",
            self.name,
            format_name(formats.reasoning),
            format_name(formats.tools),
        )

    async def keep_alive(self) -> None:
        """Replace the engine process whenever it dies, until no restart is left."""
        while True:
            await asyncio.wait((self.client.died,))
            logger.error(
                "the engine process of %s died: %s", self.name, self.client.died.result().reason
            )
            if not await self._supervisor.restart():
                return

    async def finish_requests(self) -> None:
        """Return when no request is in flight, or none can finish."""
        idle = asyncio.ensure_future(self.state.idle.wait())
        try:
            await asyncio.wait((idle, self.client.died), return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()

    async def end_requests(self) -> None:
        """End those in flight with an error."""
        unfinished = "the server shut down before this request was finished"
        self.client.fail_all(lambda: overloaded(unfinished, "shutdown"))
        await self.state.end_renders()

    async def stop(self, now: bool) -> None:
        """End the engine process; with `now`, or when it is dead, without asking it."""
        await self._supervisor.stop(now=now or not self.client.alive)

    async def log_stats(self, seconds: float) -> None:
        """Log throughput while there is work, every so many seconds. Runs until cancelled."""
        before = self.client.stats
        while True:
            await asyncio.sleep(seconds)
            now = self.client.stats
            if now.steps < before.steps:  # another engine process
                before = EngineStats()
            if now.steps != before.steps or self.client.in_flight:
                logger.info("%s: %s", self.name, progress(before, now, seconds))
            before = now


def progress(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """What an engine did in the seconds between two snapshots."""
    hits, queries = now.prefix_hits - before.prefix_hits, now.prefix_queries - before.prefix_queries
    prompt = (now.prompt_tokens - before.prompt_tokens) / seconds
    generated = (now.generation_tokens - before.generation_tokens) / seconds
    return (
        f"prompt {prompt:.1f} tokens/s, generation {generated:.1f} tokens/s, "
        f"running {now.running}, waiting {now.waiting}, KV usage {100 * now.kv_usage:.1f}%, "
        f"prefix hits {100 * hits / queries if queries else 0.0:.1f}%"
    )


def read_generation_config(options: Options, model_dir: Path) -> dict[str, Any]:
    """Sampling options that requests start from. Raises ConfigError."""
    choice = options.generation_config
    found = {} if choice == "vllm" else generation_config(model_dir if choice == "auto" else choice)
    return sampling_defaults(found | options.override_generation_config)


def in_daemon_thread[T](work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in a thread that the process does not wait for at its end."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from here on its result may always be set

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(future)


def load_tokenizer(options: Options, model_dir: Path) -> Tokenizer | None:
    """The tokenizer of the served model, if there is to be one. Raises ConfigError."""
    config = options.config
    if config.skip_tokenizer_init:
        return None
    tokenizer = Tokenizer.load(config.tokenizer or model_dir, options.chat_template)
    tokenizer.check_chat_template()
    # Computed now, not in the first request
    _ = tokenizer.longest_token, template_variables(tokenizer.templates)
    return tokenizer
