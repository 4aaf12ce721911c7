"""Compiles what clients ask for, in processes of its own and within a budget: a hostile grammar
costs its sender alone."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from jaxllm.grammar.limits import BUDGETS
from jaxllm.grammar.process import COMMAND, Compiler, Verdict
from jaxllm.grammar.structure import StructuredOutputsParams

MAX_KEPT = 1024
MAX_KEPT_BYTES = 16 << 20


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
    """`compile(job)` gives a grammar that compiles, or raises StructureError; so does `within(job,
    lane)`, or it gives up. Each lane has a budget and a process of its own, so that quick grammars
    do not wait for slow ones; calls for one lane wait for each other."""

    def __init__(self, specials: Mapping[str, int], command: Sequence[str] = COMMAND):
        self._compilers = [Compiler(specials, seconds, command) for seconds in BUDGETS]
        self._keeping = threading.Lock()  # of what is kept; never held for long
        self._kept: OrderedDict[bytes, Verdict] = OrderedDict()  # oldest first
        self._kept_bytes = 0

    def check(self, params: StructuredOutputsParams) -> str:
        """`compile` of what `params` ask for. Raises StructureError."""
        return self.compile(job_of(params))

    def compile(self, job: Job) -> str:
        """The grammar in llguidance's serialised form. Raises StructureError with the compiler's
        reason."""
        grammar = self.within(job, len(BUDGETS) - 1)
        assert grammar is not None
        return grammar

    def within(self, job: Job, lane: int) -> str | None:
        """What `compile` gives, or None when that takes longer than this lane's budget and others
        have more. Raises StructureError."""
        verdict = self._recall(job.key)
        if verdict is None:
            verdict = self._compilers[lane].ask(job.line)
            if verdict.spent and lane < len(BUDGETS) - 1:
                return None
            if verdict.final:
                self._keep(job.key, verdict)
        return verdict.for_kind(job.kind)

    def known(self, job: Job) -> str | None:
        """What `compile` gives when that was found before, else None; waits for nobody. Raises
        StructureError as `compile`."""
        verdict = self._recall(job.key)
        return None if verdict is None else verdict.for_kind(job.kind)

    def close(self) -> None:
        """End the processes, whatever they are doing; what is known stays. A check that waits for
        one ends with an error."""
        for compiler in self._compilers:
            compiler.close()

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
    """The texts that llguidance takes for one token that plain text never makes: id of each."""
    added = tokenizer.get_added_tokens_decoder()
    return {
        t.content: id
        for id, t in added.items()
        if t.special or (t.content.startswith("<") and t.content.endswith(">"))
    }


def _size(verdict: Verdict) -> int:
    return len(verdict.grammar) + len(verdict.error) + 64
