"""A host without HTTP: its engine process does what the controller's engine does."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.hosts.group import LOST_STATUS
from jaxllm.server.engine.connection import EngineDied, launch, way_of_ending
from jaxllm.server.engine.progress import LINE, SAID_SECONDS, StartProgress
from jaxllm.server.engine.wire import Died, Frames, Phase, Start, ToServer, encode
from jaxllm.server.lifecycle.signals import repeats, stopping_signals

logger = logging.getLogger("jaxllm.server")


def follow(config: EngineConfig, command: tuple[str, ...]) -> int:
    """Run until the controller stops; returns the exit status. Raises ConfigError.

    Whoever stops a group signals all hosts at once, and the controller's requests still need this
    one. So a first signal is noted, once the engine loads; a second one ends the process.
    """
    try:
        process, sock = launch(command)
    except EngineDied as error:
        raise ConfigError(str(error)) from None
    patience = Patience(process)
    for number in stopping_signals():
        signal.signal(number, patience.signalled)
    where = f"{config.master_addr}:{config.master_port}"
    logger.info("host %d follows %s in engine process %d", config.node_rank, where, process.pid)
    with sock:
        died = patience.listen(sock, config)
    status = process.wait()
    if died is not None:
        raise ConfigError(died.reason)
    if status not in (0, LOST_STATUS):
        raise ConfigError(
            f"the engine process of host {config.node_rank} {way_of_ending(status)}; "
            f"the controller is at {where}; start the whole group again"
        )
    if status:
        return 1
    return 0


class Patience:
    """What a follower makes of signals while it waits for the end of its engine process."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self._process = process
        self._patient = False  # whether the next signal is only noted
        self._noted = False
        self._progress = StartProgress()

    def listen(self, sock: socket.socket, config: EngineConfig) -> Died | None:
        """Have the engine process start; returns its last words, if there are any, at its end. A
        log that is no terminal gets lines that say how far the start is."""
        frames = Frames[ToServer](ToServer)
        began = time.monotonic()
        last_line = began
        sock.settimeout(None if sys.stderr.isatty() else SAID_SECONDS)
        with contextlib.suppress(ConnectionError):  # it has ended
            sock.sendall(encode(Start(config)))
            while (data := received(sock)) != b"":
                for message in frames.feed(data or b""):
                    if isinstance(message, Died):
                        return message
                    if isinstance(message, Phase):
                        self._heard(message)
                now = time.monotonic()
                is_due = now - last_line >= SAID_SECONDS
                if sock.gettimeout() and self._progress.running and is_due:
                    last_line = now
                    title = f"loading host {config.node_rank}"
                    logger.info(LINE, title, self._progress.text, now - began)
        return None

    def _heard(self, phase: Phase) -> None:
        self._progress.hear(phase)
        if not self._noted:
            self._patient = True

    def signalled(self, number: int, frame: FrameType | None) -> None:
        """A signal's handler."""
        if self._noted and repeats(number):
            return
        if not self._patient:
            self._process.kill()
            os._exit(128 + number)
        self._patient = False
        self._noted = True
        logger.info("following until the controller stops; a second signal ends this host now")


def received(sock: socket.socket) -> bytes | None:
    """What the socket has; nothing at its end, None where nothing came in its time."""
    try:
        return sock.recv(1 << 16)
    except TimeoutError:
        return None
