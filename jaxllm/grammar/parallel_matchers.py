"""Many matchers at once, on all cores, beside the caller's thread."""

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
    """Accepts tokens and computes masks for many matchers. Not thread-safe.

    Between `start_masks` and `wait_masks` (or `settle`) the matchers may not be used.
    """

    def __init__(self) -> None:
        self._executor = LLExecutor()
        self._background = BackgroundThread("masks")
        # For `timed_masks`; has no thread before
        self._cores = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="mask")
        self._job: Future[None] | None = None
        self._bits_RW = np.zeros((0, 0), np.uint32)
        self._matchers: Sequence[Matcher] = ()
        self.took = 0.0  # seconds of the last masks, by the clock

    def accept_each(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> list[bool]:
        """Let each matcher accept its token. Returns whether it follows the grammar; a matcher that
        fails holds its error."""
        return self._executor.consume_token_par(
            [(matcher.state, token) for matcher, token in zip(matchers, tokens, strict=True)]
        )

    def start_masks(self, matchers: Sequence[Matcher]) -> None:
        """Start to compute the next masks. That of a single matcher is computed in `wait_masks`:
        waking a thread takes longer than most masks."""
        self.settle()
        self._matchers = matchers
        if len(self._bits_RW) < len(matchers):
            self._bits_RW = np.zeros((len(matchers), matchers[0].mask_words), np.uint32)
        if len(matchers) > 1:
            self._job = self._background.submit(self._compute)

    def wait_masks(self) -> np.ndarray:
        """The masks `[R, W]` of the last `start_masks`, as `Matcher.apply_mask` gives them, valid
        until the next one.

        A matcher that failed holds its error and has any mask. Raises whatever native code raises.
        """
        job, self._job = self._job, None
        if job is not None:
            job.result()
        elif self._matchers:
            start = time.perf_counter()
            self._matchers[0].compute_mask(self._bits_RW[0])
            self.took = time.perf_counter() - start
        return self._bits_RW[: len(self._matchers)]

    def timed_masks(self, matchers: Sequence[Matcher]) -> tuple[np.ndarray, list[float]]:
        """The next masks `[R, W]`, and the seconds of processor time of each."""

        def timed(matcher: Matcher, bits_W: np.ndarray) -> float:
            start = time.thread_time()
            matcher.compute_mask(bits_W)
            return time.thread_time() - start

        self.settle()
        bits_RW = np.zeros((len(matchers), matchers[0].mask_words), np.uint32)
        return bits_RW, list(self._cores.map(timed, matchers, bits_RW))

    def settle(self) -> None:
        """Wait until no thread uses a matcher."""
        self._background.settle()
        self._job = None

    def _compute(self) -> None:
        rows = [(matcher.state, row) for row, matcher in enumerate(self._matchers)]
        bits_RW, start = self._bits_RW, time.perf_counter()
        self._executor.unsafe_compute_mask_ptr(
            rows, bits_RW.ctypes.data, bits_RW.shape[1] * 4, len(bits_RW)
        )
        self.took = time.perf_counter() - start
