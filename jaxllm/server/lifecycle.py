"""From a bound port to a clean exit: start the engine process, wait for it, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from jaxllm.chat_template import template_variables
from jaxllm.config import ConfigError
from jaxllm.locate import locate
from jaxllm.messages import EngineStats
from jaxllm.models.config.read import check_sizes
from jaxllm.sampling.defaults import generation_config, sampling_defaults
from jaxllm.server.app import build
from jaxllm.server.command_line.options import Options
from jaxllm.server.engine.client import EngineClient
from jaxllm.server.engine.connection import ENGINE_COMMAND, EngineDied
from jaxllm.server.engine.supervisor import EngineSupervisor
from jaxllm.server.errors import overloaded
from jaxllm.server.parsing.formats import format_name
from jaxllm.server.signals import Signals
from jaxllm.server.state import ServerState
from jaxllm.server.tracing import Tracing
from jaxllm.server.transport.http import HttpServer, http_server
from jaxllm.server.transport.sockets import listen, raise_file_limit
from jaxllm.tokenizer import Tokenizer

STATS_SECONDS = 10.0  # between log lines of throughput

logger = logging.getLogger("jaxllm.server")


def find_model(options: Options) -> Path:
    """The model's directory; a hub model is downloaded. Raises ConfigError in one line."""
    config = options.config
    path = locate(config.model, config.revision, config.download_dir)
    if not (path / "config.json").is_file():
        raise ConfigError(f"no model at {path}: there is no config.json in it")
    if not os.access(path / "config.json", os.R_OK):
        raise ConfigError(f"cannot read {path / 'config.json'}: permission denied")
    check_sizes(path)  # before the tokenizer's library reads it
    return path


def read_generation_config(options: Options, model_dir: Path) -> dict[str, Any]:
    """Sampling options that requests start from. Raises ConfigError."""
    choice = options.generation_config
    found = {} if choice == "vllm" else generation_config(model_dir if choice == "auto" else choice)
    return sampling_defaults(found | options.override_generation_config)


async def serve(
    options: Options,
    sock: socket.socket,
    model_dir: Path,
    command: tuple[str, ...] = ENGINE_COMMAND,
) -> int:
    """Everything after the checks; returns the exit status. Raises ConfigError when the engine
    refuses the configuration."""
    raise_file_limit()
    signals = Signals()
    defaults = read_generation_config(options, model_dir)
    config = dataclasses.replace(options.config, model=str(model_dir))
    client = EngineClient(
        config, on_phase=lambda phase: logger.debug("%s took %.2f s", phase.name, phase.seconds)
    )
    supervisor = EngineSupervisor(client, command, options.max_engine_restarts)
    try:
        tokenizer = await _load(options, supervisor, model_dir, signals)
        if signals.first.done():
            return 128 + signals.first.result()
        server_state = ServerState(options.settings, client, tokenizer, defaults)
        return await _serve(options, server_state, supervisor, sock, signals)
    finally:
        await supervisor.stop(now=not client.alive or signals.second.done())


async def _load(
    options: Options, supervisor: EngineSupervisor, model_dir: Path, signals: Signals
) -> Tokenizer | None:
    """Load the engine and the tokenizer side by side, until a signal comes.

    While the tokenizer loads, signals end the process: its library may never return, or hold
    Python's lock, and the engine process ends with this one.
    """
    signals.end_process()
    loading = in_daemon_thread(lambda: load_tokenizer(options, model_dir))
    loading.add_done_callback(lambda _: signals.count())
    both = asyncio.gather(supervisor.start(), loading)
    try:
        await asyncio.wait((both, signals.first), return_when=asyncio.FIRST_COMPLETED)
        if both.done():
            return both.result()[1]
        both.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await both
        return None
    except EngineDied as error:
        raise ConfigError(str(error)) from None


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


async def _serve(
    options: Options,
    server_state: ServerState,
    supervisor: EngineSupervisor,
    sock: socket.socket,
    signals: Signals,
) -> int:
    tls = None if options.tls is None else options.tls.context
    app = build(server_state)
    if options.tracing is not None:
        app = trace(server_state, options.tracing, app)
    server = http_server(app, options.root_path, tls)
    # Objects made so far live as long as the process: Python's collector would search them while
    # streams wait
    gc.collect()
    gc.freeze()
    listen(sock)
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    beside = [asyncio.ensure_future(log_stats(server_state))] if options.log_stats else []
    if options.tls is not None and options.tls_refresh:
        beside.append(asyncio.ensure_future(options.tls.watch()))
    announce(options, sock)
    logger.info(
        "chats: reasoning as %s, tool calls as %s (--reasoning-parser, --tool-call-parser)",
        format_name(server_state.formats.reasoning),
        format_name(server_state.formats.tools),
    )
    if server_state.renders is not None:
        server_state.renders.start()
    try:
        await _until_stopped(server_state.client, supervisor, serving, signals)
        status = 1
        if signals.first.done():
            status = await drain(server_state, signals, options.shutdown_timeout)
        server_state.bodies.refuse_all()
        await _close(server, serving, force=signals.second.done())
        return status
    finally:
        for task in beside:
            task.cancel()
        await server_state.shut_down()
        if options.tracing is not None:
            await asyncio.to_thread(options.tracing.close)


def trace(server_state: ServerState, tracing: Tracing, app: Any) -> Any:
    """The application whose requests are traced."""
    client = server_state.client
    client.observer = tracing.observer(client.observer, server_state.settings.served[0])
    return tracing.middleware(app)


async def _until_stopped(
    client: EngineClient,
    supervisor: EngineSupervisor,
    serving: asyncio.Future[None],
    signals: Signals,
) -> None:
    """Wait for a signal, for the end of `serving`, or for a dead engine that is not restarted."""
    stopped = (serving, signals.first)
    while not any(each.done() for each in stopped):
        await asyncio.wait((*stopped, client.died), return_when=asyncio.FIRST_COMPLETED)
        if not client.died.done() or any(each.done() for each in stopped):
            return
        logger.error("the engine process died: %s", client.died.result().reason)
        restarting = asyncio.ensure_future(supervisor.restart())
        try:
            await asyncio.wait((*stopped, restarting), return_when=asyncio.FIRST_COMPLETED)
            if restarting.done() and not restarting.result():
                return
        finally:
            restarting.cancel()
            await asyncio.wait((restarting,))


async def drain(server_state: ServerState, signals: Signals, seconds: float) -> int:
    """Refuse new requests, let those in flight finish until the deadline, end the rest with an
    error. Returns the exit status."""
    server_state.draining = True
    logger.info(
        "shutting down: %d requests get %g s to finish; a second signal ends them now",
        server_state.active,
        seconds,
    )
    idle = asyncio.ensure_future(server_state.idle.wait())
    try:
        await asyncio.wait(
            (idle, server_state.client.died, signals.second),
            timeout=seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not idle.done():
            unfinished = "the server shut down before this request was finished"
            server_state.client.fail_all(lambda: overloaded(unfinished, "shutdown"))
            await server_state.end_renders()
            if not signals.second.done():
                await asyncio.wait(
                    (idle, signals.second), timeout=5, return_when=asyncio.FIRST_COMPLETED
                )
    finally:
        idle.cancel()
    if signals.second.done():
        logger.warning("not waiting for %d requests", server_state.active)
        return 128 + signals.second.result()
    return 0 if server_state.client.alive else 1


async def _close(server: HttpServer, serving: asyncio.Future[None], force: bool) -> None:
    """Let replies flush, then close."""
    server.should_exit = True
    server.force_exit = force
    await asyncio.wait((serving,), timeout=1 if force else 15)
    serving.cancel()


def announce(options: Options, sock: socket.socket) -> None:
    """Log the address, and a warning when everybody on the network may use it."""
    settings, routes = options.settings, "OpenAI protocol under /v1"
    if options.uds is not None:
        where = f"the Unix socket {options.uds}"
    else:
        host, port = sock.getsockname()[:2]
        name = "localhost" if host in ("0.0.0.0", "::") else host
        scheme = "http" if options.tls is None else "https"
        where = f"{scheme}://{f'[{name}]' if ':' in name else name}:{port}"
        if host not in ("127.0.0.1", "::1") and not settings.api_keys:
            logger.warning(
                "listening on every address without an API key: "
                "anyone who reaches port %d can use this server (--api-key)",
                port,
            )
    if options.root_path:
        routes += f", which a proxy shows under {options.root_path}/v1"
    logger.info("serving %s on %s (%s; Ctrl-C stops)", ", ".join(settings.served), where, routes)


async def log_stats(server_state: ServerState) -> None:
    """Log throughput while there is work. Runs until cancelled."""
    before = server_state.client.stats
    while True:
        await asyncio.sleep(STATS_SECONDS)
        now = server_state.client.stats
        if now.steps < before.steps:  # another engine process
            before = EngineStats()
        if now.steps != before.steps or server_state.client.in_flight:
            hits, queries = (
                now.prefix_hits - before.prefix_hits,
                now.prefix_queries - before.prefix_queries,
            )
            logger.info(
                "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, "
                "KV usage %.1f%%, prefix hits %.1f%%",
                (now.prompt_tokens - before.prompt_tokens) / STATS_SECONDS,
                (now.generation_tokens - before.generation_tokens) / STATS_SECONDS,
                now.running,
                now.waiting,
                100 * now.kv_usage,
                100 * hits / queries if queries else 0.0,
            )
        before = now
