"""Many matchers at once, on all cores, while the caller does something else."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor

from jaxllm.background_thread import BackgroundThread
from jaxllm.grammar.matcher import Matcher


class ParallelMatchers:
    """`advance` tells matchers a token each. `begin` starts to find their next masks and returns at
    once; until `masks` or `settle` nothing may be done with them. Not thread-safe."""

    def __init__(self) -> None:
        self._executor = LLExecutor()
        self._beside = BackgroundThread("masks")
        # Of `measured`; has no thread before
        self._cores = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="mask")
        self._job: Future[None] | None = None
        self._bits_RW = np.zeros((0, 0), np.uint32)
        self._matchers: Sequence[Matcher] = ()
        self.took = 0.0  # seconds that the last masks took, by the clock

    def advance(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> list[bool]:
        """Whether each one's token follows its grammar; one that fails has its error."""
        return self._executor.consume_token_par(
            [(matcher.state, token) for matcher, token in zip(matchers, tokens, strict=True)]
        )

    def begin(self, matchers: Sequence[Matcher]) -> None:
        """Start to find the next masks of these. One alone is looked at in `masks`: a thread would
        take longer to wake than most masks."""
        self.settle()
        self._matchers = matchers
        if len(self._bits_RW) < len(matchers):
            self._bits_RW = np.zeros((len(matchers), matchers[0].size), np.uint32)
        if len(matchers) > 1:
            self._job = self._beside.begin(self._find)

    def masks(self) -> np.ndarray:
        """The masks `[R, W]` of those of the last `begin`, in its order, as `Matcher.mask` gives
        them, valid until the next one. A matcher that failed has its error, and any mask. Raises
        whatever native code raises."""
        job, self._job = self._job, None
        if job is not None:
            job.result()
        elif self._matchers:
            start = time.perf_counter()
            self._matchers[0].find(self._bits_RW[0])
            self.took = time.perf_counter() - start
        return self._bits_RW[: len(self._matchers)]

    def measured(self, matchers: Sequence[Matcher]) -> tuple[np.ndarray, list[float]]:
        """The next masks of these, and the seconds of processor time that each took."""

        def cost(matcher: Matcher, bits_W: np.ndarray) -> float:
            start = time.thread_time()
            matcher.find(bits_W)
            return time.thread_time() - start

        self.settle()
        bits_RW = np.zeros((len(matchers), matchers[0].size), np.uint32)
        return bits_RW, list(self._cores.map(cost, matchers, bits_RW))

    def settle(self) -> None:
        """Wait until nobody looks at a matcher."""
        self._beside.settle()
        self._job = None

    def _find(self) -> None:
        rows = [(matcher.state, row) for row, matcher in enumerate(self._matchers)]
        bits_RW, start = self._bits_RW, time.perf_counter()
        self._executor.unsafe_compute_mask_ptr(
            rows, bits_RW.ctypes.data, bits_RW.shape[1] * 4, len(bits_RW)
        )
        self.took = time.perf_counter() - start
