"""Grammars that requests wait for: what is known is there at once, equal ones are compiled once,
and only so many others wait."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from jaxllm.grammar.checker import Checker, Job
from jaxllm.grammar.limits import BUDGETS
from jaxllm.server.errors import overloaded

MAX_GRAMMARS = 64  # that may wait to be compiled, which takes a hostile one a second


@dataclass
class Compilation:
    """One job that is to be compiled, and how many requests wait for it."""

    done: asyncio.Future[str]
    waiting: int = 0


class Grammars:
    """Grammars wait for each other, in lanes (`Checker.within`), and nothing else for them: each
    for what is as quick, and until what is not is given up. One that nobody waits for any more is
    not begun."""

    def __init__(self, checker: Checker):
        self._checker = checker
        self._lanes = [
            ThreadPoolExecutor(1, thread_name_prefix=f"grammar-{lane}")
            for lane in range(len(BUDGETS))
        ]
        self._under_way: dict[bytes, Compilation] = {}

    async def find(self, job: Job) -> str:
        """The grammar of a job. Raises StructureError, or ApiError when too many others wait."""
        grammar = self._checker.cached_grammar(job)
        if grammar is not None:
            return grammar
        compilation = self._under_way.get(job.key) or self._begin(job)
        compilation.waiting += 1
        try:
            # One that stops waiting does not cancel what others wait for
            await asyncio.wait((compilation.done,))
            return compilation.done.result()
        finally:
            compilation.waiting -= 1
            if not compilation.waiting:
                compilation.done.cancel()
                del self._under_way[job.key]

    def _begin(self, job: Job) -> Compilation:
        if len(self._under_way) >= MAX_GRAMMARS:
            raise overloaded(
                f"{len(self._under_way)} grammars wait to be compiled, and no more may; try again later",
                "grammar_queue_full",
            )
        compilation = self._under_way[job.key] = Compilation(
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

    async def close(self) -> None:
        """End the compiler, whatever it is doing."""
        for threads in self._lanes:
            threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._checker.close)
