"""Grammars that requests wait for: cached ones return at once, equal ones are compiled once, and
the queue of others is bounded."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from jaxllm.grammar.checker import Checker, Job
from jaxllm.grammar.limits import BUDGETS
from jaxllm.server.errors import overloaded

MAX_GRAMMARS = 64  # waiting to be compiled; a hostile one takes a second


@dataclass
class Compilation:
    """A job in the queue; `waiting` counts the requests that wait for it."""

    done: asyncio.Future[str]
    waiting: int = 0


class GrammarQueue:
    """Compiles grammars in lanes (`Checker.compile_within`), each with more time than the last.

    A quick grammar waits only for other quick ones, and for slow ones until they leave its lane. A
    job without waiting requests is not begun.
    """

    def __init__(self, checker: Checker):
        self._checker = checker
        self._lanes = [
            ThreadPoolExecutor(1, thread_name_prefix=f"grammar-{lane}")
            for lane in range(len(BUDGETS))
        ]
        self._compiling: dict[bytes, Compilation] = {}

    async def compiled(self, job: Job) -> str:
        """The compiled grammar of a job. Raises StructureError, or ApiError when the queue is
        full."""
        grammar = self._checker.cached_grammar(job)
        if grammar is not None:
            return grammar
        compilation = self._compiling.get(job.key) or self._enqueue(job)
        compilation.waiting += 1
        try:
            # `wait`, because a request that leaves must not cancel the others' compilation
            await asyncio.wait((compilation.done,))
            return compilation.done.result()
        finally:
            compilation.waiting -= 1
            if not compilation.waiting:
                compilation.done.cancel()
                del self._compiling[job.key]

    def _enqueue(self, job: Job) -> Compilation:
        if len(self._compiling) >= MAX_GRAMMARS:
            raise overloaded(
                f"{len(self._compiling)} grammars wait to be compiled, which is the limit; "
                "try again later",
                "grammar_queue_full",
            )
        compilation = self._compiling[job.key] = Compilation(
            asyncio.ensure_future(self._compile(job))
        )
        return compilation

    async def _compile(self, job: Job) -> str:
        loop = asyncio.get_running_loop()
        for lane, threads in enumerate(self._lanes):
            grammar = await loop.run_in_executor(threads, self._checker.compile_within, job, lane)
            if grammar is not None:
                return grammar
        raise AssertionError("the last lane gave up")

    async def shut_down(self) -> None:
        """End the compiler at once."""
        for threads in self._lanes:
            threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._checker.end_processes)
