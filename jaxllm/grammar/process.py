"""A compiler's process, which may be killed, as its owner sees it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxllm.grammar.limits import WALL_SECONDS
from jaxllm.grammar.structure import CompilerLost, StructureError

ROOT = str(Path(__file__).parents[2])
START = (
    f"import sys; sys.path.insert(0, {ROOT!r}); from jaxllm.grammar.compiler import main; main()"
)
COMMAND = (sys.executable, "-P", "-c", START)
MAX_REPLY = 16 << 20
TOO_MUCH = "it takes too much time or memory to compile; make it simpler"


@dataclass(frozen=True)
class Verdict:
    """What a compiler says of a job. `spent`: nothing within its budget, or nothing at all, which
    is not `final`."""

    grammar: str = ""
    error: str = ""
    spent: bool = False
    final: bool = True

    def for_kind(self, kind: str) -> str:
        """The grammar. Raises StructureError when there is none."""
        if self.error:
            raise StructureError(f"{kind}: {self.error}")
        return self.grammar


class Compiler:
    """Jobs of at most `seconds` of processor time. Calls of several threads wait for each other.

    The process starts with a job, where there is none: with the first, after one that never
    answered, and after `close`.
    """

    def __init__(
        self, specials: Mapping[str, int], seconds: float, command: Sequence[str] = COMMAND
    ):
        self._hello = json.dumps({"specials": dict(specials), "seconds": seconds}).encode() + b"\n"
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._closings = 0  # calls of `close`
        # The process that was ended last by one
        self._closed: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of the process

    def ask(self, line: bytes) -> Verdict:
        """What comes of a job. Raises CompilerLost when there is no compiler to ask, or somebody
        else ended it or its fork."""
        began = self._closings
        with self._lock:
            return self._ask(line, began)

    def close(self) -> None:
        """End the process, whatever it is doing. A job that waits for it ends with an error."""
        # First: a job that begins a process now sees it, and one that has begun it is killed here
        self._closings += 1
        if (process := self._process) is not None:
            # Before it ends, which a job that began since would take for its budget's end
            self._closed = process
            kill(process)
        with self._lock:
            self._end()

    def _ask(self, line: bytes, began: int) -> Verdict:
        """One job to the process, which is started when it is not there and ended when it does not
        answer. Raises CompilerLost, also when there were more than `began` closings in the end."""
        closed = CompilerLost("the grammar compiler was closed meanwhile; try again")
        if self._closings != began:
            raise closed
        process = None
        try:
            process = self._running()
            if self._closings != began:  # nobody else ends a process that began after the closing
                raise ConnectionAbortedError
            _write(process, line)
            reply = json.loads(_line(process, time.monotonic() + WALL_SECONDS))
        except (OSError, EOFError, ValueError) as error:
            self._end()
            if self._closings != began or (process is not None and process is self._closed):
                raise closed from None
            if process is None:
                why = error.strerror or error if isinstance(error, OSError) else error
                raise CompilerLost(
                    f"the grammar compiler cannot be started ({why}); try again later"
                ) from None
            # No answer, or half of one
            if isinstance(error, (EOFError, BrokenPipeError, ValueError)):
                raise CompilerLost(
                    "the process that compiled this grammar ended meanwhile; try again"
                ) from None
            return Verdict(error=TOO_MUCH, spent=True, final=False)
        if "killed" in reply:
            raise CompilerLost(
                "the process that compiled this grammar was killed; try again when the machine has memory left"
            )
        return (
            Verdict(error=TOO_MUCH, spent=True)
            if "spent" in reply
            else Verdict(reply.get("grammar", ""), reply.get("error", ""))
        )

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        _write(self._process, self._hello)
        _line(self._process, time.monotonic() + WALL_SECONDS)
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        kill(process)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not written
                pipe.close()


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process with the fork that does its job."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _write(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


def _line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """What the process writes up to the end of the line. Raises EOFError when it ends, OSError when
    it is late or writes too much."""
    assert process.stdout is not None
    # `select.select` takes no file beyond the 1024th, which servers have
    found, poll = bytearray(), select.poll()
    poll.register(process.stdout, select.POLLIN)
    while not found.endswith(b"\n"):
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1e3)
        data = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
        if ready and not data:
            raise EOFError("no answer")
        if not data or len(found) > MAX_REPLY:
            raise OSError("no answer")
        found += data
    return bytes(found)
