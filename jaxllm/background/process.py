"""A process of its own for work that may have to be killed: one JSON line per job and per reply."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import orjson

ROOT = str(Path(__file__).parents[2])
MAX_REPLY = 16 << 20  # bytes


def python_command(module: str) -> tuple[str, ...]:
    """The command of a process that runs `main` of a module of this checkout."""
    start = f"import sys; sys.path.insert(0, {ROOT!r}); from {module} import main; main()"
    return sys.executable, "-P", "-c", start


class JobLost(Exception):
    """A job has no reply, and is not at fault: its process was closed, could not start or was
    killed from outside."""


class JobLate(Exception):
    """A job was not answered in time, or its reply is too long."""


class JobProcess:
    """Runs jobs one at a time; calls of several threads wait for each other.

    A job starts the process where there is none: the first job, one after `end_process`, and one
    after a job that was never answered. The process inherits no socket. The first line that it
    gets is `hello`, and its reply says that it is ready.

    Attributes:
        name: of what the process is, for messages.
        wall_seconds: longest wait for a reply, by the clock.
        max_reply: bytes of a reply.
        closings: calls of `end_process` so far.
    """

    name: ClassVar[str]
    wall_seconds = 10.0
    max_reply = MAX_REPLY

    def __init__(self, hello: dict[str, Any], command: Sequence[str]):
        self._hello = orjson.dumps(hello) + b"\n"
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self.closings = 0
        # The last process that `end_process` ended
        self._closed: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of the process

    @property
    def pid(self) -> int | None:
        """The process's id; None where there is none, or it was given up."""
        process = self._process
        if process is None:
            return None
        return process.pid

    def start_process(self) -> None:
        """Start the process before the first job, which shows a failure."""
        with self._lock, contextlib.suppress(OSError, EOFError):
            if not self.closings:
                self._running()

    def run_job(self, line: bytes) -> dict[str, Any]:
        """The reply to a job. Raises JobLost or JobLate."""
        closings = self.closings
        with self._lock:
            return self._run(line, closings)

    def end_process(self) -> None:
        """End the process. A job that waits for it ends with JobLost."""
        # First: a job that starts a process now sees it, and one that has started it is killed here
        self.closings += 1
        if (process := self._process) is not None:
            # Before the kill, which a later job would take for the end of its budget
            self._closed = process
            kill(process)
        with self._lock:
            self._end()

    def _run(self, line: bytes, closings: int) -> dict[str, Any]:
        """Send one job to the process, which is started when missing and ended when it does not
        answer. Raises JobLost, also after more than `closings` calls of `end_process`."""
        closed = JobLost(f"the {self.name} was closed meanwhile; try again")
        if self.closings != closings:
            raise closed
        process = None
        try:
            process = self._running()
            if self.closings != closings:  # nothing else ends a process started after `end_process`
                raise ConnectionAbortedError
            _write(process, line)
            reply: dict[str, Any] = orjson.loads(self._read(process))
            return reply
        except (OSError, EOFError, ValueError) as error:
            self._end()
            if self.closings != closings or (process is not None and process is self._closed):
                raise closed from None
            if process is None:
                why = error.strerror or error if isinstance(error, OSError) else error
                raise JobLost(
                    f"the {self.name} cannot be started ({why}); try again later"
                ) from None
            # No reply, or half of one
            if isinstance(error, (EOFError, BrokenPipeError, ValueError)):
                raise JobLost(f"the {self.name} ended meanwhile; try again") from None
            raise JobLate from None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        _write(self._process, self._hello)
        self._read(self._process)
        return self._process

    def _read(self, process: subprocess.Popen[bytes]) -> bytes:
        return read_line(process, time.monotonic() + self.wall_seconds, self.max_reply)

    def _end(self) -> None:
        process = self._process
        self._process = None
        if process is None:
            return
        kill(process)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # unwritten data
                pipe.close()


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its forks."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def read_line(process: subprocess.Popen[bytes], deadline: float, limit: int) -> bytes:
    """One line of the process's output. Raises EOFError when it ends, OSError when it is late or
    the line is longer than `limit`."""
    assert process.stdout is not None
    # `select.select` takes no file descriptor above 1023, which servers have
    line = bytearray()
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while not line.endswith(b"\n"):
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1e3)
        data = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
        if ready and not data:
            raise EOFError("no answer")
        if not data or len(line) > limit:
            raise OSError("no answer")
        line += data
    return bytes(line)


def _write(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()
