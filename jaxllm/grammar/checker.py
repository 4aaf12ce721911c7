"""Compiles the grammars of requests in other processes, within a budget: a hostile grammar costs
its sender alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from jaxllm.grammar.limits import BUDGETS, WALL_SECONDS
from jaxllm.grammar.structure import CompilerLost, StructuredOutputsParams, StructureError

ROOT = str(Path(__file__).parents[2])
START = (
    f"import sys; sys.path.insert(0, {ROOT!r}); from jaxllm.grammar.compiler import main; main()"
)
COMMAND = (sys.executable, "-P", "-c", START)
MAX_REPLY = 16 << 20
TOO_MUCH = "it takes too much time or memory to compile; make it simpler"
MAX_KEPT = 1024
MAX_KEPT_BYTES = 16 << 20


@dataclass(frozen=True)
class Job:
    """One grammar to compile; equal jobs have equal verdicts.

    Attributes:
        kind: of the structure, for messages.
        line: the job as the process reads it.
        key: digest of `line`.
    """

    kind: str
    line: bytes
    key: bytes


def job_of(params: StructuredOutputsParams) -> Job:
    """The job of a structure. Raises StructureError on faults that show without compiling."""
    line = json.dumps(params.job()).encode() + b"\n"
    return Job(params.kind, line, hashlib.sha256(line).digest())


class Checker:
    """Compiles jobs and keeps the verdicts. Thread-safe.

    Each lane has a budget and a process of its own, so that quick grammars do not wait for slow
    ones. Calls for one lane wait for each other.
    """

    def __init__(self, specials: Mapping[str, int], command: Sequence[str] = COMMAND):
        self._compilers = [Compiler(specials, seconds, command) for seconds in BUDGETS]
        self._keeping = threading.Lock()  # guards the kept verdicts; held for microseconds
        self._kept: OrderedDict[bytes, Verdict] = OrderedDict()  # oldest first
        self._kept_bytes = 0

    def compile_params(self, params: StructuredOutputsParams) -> str:
        """The grammar of a structure, in llguidance's serialised form. Raises StructureError with
        the compiler's reason."""
        grammar = self.compile_within(job_of(params), len(BUDGETS) - 1)
        assert grammar is not None
        return grammar

    def compile_within(self, job: Job, lane: int) -> str | None:
        """The grammar of a job, or None when it exceeds the lane's budget and another lane has
        more. Raises StructureError."""
        verdict = self._recall(job.key)
        if verdict is None:
            verdict = self._compilers[lane].run_job(job.line)
            if verdict.spent and lane < len(BUDGETS) - 1:
                return None
            if verdict.final:
                self._keep(job.key, verdict)
        return verdict.for_kind(job.kind)

    def cached_grammar(self, job: Job) -> str | None:
        """The grammar of a job that was compiled before, else None, without waiting. Raises
        StructureError as `compile_within`."""
        verdict = self._recall(job.key)
        return None if verdict is None else verdict.for_kind(job.kind)

    def end_processes(self) -> None:
        """End the processes; verdicts stay. A call that waits for a process ends with an error."""
        for compiler in self._compilers:
            compiler.end_process()

    def _recall(self, key: bytes) -> Verdict | None:
        with self._keeping:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, key: bytes, verdict: Verdict) -> None:
        with self._keeping:
            if (before := self._kept.pop(key, None)) is not None:
                self._kept_bytes -= _size(before)
            self._kept[key] = verdict
            self._kept_bytes += _size(verdict)
            while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
                self._kept_bytes -= _size(self._kept.popitem(last=False)[1])


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The id of each text that llguidance takes for a special token."""
    return {
        t.content: id
        for id, t in tokenizer.get_added_tokens_decoder().items()
        if t.special or (t.content.startswith("<") and t.content.endswith(">"))
    }


def _size(verdict: Verdict) -> int:
    return len(verdict.grammar) + len(verdict.error) + 64


@dataclass(frozen=True)
class Verdict:
    """The result of a job.

    Attributes:
        grammar: in llguidance's serialised form, "" where there is none.
        error: why there is none.
        spent: the budget was used up.
        final: another attempt would give the same.
    """

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
    """Runs jobs of at most `seconds` of processor time. Calls of several threads wait for each
    other.

    A job starts the process where there is none: the first job, one after `end_process`, and one
    after a job that was never answered.
    """

    def __init__(
        self, specials: Mapping[str, int], seconds: float, command: Sequence[str] = COMMAND
    ):
        self._hello = json.dumps({"specials": dict(specials), "seconds": seconds}).encode() + b"\n"
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._closings = 0  # calls of `end_process`
        # The last process that `end_process` ended
        self._closed: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of the process

    def run_job(self, line: bytes) -> Verdict:
        """The verdict on a job. Raises CompilerLost when the process cannot start, or it or its
        fork was ended from outside."""
        closings = self._closings
        with self._lock:
            return self._run(line, closings)

    def end_process(self) -> None:
        """End the process. A job that waits for it ends with an error."""
        # First: a job that starts a process now sees it, and one that has started it is killed here
        self._closings += 1
        if (process := self._process) is not None:
            # Before the kill, which a later job would take for the end of its budget
            self._closed = process
            kill(process)
        with self._lock:
            self._end()

    def _run(self, line: bytes, closings: int) -> Verdict:
        """Send one job to the process, which is started when missing and ended when it does not
        answer. Raises CompilerLost, also after more than `closings` calls of `end_process`."""
        closed = CompilerLost("the grammar compiler was closed meanwhile; try again")
        if self._closings != closings:
            raise closed
        process = None
        try:
            process = self._running()
            if (
                self._closings != closings
            ):  # nothing else ends a process started after `end_process`
                raise ConnectionAbortedError
            _write(process, line)
            reply = json.loads(_line(process, time.monotonic() + WALL_SECONDS))
        except (OSError, EOFError, ValueError) as error:
            self._end()
            if self._closings != closings or (process is not None and process is self._closed):
                raise closed from None
            if process is None:
                why = error.strerror or error if isinstance(error, OSError) else error
                raise CompilerLost(
                    f"the grammar compiler cannot be started ({why}); try again later"
                ) from None
            # No reply, or half of one
            if isinstance(error, (EOFError, BrokenPipeError, ValueError)):
                raise CompilerLost(
                    "the process that compiled this grammar ended meanwhile; try again"
                ) from None
            return Verdict(error=TOO_MUCH, spent=True, final=False)
        if "killed" in reply:
            raise CompilerLost(
                "the process that compiled this grammar was killed; "
                "try again when the machine has memory left"
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
            with contextlib.suppress(OSError):  # unwritten data
                pipe.close()


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and the fork that runs its job."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _write(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


def _line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """One line of the process's output. Raises EOFError when it ends, OSError when it is late or
    the line is too long."""
    assert process.stdout is not None
    # `select.select` takes no file descriptor above 1023, which servers have
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
