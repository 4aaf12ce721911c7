"""One model of a server, from its engine's start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from jaxllm.chat_template import template_variables
from jaxllm.commands import Sleep
from jaxllm.config import ConfigError
from jaxllm.messages import EngineStats
from jaxllm.sampling.defaults import generation_config, sampling_defaults
from jaxllm.server.app import BODY_FIELDS
from jaxllm.server.command_line.options import Options
from jaxllm.server.engine.client import EngineClient
from jaxllm.server.engine.connection import EngineDied
from jaxllm.server.engine.group import EngineGroup
from jaxllm.server.engine.supervisor import EngineSupervisor
from jaxllm.server.errors import ApiError, overloaded
from jaxllm.server.lifecycle.launches import engine_launches
from jaxllm.server.lifecycle.signals import Signals
from jaxllm.server.parsing.formats import chosen_format
from jaxllm.server.rendering.renders import Renders
from jaxllm.server.state import ServerState, renders_of
from jaxllm.templates.traits import table_of
from jaxllm.tokenizer import Tokenizer

logger = logging.getLogger("jaxllm.server")


class ServedModel:
    """A model with engine processes of its own.

    Attributes:
        names: as which it is served.
        name: the first of them.
        client: the way to its engines.
        state: what its routes share, once it is loaded.
        loading: whether it is being loaded.
    """

    state: ServerState

    def __init__(self, options: Options, model_dir: Path, command: tuple[str, ...]):
        self._options = options
        self._model_dir = model_dir
        self.names = options.settings.served
        self.name = self.names[0]
        self.loading = False
        # While the tokenizer is loaded, and what its templates show is found out
        self._chats: asyncio.Future[tuple[Tokenizer | None, Renders | None]] | None = None
        self._defaults = read_generation_config(options, model_dir)
        logged = options.log_format == "json" or not sys.stderr.isatty()  # else there are bars
        launches = engine_launches(options, model_dir)
        several = len(launches) > 1
        titles = [start_title(self.name, number, several) for number in range(len(launches))]
        self.client = EngineGroup(
            [EngineClient(launch.config, tells_prefixes=several) for launch in launches],
            options.max_queued_tokens,
            options.config.seed,
        )
        self._supervisors = [
            EngineSupervisor(
                client,
                launch.command(command),
                options.max_engine_restarts,
                f"engine {number}" if several else "the engine",
                titles[number] if logged else None,
            )
            for number, (client, launch) in enumerate(
                zip(self.client.clients, launches, strict=True)
            )
        ]

    async def load(self, signals: Signals) -> None:
        """Load the engines and the tokenizer side by side, until a signal comes. Raises ConfigError
        when one of them cannot be.

        While the tokenizer loads, signals end the process: its library may never return, or hold
        Python's lock, and the engine process ends with this one.
        """
        self.loading = True
        signals.end_process()
        loading = in_daemon_thread(lambda: load_chats(self._options, self._model_dir))
        loading.add_done_callback(signals.count)
        self._chats = loading
        starting = [supervisor.start() for supervisor in self._supervisors]
        both = asyncio.gather(loading, *starting)
        try:
            await asyncio.wait((both, signals.first), return_when=asyncio.FIRST_COMPLETED)
            if both.done():
                both.result()
                tokenizer, renders = loading.result()
                self.client.check_alike()
                self.state = ServerState(
                    self._options.settings,
                    self.client,
                    tokenizer,
                    self._defaults,
                    BODY_FIELDS,
                    renders,
                )
                await self._sleep_if_asked()
                return
            both.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await both
        except EngineDied as error:
            raise ConfigError(str(error)) from None
        finally:  # another model's tokenizer may be next
            self.loading = False
            loading.remove_done_callback(signals.count)
            signals.count()
            if not hasattr(self, "state"):
                await end_renders(loading)

    @property
    def progress(self) -> str:
        """How far the start is, in words."""
        clients = self.client.clients
        waiting: list[str] = []
        for number, client in enumerate(clients):
            text = client.progress.text
            if not client.alive:
                if len(clients) > 1:
                    text = f"engine {number}: {text}"
                waiting.append(text)
        if self._chats is not None and not self._chats.done():
            waiting.append("loading the tokenizer")
        return "; ".join(waiting)

    async def _sleep_if_asked(self) -> None:
        """Give the memory to models that are loaded after this one. Raises ConfigError."""
        if not self._options.start_asleep:
            return
        try:
            await self.client.run_command(Sleep(1))
        except ApiError as error:
            raise ConfigError(f"--start-asleep: {error}") from None
        logger.info("%s sleeps until POST /wake_up", self.name)

    def announce(self) -> None:
        """Log how chats are read, by a model that has any."""
        if self.state.resolved.pooling is not None:
            return
        formats = self.state.formats
        named = self.state.settings
        logger.info(
            "chats with %s: reasoning as %s, tool calls as %s; "
            "--reasoning-parser and --tool-call-parser choose others",
            self.name,
            chosen_format(formats.reasoning, named.reasoning_parser, formats.reasoning_signs),
            chosen_format(formats.tools, named.tool_call_parser, formats.tools_signs),
        )
        for name in formats.wrappers:
            logger.info("tags <%s> around a whole reply are taken off", name)
        if self.state.renders is not None:
            traits = self.state.renders.traits
        else:
            traits = {}
        shown = "; ".join(f"{label}: {value}" for label, value in table_of(traits))
        if shown:
            is_faulty = any(template.fault for template in traits.values())
            if is_faulty:
                level = logging.WARNING
            else:
                level = logging.INFO
            logger.log(level, "the chat template of %s shows histories so: %s", self.name, shown)

    async def keep_alive(self) -> None:
        """Replace engine processes that die, until none has a restart left."""
        await asyncio.gather(
            *(supervisor.keep_alive(self.name) for supervisor in self._supervisors)
        )

    async def finish_requests(self) -> None:
        """Return when no request is in flight, or none can finish."""
        idle = asyncio.ensure_future(self.state.idle.wait())
        died = asyncio.ensure_future(asyncio.wait([client.died for client in self.client.clients]))
        try:
            await asyncio.wait((idle, died), return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()
            died.cancel()

    async def end_requests(self) -> None:
        """End those in flight with an error."""
        unfinished = "the server shut down before this request was finished"
        self.client.fail_all(lambda: overloaded(unfinished, "shutdown"))
        await self.state.end_renders()

    async def stop(self, now: bool) -> None:
        """End the engine processes; with `now`, without asking them."""
        await asyncio.gather(*(supervisor.stop(now) for supervisor in self._supervisors))

    async def log_stats(self, seconds: float) -> None:
        """Log each engine's throughput while it has work, every so many seconds. Runs until
        cancelled."""
        clients = self.client.clients
        names = [f"{self.name}, engine {number}" for number in range(len(clients))]
        before = [client.stats for client in clients]
        while True:
            await asyncio.sleep(seconds)
            now = [client.stats for client in clients]
            for name, client, old, new in zip(names, clients, before, now, strict=True):
                if new.steps != old.steps or client.in_flight:
                    since = old if new.steps >= old.steps else EngineStats()  # another process
                    if len(clients) > 1:
                        shown = name
                    else:
                        shown = self.name
                    logger.info("%s: %s", shown, progress(since, new, seconds))
            before = now


def start_title(model: str, engine: int, several: bool) -> str:
    """What lines about the start of one engine, or of one of several, begin with."""
    if several:
        return f"loading {model}, engine {engine}"
    return f"loading {model}"


def progress(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """What an engine did in the seconds between two snapshots."""
    hits = now.prefix_hits - before.prefix_hits
    queries = now.prefix_queries - before.prefix_queries
    hit_rate = 0.0
    if queries:
        hit_rate = hits / queries
    prompt = (now.prompt_tokens - before.prompt_tokens) / seconds
    generated = (now.generation_tokens - before.generation_tokens) / seconds
    return (
        f"prompt {prompt:.1f} tokens/s, generation {generated:.1f} tokens/s, "
        f"running {now.running}, waiting {now.waiting}, KV usage {100 * now.kv_usage:.1f}%, "
        f"prefix hits {100 * hit_rate:.1f}%"
    )


def read_generation_config(options: Options, model_dir: Path) -> dict[str, Any]:
    """Sampling options that requests start from. Raises ConfigError."""
    choice = options.generation_config
    if choice != "vllm":
        directory: Path | str = choice
        if choice == "auto":
            directory = model_dir
        config = generation_config(directory)
    else:
        config = {}
    defaults = sampling_defaults(config | options.override_generation_config)
    return defaults | {"stream_interval": options.stream_interval}


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


def load_chats(options: Options, model_dir: Path) -> tuple[Tokenizer | None, Renders | None]:
    """The tokenizer, and what renders chats, if there are to be any. A process of its own finds out
    from now on what the chat templates show. Raises ConfigError."""
    tokenizer = load_tokenizer(options, model_dir)
    if tokenizer is None:
        return None, None
    renders = renders_of(tokenizer, options.settings.template_kwargs)
    if renders is not None:
        renders.start()
    return tokenizer, renders


async def end_renders(loading: asyncio.Future[Any]) -> None:
    """End what `load_chats` has started for a model that is not served."""
    if loading.done() and not loading.cancelled() and loading.exception() is None:
        _, renders = loading.result()
        if renders is not None:
            await renders.shut_down()


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
