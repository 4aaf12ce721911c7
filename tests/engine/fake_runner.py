"""A runner around the device without arithmetic, for tests of a whole engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxllm.engine.runtime.compilation.compile_counter import CompileCounter
from jaxllm.engine.runtime.dispatch import NoStages
from jaxllm.engine.runtime.runner import (
    ALL_USED,
    Collected,
    Forwarded,
    Runner,
    UnusedDraws,
    token_rows,
)
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.scheduling.plan import Plan, Traffic
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.logprobs import StepLogprobs
from jaxllm.sampling.bits import everything
from tests.engine.fake_device import VOCAB, FakeDevice

TOP = 3  # most likely tokens of a row of log-probabilities


class Drawn(NamedTuple):
    """A step in flight, whose tokens are known."""

    plan: Plan
    tokens: np.ndarray
    logprobs: np.ndarray
    unused: UnusedDraws

    @property
    def group(self) -> int:
        """As of `StepResult`."""
        return self.plan.group


class FakeRunner(Runner):
    """Runs plans on a `FakeDevice`. Each step's tokens are an array `[Q, inputs]`; `[Q]` where
    decodes have one input."""

    def __init__(self, device: FakeDevice, buckets: Buckets, inputs: int, depth: int):
        self.device = device
        self.shapes: Any = _Shapes(buckets)
        self.depth = depth
        self.seconds = {}
        self.swapper = None
        self._traffic = Traffic()
        self.compiles = CompileCounter()
        self.before = NoStages()
        self._inputs = inputs
        self._drafts: list[list[int]] = []
        self._allowed: dict[Request, np.ndarray] = {}

    def reset(self) -> None:
        """As of `Dispatcher`; tests see the error that led here."""

    def forward(self, plan: Plan) -> Forwarded:
        """As of `Runner`."""
        self._drafts = self.device.forward(plan, set())
        return Forwarded(plan, range(len(plan.emitters)), len(plan.emitters), frozenset(), None)

    def apply_token_bitmask(
        self,
        requests: Sequence[Request],
        token_bitmask: Callable[[Sequence[Request], np.ndarray], list[tuple[int, str]]],
    ) -> list[tuple[Request, str]]:
        """As of `Runner`."""
        allowed_RW = np.zeros((len(requests), everything(VOCAB).size), np.uint32)
        failures = token_bitmask(requests, allowed_RW)
        self._allowed = dict(zip(requests, allowed_RW, strict=True))
        return [(requests[row], reason) for row, reason in failures]

    def draw(self, forwarded: Forwarded, unused: UnusedDraws = ALL_USED) -> Any:
        """As of `Runner`; first tokens follow the masks."""
        plan = forwarded.plan
        rows = self.device.sample(plan, self._drafts)
        tokens = np.full((len(rows), self._inputs), -1, np.int32)
        logprobs = np.zeros((len(rows), self._inputs, 2 + 2 * TOP), np.int32)
        for number, (request, row) in enumerate(zip(plan.emitters, rows, strict=True)):
            tokens[number, : len(row)] = row
            for place, token in enumerate(row):
                logprobs[number, place] = token, *range(1 + 2 * TOP)
            if request is None or request in unused or request.status is not Status.RUNNING:
                continue
            mask_W = self._allowed.get(request)
            if mask_W is not None and row:
                assert mask_W[row[0] // 32] >> row[0] % 32 & 1, "the mask does not allow the draw"
        self._allowed = {}
        if self._inputs == 1:
            tokens = tokens[:, 0]
            logprobs = logprobs[:, 0]
        return Drawn(plan, tokens, logprobs, unused)

    def collect(self, result: Any) -> Collected:
        """As of `Runner`."""
        return Collected(
            result.plan,
            token_rows(result.tokens),
            StepLogprobs(result.logprobs),
            [],
            {},
            result.unused,
        )


class _Shapes(NamedTuple):
    """What an engine reads of `StepShapes`."""

    buckets: Buckets

    @property
    def model(self) -> Any:
        """Without processors."""
        return _Model()


class _Model(NamedTuple):
    processors: tuple[()] = ()
