"""Launches the plans of a model whose layers are divided into stages, each on devices of its own.

A step is a forward of every stage, one after another, and a draw on the last. Hidden states go from
devices to devices, never through the host. Every stage keeps the slot state by itself: it gets the
uploads of every step, and later the tokens that the last stage has drawn.

While a step of one group of requests runs on the second stage, one of another group runs on the
first. Devices run their programs in the order in which they were dispatched. So the tokens of a
step are handed to the other stages just before the group's next step: sooner, they would make a
stage wait whose next program is of another group.

Stages may lie on several hosts, the last one on the controller's. Followers run their part of each
launch, so every process hands over hidden states in the order of the launches. The tokens of a step
are then part of the group's next launch, and the controller waits for them before it tells that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array

from jaxllm.cache.kv import KVCache
from jaxllm.engine.runtime.lattice import Programs
from jaxllm.engine.runtime.launch import Launch, begin_read, read
from jaxllm.engine.runtime.pipeline.handover import Handover
from jaxllm.engine.runtime.pipeline.stages import (
    ADVANCE,
    FORWARDS,
    EarlierStages,
    StageDispatcher,
    pass_stages,
)
from jaxllm.engine.runtime.program import Key
from jaxllm.engine.runtime.runner import Forwarded, Runner, StepResult
from jaxllm.engine.scheduling.buckets import ExtendShape
from jaxllm.engine.scheduling.plan import Moves, Plan


class PipelineRunner(Runner):
    """A `Runner` of the last stage that has the stages `before` it do their part.

    `way_in` leads to the first stage of this process from the one before on another host, if there
    is one.
    """

    def __init__(
        self,
        before: Sequence[StageDispatcher],
        programs: Programs,
        weights: tuple[Array, ...],
        kv: KVCache,
        eos_ids: list[int],
        way_in: Handover | None = None,
    ):
        self._before, self._way_in = EarlierStages(before), way_in
        self._drawn: Array | None = None  # of the last draw
        # What the other stages have yet to learn of each group's last step: the program, and what
        # each of them gives it; over hosts, what all of them do
        self._untold: dict[int, tuple[Key, list[Array]]] = {}
        super().__init__(programs, weights, kv, eos_ids)

    def forward(self, plan: Plan) -> Forwarded:
        """As of `Runner`. Over hosts it waits for the group's step before."""
        if self._way_in is None and (untold := self._untold.pop(plan.group, None)) is not None:
            self._before.advance(*untold)
        return super().forward(plan)

    def pack(self, plan: Plan, shape: int | ExtendShape) -> Launch:
        """As of `Runner`; first what others have yet to learn."""
        launch = super().pack(plan, shape)
        if (untold := self._untold.pop(plan.group, None)) is None:
            return launch
        key, (drawn,) = untold
        return Launch(((key, read(drawn).ravel()), *launch.calls))

    def draw(self, forwarded: Forwarded) -> StepResult:
        """As of `Runner`."""
        result = super().draw(forwarded)
        assert self._drawn is not None
        if self._way_in is None:
            told = self._before.place(self._drawn)
        else:
            begin_read(self._drawn)
            told = [self._drawn]
        self._untold[forwarded.plan.group] = Key(ADVANCE, (forwarded.logit_rows,)), told
        return result

    def dispatch(self, key: Key, buffer: np.ndarray | None) -> list[Array]:
        """As of `Dispatcher`, on every stage that it concerns; a forward goes through all."""
        if key.program in FORWARDS:
            return self.call(key, *pass_stages((*self._before, self), key, buffer, self._way_in))
        self._before.dispatch(key, buffer)
        return [] if key.program == ADVANCE else super().dispatch(key, buffer)

    def call(self, key: Key, *inputs: Any) -> list[Any]:
        """As of `Dispatcher`."""
        results = super().call(key, *inputs)
        if key.program == "sample":
            self._drawn = results.pop()
        return results

    def move(self, moves: Moves) -> None:
        """As of `Dispatcher`."""
        self._before.move(moves)
        super().move(moves)

    def lost(self) -> list[int]:
        """As of `Dispatcher`: a page is lost with one stage's part of it."""
        return sorted({*super().lost(), *self._before.lost()})

    def fetches_done(self) -> bool:
        """As of `Dispatcher`."""
        return super().fetches_done() and self._before.fetches_done()

    def warm_up(self, deep: bool = False) -> None:
        """As of `Runner`. A group has one step in flight while its next one is planned."""
        links = self._before.warm_up()
        super().warm_up(deep)
        if self.link is not None:  # stages move pages at the same time
            self.link = max([self.link, *links], key=lambda link: link.seconds(link.width))
        self.depth = 1

    def sleep(self, keep_weights: bool) -> None:
        """As of `Dispatcher`, on every stage."""
        self._untold.clear()
        self._drawn = None
        self._before.sleep(keep_weights)
        super().sleep(keep_weights)

    def release(self, *, keep_pages: bool) -> tuple[Array, ...]:
        """As of `Dispatcher`; one stage's weights after another's."""
        self._untold.clear()
        self._drawn = None
        before = self._before.release(keep_pages=keep_pages)
        return before + super().release(keep_pages=keep_pages)

    def wake(self, weights: tuple[Array, ...] | None = None) -> None:
        """As of `Dispatcher`; `weights` are one stage's after another's."""
        super().wake(self._before.wake(weights))

    def reset(self) -> None:
        """As of `Dispatcher`, on every stage."""
        self._untold.clear()
        self._before.reset()
        super().reset()
