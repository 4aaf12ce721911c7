"""From a bound port to a clean exit: start the engine process, wait for it, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import resource
import signal
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.locate import locate
from jaxllm.sampling.defaults import generation_config, sampling_defaults
from jaxllm.server.app import build
from jaxllm.server.cli import Options
from jaxllm.server.engine.client import ENGINE_COMMAND, EngineClient, EngineDied, launch
from jaxllm.server.errors import overloaded
from jaxllm.server.state import ServerState
from jaxllm.server.stats_line import log_stats
from jaxllm.server.transport.http import HttpServer, http_server
from jaxllm.tokenizer import Tokenizer

ENGINE_STOP_SECONDS = 10.0
BACKLOG = 2048
MAX_FILES = 1 << 16

logger = logging.getLogger("jaxllm.server")


def bind(options: Options) -> socket.socket:
    """The listening address, taken before any other work. Raises ConfigError in one line."""
    if options.uds is not None:
        return bind_unix(Path(options.uds))
    try:
        found = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {options.host}: {error.strerror or error}; check --host"
        ) from None
    family, kind, protocol, _, address = found[0]
    # With the protocol named, asyncio turns Nagle's algorithm off: it would hold a token back until
    # the client has acknowledged the one before, which takes up to 40 ms.
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {options.host} port {options.port}: {error.strerror}; stop the other program or choose another --port"
        ) from None
    return sock


def bind_unix(path: Path) -> socket.socket:
    """A Unix socket; one that nobody listens on any more is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) != 0:
                    path.unlink()
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {path}: {error.strerror or error}; remove it or choose another --uds"
        ) from None
    return sock


def listen(sock: socket.socket, options: Options) -> None:
    """From here on connections are taken. Raises ConfigError when another program was quicker."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {options.uds or options.port}: {error.strerror}; choose another --port or --uds"
        ) from None


def find_model(options: Options) -> Path:
    """The model's directory (a hub model is downloaded). Raises ConfigError in one line."""
    config = options.config
    path = locate(config.model, config.revision, config.download_dir)
    if not (path / "config.json").is_file():
        raise ConfigError(f"no model at {path}: there is no config.json in it")
    if not os.access(path / "config.json", os.R_OK):
        raise ConfigError(f"cannot read {path / 'config.json'}: permission denied")
    return path


def read_generation_config(options: Options, model_dir: Path) -> dict[str, Any]:
    """Sampling options that requests start from. Raises ConfigError."""
    choice = options.generation_config
    found = {} if choice == "vllm" else generation_config(model_dir if choice == "auto" else choice)
    return sampling_defaults(found | options.override_generation_config)


def allow_files() -> None:
    """As many open files, which connections are, as the system lets this process have, within
    reason; by default often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Signals:
    """The first SIGTERM or SIGINT, and the second."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[int] = loop.create_future()
        self.second: asyncio.Future[int] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._heard, number)

    def _heard(self, number: int) -> None:
        future = self.second if self.first.done() else self.first
        if not future.done():
            future.set_result(number)


async def serve(
    options: Options,
    sock: socket.socket,
    model_dir: Path,
    command: tuple[str, ...] = ENGINE_COMMAND,
) -> int:
    """Everything after the checks; returns the exit status. Raises ConfigError when the engine
    refuses the configuration."""
    allow_files()
    signals = Signals()
    defaults = read_generation_config(options, model_dir)
    config = dataclasses.replace(options.config, model=str(model_dir))
    process, ours = launch(command)
    logger.info("loading %s in engine process %d", options.config.model, process.pid)
    client = EngineClient(
        config, on_phase=lambda phase: logger.debug("%s took %.2f s", phase.name, phase.seconds)
    )
    try:
        server_state = await _start(options, client, ours, model_dir, defaults, signals)
        if server_state is None:
            return 128 + signals.first.result()
        return await _serve(options, server_state, sock, signals)
    finally:
        await _stop_core(client, process, now=not client.alive or signals.second.done())


async def _start(
    options: Options,
    client: EngineClient,
    ours: socket.socket,
    model_dir: Path,
    defaults: dict[str, Any],
    signals: Signals,
) -> ServerState | None:
    """The engine and the tokenizer load side by side; None when a signal came first."""
    connecting = asyncio.ensure_future(client.connect(ours))
    loading = asyncio.ensure_future(asyncio.to_thread(_load_tokenizer, options, model_dir))
    both = asyncio.gather(connecting, loading)
    try:
        await asyncio.wait((both, signals.first), return_when=asyncio.FIRST_COMPLETED)
        if not both.done():
            both.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await both
            return None
        _, tokenizer = both.result()
    except EngineDied as error:
        raise ConfigError(str(error)) from None
    return ServerState(options.settings, client, tokenizer, defaults)


def _load_tokenizer(options: Options, model_dir: Path) -> Tokenizer | None:
    config = options.config
    if config.skip_tokenizer_init:
        return None
    tokenizer = Tokenizer.load(config.tokenizer or model_dir, options.chat_template)
    tokenizer.check_chat_template()
    # Compute now, not in the first request
    _ = tokenizer.longest_token, tokenizer.template_variables
    return tokenizer


async def _serve(
    options: Options, server_state: ServerState, sock: socket.socket, signals: Signals
) -> int:
    server = http_server(build(server_state), options.root_path)
    # What is here now stays as long as the process: Python's collector would look through it while
    # streams wait.
    gc.collect()
    gc.freeze()
    listen(sock, options)
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    stats = asyncio.ensure_future(log_stats(server_state)) if options.log_stats else None
    announce(options, sock)
    try:
        await asyncio.wait(
            (serving, server_state.client.died, signals.first), return_when=asyncio.FIRST_COMPLETED
        )
        if server_state.client.died.done():
            logger.error("the engine process died: %s", server_state.client.died.result().reason)
            status = 1
        elif signals.first.done():
            status = await drain(server_state, signals, options.shutdown_timeout)
        else:
            status = 1
        server_state.bodies.close()
        await _close(server, serving, force=signals.second.done())
        return status
    finally:
        if stats is not None:
            stats.cancel()
        await server_state.close()


async def drain(server_state: ServerState, signals: Signals, seconds: float) -> int:
    """Refuse new work, let the old finish until the deadline, end what is left with an error event.
    Returns the exit status."""
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
            server_state.client.fail_all(
                lambda: overloaded(
                    "the server shut down before this request was finished", "shutdown"
                )
            )
            if not signals.second.done():
                await asyncio.wait(
                    (idle, signals.second), timeout=5, return_when=asyncio.FIRST_COMPLETED
                )
    finally:
        idle.cancel()
    if signals.second.done():
        logger.warning("not waiting for %d requests", server_state.active)
        return 128 + signals.second.result()
    return 1 if server_state.client.died.done() else 0


async def _close(server: HttpServer, serving: asyncio.Future[None], force: bool) -> None:
    """Let replies flush, then close."""
    server.should_exit = True
    server.force_exit = force
    await asyncio.wait((serving,), timeout=1 if force else 15)
    serving.cancel()


async def _stop_core(client: EngineClient, process: subprocess.Popen[bytes], now: bool) -> None:
    """End the engine process: ask, then insist; `now` when nothing is to be waited for."""
    client.stop()
    if now:
        process.kill()
    try:
        await asyncio.to_thread(process.wait, ENGINE_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        await asyncio.to_thread(process.wait)


def announce(options: Options, sock: socket.socket) -> None:
    """Where it listens, and a warning when that is everywhere and for everyone."""
    settings, routes = options.settings, "OpenAI protocol under /v1"
    if options.uds is not None:
        where = f"the Unix socket {options.uds}"
    else:
        host, port = sock.getsockname()[:2]
        shown = "localhost" if host in ("0.0.0.0", "::") else host
        where = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"
        if host not in ("127.0.0.1", "::1") and not settings.api_keys:
            logger.warning(
                "listening on every address without an API key: anyone who reaches port %d can use this server (--api-key)",
                port,
            )
    if options.root_path:
        routes += f", which a proxy shows under {options.root_path}/v1"
    logger.info("serving %s on %s (%s; Ctrl-C stops)", ", ".join(settings.served), where, routes)
