"""One engine process at the other end of a socket, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from jaxllm.hosts.group import LOST_STATUS
from jaxllm.server.engine.wire import Died, Frames, Ready, Start, ToEngine, ToServer, encode

ENGINE_COMMAND = (sys.executable, "-m", "jaxllm.server.engine.process")
PF_EXITING = 4  # of Linux's task flags
LOOK_SECONDS = 0.01  # between two looks at the process; one takes 40 µs, and every request asks

WORDLESS = "the engine process ended unexpectedly"

logger = logging.getLogger("jaxllm.server")


class EngineDied(Exception):
    """The engine process ended before it was ready; `died` holds the reason."""

    def __init__(self, died: Died):
        super().__init__(died.reason)
        self.died = died


class EngineConnection(asyncio.Protocol):
    """The socket to one engine process. Runs on the event loop's thread; nothing blocks.

    Attributes:
        ready: what the engine says once it takes requests.
        died: resolves when the process has ended, or has said that it ends.
    """

    def __init__(
        self,
        receive: Callable[[list[ToServer]], None],
        lost: Callable[[], None],
        process_id: int | None,
    ):
        """`receive` gets the messages of each read, `lost` is called once, after `died`."""
        self._receive = receive
        self._lost = lost
        self._process_id = process_id
        self._looked = -LOOK_SECONDS
        self._exiting = False
        self._frames = Frames[ToServer](ToServer)
        self._transport: asyncio.Transport | None = None
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.died: asyncio.Future[Died] = loop.create_future()

    async def start(self, sock: socket.socket, start: Start) -> Ready:
        """Send what is to be loaded and wait until the engine takes requests. Raises EngineDied."""
        sock.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=sock)
        self.send(start)
        await asyncio.wait((self.ready, self.died), return_when=asyncio.FIRST_COMPLETED)
        if self.died.done():
            raise EngineDied(self.died.result())
        return self.ready.result()

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests, or did a moment ago."""
        if not self.ready.done() or self.died.done():
            return False
        now = time.monotonic()
        if self._process_id is not None and now - self._looked >= LOOK_SECONDS:
            self._looked, self._exiting = now, is_exiting(self._process_id)
        return not self._exiting

    def send(self, message: ToEngine) -> int:
        """Send a message, or drop it when the process is gone; returns the bytes sent."""
        if self._transport is None or self._transport.is_closing() or self.died.done():
            return 0
        data = encode(message)
        self._transport.write(data)
        return len(data)

    def hang_up(self) -> None:
        """Close the socket once everything is sent."""
        if self._transport is not None:
            self._transport.close()

    def end(self, died: Died) -> None:
        """Note the end of the process; only the first reason counts."""
        if not self.died.done():
            self.died.set_result(died)
            self.hang_up()
            self._lost()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio.Protocol"""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio.Protocol"""
        try:
            self._receive(self._frames.feed(data))
        except ValueError:
            logger.exception("the engine process sent a malformed message")
            self.end(Died("the engine process sent a malformed message"))

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio.Protocol"""
        self.end(Died(WORDLESS))


def is_exiting(process_id: int) -> bool:
    """Whether Linux ends a process: its sockets close only when its memory is released, which takes
    up to half a second. False elsewhere, and once the process is gone."""
    try:
        with open(f"/proc/{process_id}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()  # after the name
    except OSError:
        return False
    return bool(int(fields[6]) & PF_EXITING)


def way_of_ending(status: int) -> str:
    """How a process with this exit status ended, without a word to this one."""
    known = {
        -signal.SIGKILL: "was killed, as the system does when memory is short",
        -signal.SIGABRT: "was aborted, as it is when the controller of its hosts has gone",
        LOST_STATUS: "ended with its group of hosts; the log says why",
    }
    return known.get(status, f"ended with status {status}; see the log")


def launch(
    command: tuple[str, ...] = ENGINE_COMMAND,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start an engine process; returns it and our end of its socket. Raises EngineDied, as when no
    file is left to open.

    It gets a session of its own, because Ctrl-C is for the HTTP process to handle.
    """
    try:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as failed:
            failed.callback(ours.close)
            process = subprocess.Popen(
                (*command, "--fd", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
            failed.pop_all()
            return process, ours
    except OSError as error:
        reason = f"the engine process cannot be started: {error.strerror or error}"
        raise EngineDied(Died(reason)) from None
