"""From a bound port to a clean exit: start the engines, wait for them, serve, drain, stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.locate import locate
from jaxllm.models.config.read import check_sizes
from jaxllm.server.app import build
from jaxllm.server.command_line.options import Options
from jaxllm.server.engine.connection import ENGINE_COMMAND
from jaxllm.server.lifecycle.served_model import ServedModel
from jaxllm.server.lifecycle.signals import Signals
from jaxllm.server.lifecycle.starting import Starting
from jaxllm.server.state import ServerState
from jaxllm.server.tracing import Tracing
from jaxllm.server.transport.http import HttpServer, http_server
from jaxllm.server.transport.sockets import listen, raise_file_limit

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


async def serve(
    models: Sequence[tuple[Options, Path]],
    sock: socket.socket,
    command: tuple[str, ...] = ENGINE_COMMAND,
) -> int:
    """Everything after the checks; returns the exit status. Options of the server are those of the
    first model. Raises ConfigError when no engine can be loaded."""
    raise_file_limit()
    signals = Signals()
    options = models[0][0]
    wanted = [ServedModel(model_options, path, command) for model_options, path in models]
    starting = Starting(options.settings, lambda: _progress(wanted))
    tls = None
    if options.tls is not None:
        tls = options.tls.context
    server = http_server(starting, options.root_path, tls)
    listen(sock)
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    logger.info("loading; /health at %s says how far it is", address(options, sock))
    try:
        served = await _load(wanted, signals)
        if signals.first.done():
            return 128 + signals.first.result()
        missing = [model.names for model in wanted if model not in served]
        starting.open(application(options, served, missing))
        announce(options, [name for model in served for name in model.names], sock)
        status = await _serve(options, served, (server, serving), signals)
        return status or int(bool(missing))
    finally:
        await _close(server, serving, force=True)
        await asyncio.gather(*(model.stop(signals.second.done()) for model in wanted))


def _progress(models: Sequence[ServedModel]) -> str:
    """How far the start is, in words."""
    waiting = [f"{model.name}: {model.progress}" for model in models if model.loading]
    if waiting:
        return f"loading {', '.join(waiting)}"
    return "starting"


async def _load(wanted: Sequence[ServedModel], signals: Signals) -> list[ServedModel]:
    """Load one model after the other, until a signal comes; returns those that can be served.
    Raises ConfigError when none can."""
    served: list[ServedModel] = []
    for model in wanted:
        try:
            await model.load(signals)
            served.append(model)
        except ConfigError as error:
            if model is wanted[-1] and not served:
                raise
            logger.error("%s is not served: %s", model.name, error)
            await model.stop(now=True)  # its devices are the others'
        if signals.first.done():
            break
    return served


async def _serve(
    options: Options,
    models: Sequence[ServedModel],
    running: tuple[HttpServer, asyncio.Future[None]],
    signals: Signals,
) -> int:
    """Serve these models until a signal, or until all are lost; returns the exit status."""
    server, serving = running
    states = [model.state for model in models]
    beside = [
        asyncio.ensure_future(model.log_stats(options.stats_seconds))
        for model in models
        if options.stats_seconds
    ]
    if options.tls is not None and options.tls_refresh:
        beside.append(asyncio.ensure_future(options.tls.watch()))
    for model in models:
        model.announce()
        model.state.recorder.start()
    try:
        await _until_stopped(models, serving, signals)
        status = 1
        if signals.first.done():
            status = await drain(models, signals, options.shutdown_timeout)
        for state in states:
            state.bodies.refuse_all()
        await _close(server, serving, force=signals.second.done())
        return status
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*(state.shut_down() for state in states))
        if options.tracing is not None:
            await asyncio.to_thread(options.tracing.close)


def application(
    options: Options, models: Sequence[ServedModel], missing: Sequence[Sequence[str]]
) -> Any:
    """The application of the models that could be loaded; `missing` are the names of the others."""
    states = [model.state for model in models]
    app = build(*states, missing=missing)
    if options.tracing is not None:
        app = trace(states, options.tracing, app)
    # Objects made so far live as long as the process: Python's collector would search them while
    # streams wait
    gc.collect()
    gc.freeze()
    return app


def trace(states: Sequence[ServerState], tracing: Tracing, app: Any) -> Any:
    """The application whose requests are traced."""
    for state in states:
        for engine in state.client.clients:
            engine.observer = tracing.observer(engine.observer, state.settings.served[0])
    return tracing.middleware(app)


async def _until_stopped(
    models: Sequence[ServedModel], serving: asyncio.Future[None], signals: Signals
) -> None:
    """Wait for a signal, for the end of `serving`, or until every engine is dead and none is
    restarted: a model that has failed for good leaves the others to serve."""
    alive = together(model.keep_alive() for model in models)
    try:
        await asyncio.wait((serving, signals.first, alive), return_when=asyncio.FIRST_COMPLETED)
    finally:
        alive.cancel()
        await asyncio.wait((alive,))


async def drain(models: Sequence[ServedModel], signals: Signals, seconds: float) -> int:
    """Refuse new requests, let those in flight finish until the deadline, end the rest with an
    error. Returns the exit status."""
    for model in models:
        model.state.draining = True
    logger.info(
        "shutting down: %d requests get %g s to finish; a second signal ends them now",
        _active(models),
        seconds,
    )
    finished = together(model.finish_requests() for model in models)
    try:
        await asyncio.wait(
            (finished, signals.second), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        unfinished = _active(models)
        if unfinished:
            await asyncio.gather(*(model.end_requests() for model in models))
            if not signals.second.done():
                idle = together(model.state.idle.wait() for model in models)
                await asyncio.wait(
                    (idle, signals.second), timeout=5, return_when=asyncio.FIRST_COMPLETED
                )
                idle.cancel()
    finally:
        finished.cancel()
    if signals.second.done():
        logger.warning("not waiting for %d requests", unfinished)
        return 128 + signals.second.result()
    if all(engine.alive for model in models for engine in model.client.clients):
        return 0
    return 1


def together(works: Iterable[Coroutine[Any, Any, Any]]) -> asyncio.Task[None]:
    """A task that ends when all of these have, and ends them when it is cancelled."""

    async def all_of_them() -> None:
        await asyncio.gather(*works)

    return asyncio.ensure_future(all_of_them())


def _active(models: Sequence[ServedModel]) -> int:
    return sum(model.state.active for model in models)


async def _close(server: HttpServer, serving: asyncio.Future[None], force: bool) -> None:
    """Let replies flush, then close."""
    server.should_exit = True
    server.force_exit = force
    seconds = 15
    if force:
        seconds = 1
    await asyncio.wait((serving,), timeout=seconds)
    serving.cancel()


def address(options: Options, sock: socket.socket) -> str:
    """Where the server is reached."""
    if options.uds is not None:
        return f"the Unix socket {options.uds}"
    host, port = sock.getsockname()[:2]
    name = "localhost"
    if host not in ("0.0.0.0", "::"):
        name = host
    if ":" in name:  # IPv6
        name = f"[{name}]"
    scheme = "https"
    if options.tls is None:
        scheme = "http"
    return f"{scheme}://{name}:{port}"


def announce(options: Options, names: Sequence[str], sock: socket.socket) -> None:
    """Log the address, and a warning when everybody on the network may use it."""
    settings = options.settings
    routes = "OpenAI protocol under /v1"
    where = address(options, sock)
    if options.uds is None:
        host, port = sock.getsockname()[:2]
        if host not in ("127.0.0.1", "::1") and not settings.api_keys:
            logger.warning(
                "listening on every address without an API key: "
                "anyone who reaches port %d can use this server (--api-key)",
                port,
            )
    if options.root_path:
        routes += f", which a proxy shows under {options.root_path}/v1"
    logger.info("serving %s on %s (%s; Ctrl-C stops)", ", ".join(names), where, routes)
