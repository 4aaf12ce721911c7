"""Compiles the grammars of requests in other processes, within a budget: a hostile grammar costs
its sender alone."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from jaxllm.background.process import JobLate, JobLost, JobProcess, python_command
from jaxllm.grammar.limits import BUDGETS
from jaxllm.grammar.pieces import Structured
from jaxllm.grammar.structure import CompilerLost, StructuredOutputsParams, StructureError

COMMAND = python_command("jaxllm.grammar.compiler")
TOO_MUCH = "it takes too much time or memory to compile; make it simpler"
MAX_KEPT = 1024
MAX_KEPT_BYTES = 16 << 20


@dataclass(frozen=True)
class Job:
    """One grammar to compile; equal jobs have equal verdicts.

    Attributes:
        constraint: the name of the structure, for messages.
        line: the job as the process reads it.
        key: digest of `line`.
    """

    constraint: str
    line: bytes
    key: bytes


def job_of(params: Structured) -> Job:
    """The job of a structure. Raises StructureError on faults that show without compiling."""
    line = json.dumps(params.job()).encode() + b"\n"
    return Job(params.constraint, line, hashlib.sha256(line).digest())


class Checker:
    """Compiles jobs and keeps the verdicts. Thread-safe.

    Each lane has a budget and a process of its own, so that quick grammars do not wait for slow
    ones. Calls for one lane wait for each other.

    Attributes:
        compilers: one of each lane, that of the smallest budget first.
    """

    def __init__(self, specials: Mapping[str, int], command: Sequence[str] = COMMAND):
        self.compilers = [Compiler(specials, seconds, command) for seconds in BUDGETS]
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
            verdict = self.compilers[lane].verdict_on(job.line)
            if verdict.spent and lane < len(BUDGETS) - 1:
                return None
            if verdict.final:
                self._keep(job.key, verdict)
        return verdict.grammar_for(job.constraint)

    def cached_grammar(self, job: Job) -> str | None:
        """The grammar of a job that was compiled before, else None, without waiting. Raises
        StructureError as `compile_within`."""
        verdict = self._recall(job.key)
        if verdict is None:
            return None
        return verdict.grammar_for(job.constraint)

    def end_processes(self) -> None:
        """End the processes; verdicts stay. A call that waits for a process ends with an error."""
        for compiler in self.compilers:
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

    def grammar_for(self, constraint: str) -> str:
        """The grammar. Raises StructureError when there is none."""
        if self.error:
            raise StructureError(f"{constraint}: {self.error}")
        return self.grammar


class Compiler(JobProcess):
    """The process of one lane, whose jobs take at most `seconds` of processor time."""

    name = "grammar compiler"

    def __init__(
        self, specials: Mapping[str, int], seconds: float, command: Sequence[str] = COMMAND
    ):
        super().__init__({"specials": dict(specials), "seconds": seconds}, command)

    def verdict_on(self, line: bytes) -> Verdict:
        """The verdict on a job. Raises CompilerLost when the process cannot start, or it or its
        fork was ended from outside."""
        try:
            reply = self.run_job(line)
        except JobLost as error:
            raise CompilerLost(str(error)) from None
        except JobLate:
            return Verdict(error=TOO_MUCH, spent=True, final=False)
        if "killed" in reply:
            raise CompilerLost(
                "the process that compiled this grammar was killed; "
                "try again when the machine has memory left"
            )
        if "spent" in reply:
            return Verdict(error=TOO_MUCH, spent=True)
        return Verdict(reply.get("grammar", ""), reply.get("error", ""))
