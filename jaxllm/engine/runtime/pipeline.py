"""Launches the plans of a model whose layers are divided into stages, each on devices of its own.

A step is a forward of every stage, one after another, and a draw on the last. Hidden states go from
devices to devices, never through the host. Every stage keeps the slot state by itself: it gets the
uploads of every step, and later the tokens that the last stage has drawn.

While a step of one group of requests runs on the second stage, one of another group runs on the
first. Devices run their programs in the order in which they were dispatched. So the tokens of a
step are handed to the other stages just before the group's next step: sooner, they would make a
stage wait whose next program is of another group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.cache.kv import KVCache
from jaxllm.engine.runtime.dispatch import Dispatcher
from jaxllm.engine.runtime.lattice import Programs
from jaxllm.engine.runtime.program import Key
from jaxllm.engine.runtime.runner import RECORDING_RUNS, Forwarded, Runner, StepResult
from jaxllm.engine.scheduling.plan import Moves, Plan

FORWARDS = ("decode", "extend")
EVERYWHERE = ("update_slots", "copy_pages")  # every stage runs them with the same buffer


class StageDispatcher(Dispatcher):
    """A stage that is not the last."""

    def __init__(self, programs: Programs, weights: tuple[Array, ...], kv: KVCache):
        super().__init__(programs, weights, kv)
        self._start_empty(kv)


class PipelineRunner(Runner):
    """A `Runner` of the last stage that has the stages `before` it do their part."""

    def __init__(
        self,
        before: Sequence[StageDispatcher],
        programs: Programs,
        weights: tuple[Array, ...],
        kv: KVCache,
        eos_ids: list[int],
    ):
        self._before = tuple(before)
        self._drawn: Array | None = None  # of the last draw
        # What the other stages have yet to learn of each group's last step: the program, and what
        # each of them gives it
        self._untold: dict[int, tuple[Key, list[Array]]] = {}
        super().__init__(programs, weights, kv, eos_ids)

    def forward(self, plan: Plan) -> Forwarded:
        """As of `Runner`."""
        if (untold := self._untold.pop(plan.group, None)) is not None:
            key, drawn = untold
            for stage, own in zip(self._before, drawn, strict=True):
                stage.call(key, own)
        return super().forward(plan)

    def draw(self, forwarded: Forwarded) -> StepResult:
        """As of `Runner`."""
        result = super().draw(forwarded)
        drawn = [jax.device_put(self._drawn, stage.shapes.replicated) for stage in self._before]
        self._untold[forwarded.plan.group] = Key("advance", (forwarded.logit_rows,)), drawn
        return result

    def dispatch(self, key: Key, buffer: np.ndarray | None) -> list[Array]:
        """As of `Dispatcher`, on every stage that it concerns."""
        for stage in self._before if key.program in EVERYWHERE else ():
            stage.dispatch(key, buffer)
        return super().dispatch(key, buffer)

    def call(self, key: Key, *inputs: Any) -> list[Any]:
        """As of `Dispatcher`; a forward goes through all stages."""
        for stage, after in pairwise((*self._before, self)) if key.program in FORWARDS else ():
            (handed,) = stage.call(key, *inputs)
            inputs = (jax.device_put(handed, after.shapes.replicated),)
        results = super().call(key, *inputs)
        if key.program == "sample":
            self._drawn = results.pop()
        return results

    def move(self, moves: Moves) -> None:
        """As of `Dispatcher`: each stage moves what its layers have of the pages."""
        for stage in self._before:
            stage.move(moves)
        super().move(moves)

    def lost(self) -> list[int]:
        """As of `Dispatcher`: a page is lost with one stage's part of it."""
        others = [place for stage in self._before for place in stage.lost()]
        return sorted({*super().lost(), *others})

    def warm_up(self, deep: bool = False) -> None:
        """As of `Runner`. A group has one step in flight while its next one is planned."""
        links = []
        for stage in self._before:
            for rows in stage.shapes.buckets.logits:
                for _ in range(RECORDING_RUNS):
                    nothing = jnp.full((2, rows), self.slots + 1, jnp.int32)
                    nothing = jax.device_put(nothing, stage.shapes.replicated)
                    stage.call(Key("advance", (rows,)), nothing)
            if stage.swapper is not None:
                stage.kv, link = stage.swapper.warm_up(stage.kv)
                links.append(link)
        super().warm_up(deep)
        if self.link is not None:  # stages move pages at the same time
            self.link = max([self.link, *links], key=lambda link: link.seconds(link.width))
        self.depth = 1

    def sleep(self, keep_weights: bool) -> None:
        """As of `Dispatcher`, on every stage."""
        self._untold.clear()
        self._drawn = None
        for stage in self._before:
            stage.sleep(keep_weights)
        super().sleep(keep_weights)

    def wake(self, weights: tuple[Array, ...] | None = None) -> None:
        """As of `Dispatcher`; `weights` are one stage's after another's."""
        for stage in self._before:
            own = None
            if weights is not None:
                own, weights = weights[: stage.num_weights], weights[stage.num_weights :]
            stage.wake(own)
        super().wake(weights)

    def reset(self) -> None:
        """As of `Dispatcher`, on every stage."""
        self._untold.clear()
        for stage in self._before:
            stage.reset()
        super().reset()
