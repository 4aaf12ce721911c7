"""The stages of a pipeline that are not its last one, and how a forward passes stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxllm.cache.kv import KVCache
from jaxllm.engine.runtime.dispatch import Dispatcher
from jaxllm.engine.runtime.lattice import Programs
from jaxllm.engine.runtime.pipeline.handover import Handover
from jaxllm.engine.runtime.program import Key
from jaxllm.engine.runtime.runner import RECORDING_RUNS
from jaxllm.engine.scheduling.kv_offload import Link
from jaxllm.engine.scheduling.plan import Moves

ADVANCE = "advance"
FORWARDS = ("decode", "extend")
EVERYWHERE = ("update_slots", "copy_pages")  # every stage runs them with the same buffer


class StageDispatcher(Dispatcher):
    """A stage that is not the last."""

    def __init__(self, programs: Programs, weights: tuple[Array, ...], kv: KVCache):
        super().__init__(programs, weights, kv)
        self._start_empty(kv)


def pass_stages(
    stages: Sequence[Dispatcher], key: Key, buffer: np.ndarray | None, way_in: Handover | None
) -> tuple[Array, ...]:
    """Run a forward on all these stages but the last of them. Returns what that one takes: what the
    host brings to all of them in `buffer`, and what it is handed.

    `way_in` leads to the first one from a stage of another process; there is none to the first of
    all, which is handed nothing.
    """
    handed: tuple[Array, ...] = ()
    if way_in is not None:
        handed = (way_in.receive(stages[0].programs.variant(key).takes[-1]),)
    for stage, after in pairwise(stages):
        (given,) = stage.call(key, *stage.sent(key, buffer), *handed)
        handed = (jax.device_put(given, after.shapes.replicated),)
    return (*stages[-1].sent(key, buffer), *handed)


class EarlierStages(tuple[StageDispatcher, ...]):
    """The stages of this process before the last one of all, in order. What is done to one is done
    to each."""

    def place(self, drawn: ArrayLike) -> list[Array]:
        """What `advance` takes, [2, Q], for each."""
        return [jax.device_put(drawn, stage.shapes.replicated) for stage in self]

    def advance(self, key: Key, drawn: Sequence[Array]) -> None:
        """Bring the slots up to date with the tokens that the last stage has drawn."""
        for stage, own in zip(self, drawn, strict=True):
            stage.call(key, own)

    def dispatch(self, key: Key, buffer: np.ndarray | None) -> None:
        """A program of a launch, if it concerns these stages and is no forward."""
        if key.program == ADVANCE:
            assert buffer is not None
            self.advance(key, self.place(buffer.reshape(2, -1)))
        for stage in self if key.program in EVERYWHERE else ():
            stage.dispatch(key, buffer)

    def move(self, moves: Moves) -> None:
        """As of `Dispatcher`: each moves what its layers have of the pages."""
        for stage in self:
            stage.move(moves)

    def lost(self) -> list[int]:
        """As of `Dispatcher`."""
        return [place for stage in self for place in stage.lost()]

    def fetches_done(self) -> bool:
        """As of `Dispatcher`."""
        return all(stage.fetches_done() for stage in self)

    def warm_up(self) -> list[Link]:
        """Run the programs that no step of the last stage runs; returns the links to host memory
        as measured."""
        links = []
        for stage in self:
            for rows in stage.shapes.buckets.logits:
                for _ in range(RECORDING_RUNS):
                    nothing = jnp.full((2, rows), stage.shapes.slots + 1, jnp.int32)
                    nothing = jax.device_put(nothing, stage.shapes.replicated)
                    stage.call(Key(ADVANCE, (rows,)), nothing)
            if stage.swapper is not None:
                stage.kv, link = stage.swapper.warm_up(stage.kv)
                links.append(link)
        return links

    def sleep(self, keep_weights: bool) -> None:
        """As of `Dispatcher`."""
        for stage in self:
            stage.sleep(keep_weights)

    def release(self, *, keep_pages: bool) -> tuple[Array, ...]:
        """As of `Dispatcher`; one stage's weights after another's."""
        return tuple(weight for stage in self for weight in stage.release(keep_pages=keep_pages))

    def wake(self, weights: tuple[Array, ...] | None) -> tuple[Array, ...] | None:
        """As of `Dispatcher`; `weights` are one stage's after another's, and those of stages behind
        these are returned."""
        for stage in self:
            own = None
            if weights is not None:
                own, weights = weights[: stage.num_weights], weights[stage.num_weights :]
            stage.wake(own)
        return weights

    def reset(self) -> None:
        """As of `Dispatcher`."""
        for stage in self:
            stage.reset()
