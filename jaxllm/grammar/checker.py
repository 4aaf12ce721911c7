"""Compiles what clients ask for, in a process of its own and within a budget: a hostile grammar costs its sender alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from jaxllm.grammar.limits import WALL_SECONDS
from jaxllm.grammar.structure import StructuredOutputsParams, StructureError

ROOT = str(Path(__file__).parents[2])
START = f"import sys; sys.path.insert(0, {ROOT!r}); from jaxllm.grammar.compiler import main; main()"
COMMAND = (sys.executable, "-P", "-c", START)
MAX_KEPT = 1024
MAX_KEPT_BYTES = 16 << 20
MAX_REPLY = 16 << 20
DYING_SECONDS = 0.1


@dataclass(frozen=True)
class _Verdict:
    grammar: str
    error: str
    final: bool = True

    def for_kind(self, kind: str) -> str:
        """The grammar. Raises StructureError when there is none."""
        if self.error:
            raise StructureError(f"{kind}: {self.error}")
        return self.grammar


@dataclass(frozen=True)
class Job:
    """What the process is told; equal jobs have equal verdicts."""

    kind: str
    line: bytes
    key: bytes  # digest of `line`


def job_of(params: StructuredOutputsParams) -> Job:
    """What is to be compiled. Raises StructureError when that can be told from the outside."""
    line = json.dumps(params.job()).encode() + b"\n"
    return Job(params.kind, line, hashlib.sha256(line).digest())


class Checker:
    """`compile(job)` gives a grammar that compiles, or raises StructureError. Calls from several threads wait for each other.

    The process starts with a check, where there is none: with the first, after one that had to be killed, and after `close`.
    """

    def __init__(self, specials: Mapping[str, int], command: Sequence[str] = COMMAND):
        self._hello = json.dumps(dict(specials)).encode() + b"\n"
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._closings = 0  # calls of `close`
        self._closed: subprocess.Popen[bytes] | None = None  # the process that was ended last by one
        self._lock = threading.Lock()  # of the process
        self._keeping = threading.Lock()  # of what is kept; never held for long
        self._kept: OrderedDict[bytes, _Verdict] = OrderedDict()  # oldest first
        self._kept_bytes = 0

    def check(self, params: StructuredOutputsParams) -> str:
        """`compile` of what `params` ask for. Raises StructureError."""
        return self.compile(job_of(params))

    def compile(self, job: Job) -> str:
        """The grammar in llguidance's serialised form. Raises StructureError with the compiler's reason."""
        began = self._closings
        with self._lock:
            verdict = self._recall(job.key)
            if verdict is None:
                verdict = self._ask(job.line, began)
                if verdict.final:
                    self._keep(job.key, verdict)
        return verdict.for_kind(job.kind)

    def known(self, job: Job) -> str | None:
        """What `compile` gives when that was found before, else None; waits for nobody. Raises StructureError as `compile`."""
        verdict = self._recall(job.key)
        return None if verdict is None else verdict.for_kind(job.kind)

    def close(self) -> None:
        """End the process, whatever it is doing; what is known stays. A check that waits for it ends with an error."""
        self._closings += 1  # first: a check that begins a process now sees it, and one that has begun it is killed here
        if (process := self._process) is not None:
            self._closed = process  # before it ends, which a check that began since would take for its budget's end
            process.kill()
        with self._lock:
            self._end()

    def _recall(self, key: bytes) -> _Verdict | None:
        with self._keeping:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, key: bytes, verdict: _Verdict) -> None:
        with self._keeping:
            self._kept[key] = verdict
            self._kept_bytes += _size(verdict)
            while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
                self._kept_bytes -= _size(self._kept.popitem(last=False)[1])

    def _ask(self, line: bytes, began: int) -> _Verdict:
        """One job to the process, which is started when it is not there and ended when it does not answer. Raises StructureError, also
        when there were more than `began` closings in the end."""
        closed = StructureError("the grammar compiler was closed meanwhile; try again")
        if self._closings != began:
            raise closed
        process = None
        try:
            process = self._running()
            if self._closings != began:  # nobody else ends a process that began after the closing
                raise ConnectionAbortedError
            _write(process, line)
            reply = json.loads(_line(process, time.monotonic() + WALL_SECONDS))
        except (OSError, ValueError) as error:
            died = self._end()
            if self._closings != began or (process is not None and process is self._closed):
                raise closed from None
            if process is None:
                why = error.strerror or error if isinstance(error, OSError) else error
                raise StructureError(f"the grammar compiler cannot be started ({why}); try again later") from None
            return _Verdict("", "it takes too much time or memory to compile; make it simpler", final=died)
        return _Verdict(reply.get("grammar", ""), reply.get("error", ""))

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        _write(self._process, self._hello)
        _line(self._process, time.monotonic() + WALL_SECONDS)
        return self._process

    def _end(self) -> bool:
        """Whether the process had ended by itself, which is what exhausted budgets make it do."""
        process, self._process = self._process, None
        if process is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):  # its pipe closes a moment before it is gone
            process.wait(DYING_SECONDS)
        died = process.poll() is not None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not written
                pipe.close()
        return died


def _write(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


def _line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """What the process writes up to the end of the line. Raises OSError when it ends, is late, or writes too much."""
    assert process.stdout is not None
    found = bytearray()
    while not found.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
        if not data or len(found) > MAX_REPLY:
            raise OSError("no answer")
        found += data
    return bytes(found)


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The texts that llguidance takes for one token that plain text never makes: id of each."""
    added = tokenizer.get_added_tokens_decoder()
    return {t.content: id for id, t in added.items() if t.special or (t.content.startswith("<") and t.content.endswith(">"))}


def _size(verdict: _Verdict) -> int:
    return len(verdict.grammar) + len(verdict.error) + 64
