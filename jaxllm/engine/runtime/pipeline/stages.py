"""The stages of a pipeline that are not its last one, and how a forward passes stages.

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
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxllm.cache.arrays import KVCache
from jaxllm.engine.runtime.dispatch import RECORDING_RUNS, Call, Dispatcher
from jaxllm.engine.runtime.lattice import Programs
from jaxllm.engine.runtime.launch import begin_read, read
from jaxllm.engine.runtime.pipeline.handover import Handover
from jaxllm.engine.runtime.program import Key
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
        handed = (way_in.receive(stages[0].programs.variant(key).handed),)
    for stage, after in pairwise(stages):
        (hidden,) = stage.call(key, *stage.sent(key, buffer), *handed)
        handed = (jax.device_put(hidden, after.shapes.replicated),)
    return (*stages[-1].sent(key, buffer), *handed)


class EarlierStages:
    """The stages of this process before the last one of all, in order: a `StagesBefore`. What is
    done to one is done to each.

    Attributes:
        stages: the stages; none where all are on other hosts.
        way_in: leads to the first stage of this process from the one before on another host, if
            there is one.
    """

    def __init__(self, stages: Sequence[StageDispatcher], way_in: Handover | None = None):
        self.stages = tuple(stages)
        self.way_in = way_in
        # What the other stages have yet to learn of each group's last step: for each of them, or,
        # over hosts, for all
        self._untold: dict[int, list[Array]] = {}

    def catch_up(self, group: int) -> None:
        """As of `StagesBefore`; over hosts it is part of the launch."""
        if self.way_in is None and (drawn := self._untold.pop(group, None)) is not None:
            self._advance(drawn)

    def news(self, group: int) -> tuple[Call, ...]:
        """As of `StagesBefore`."""
        drawn = self._untold.pop(group, None)
        if drawn is None:
            return ()
        (tokens,) = drawn
        return ((_advance_key(tokens), read(tokens).ravel()),)

    def drawn(self, group: int, tokens: Array) -> None:
        """As of `StagesBefore`."""
        if self.way_in is None:
            self._untold[group] = self._place(tokens)
        else:
            begin_read(tokens)
            self._untold[group] = [tokens]

    def inputs(
        self, key: Key, buffer: np.ndarray | None, last: Dispatcher
    ) -> tuple[Array, ...] | None:
        """As of `StagesBefore`."""
        if key.program in FORWARDS:
            return pass_stages((*self.stages, last), key, buffer, self.way_in)
        self.dispatch(key, buffer)
        if key.program == ADVANCE:
            return None
        return last.sent(key, buffer)

    def dispatch(self, key: Key, buffer: np.ndarray | None) -> None:
        """A program of a launch, if it concerns these stages and is no forward."""
        if key.program == ADVANCE:
            assert buffer is not None
            self._advance(self._place(buffer.reshape(2, -1)))
        if key.program in EVERYWHERE:
            for stage in self.stages:
                stage.dispatch(key, buffer)

    def move(self, moves: Moves) -> None:
        """As of `StagesBefore`."""
        for stage in self.stages:
            stage.move(moves)

    def lost(self) -> list[int]:
        """As of `StagesBefore`: a page is lost with one stage's part of it."""
        return [place for stage in self.stages for place in stage.lost()]

    def fetches_done(self) -> bool:
        """As of `StagesBefore`."""
        return all(stage.fetches_done() for stage in self.stages)

    def warm_up(self) -> list[Link]:
        """As of `StagesBefore`."""
        links = []
        for stage in self.stages:
            for rows in stage.shapes.buckets.logits:
                for _ in range(RECORDING_RUNS):
                    nothing = jnp.full((2, rows), stage.shapes.slots + 1, jnp.int32)
                    nothing = jax.device_put(nothing, stage.shapes.replicated)
                    stage.call(_advance_key(nothing), nothing)
            if stage.swapper is not None:
                stage.kv, link = stage.swapper.warm_up(stage.kv)
                links.append(link)
        return links

    def sleep(self, level: int) -> None:
        """As of `StagesBefore`."""
        self._untold.clear()
        for stage in self.stages:
            stage.sleep(level)

    def release(self, *, keep_pages: bool) -> tuple[Array, ...]:
        """As of `StagesBefore`."""
        self._untold.clear()
        return tuple(
            weight for stage in self.stages for weight in stage.release(keep_pages=keep_pages)
        )

    def wake_up(self, weights: tuple[Array, ...] | None = None) -> tuple[Array, ...] | None:
        """As of `StagesBefore`."""
        for stage in self.stages:
            if weights is None:
                stage.wake_up()
            else:
                stage.wake_up(weights[: stage.num_weights])
                weights = weights[stage.num_weights :]
        return weights

    def reset(self) -> None:
        """As of `StagesBefore`."""
        self._untold.clear()
        for stage in self.stages:
            stage.reset()

    def _place(self, drawn: ArrayLike) -> list[Array]:
        """What `advance` takes, [2, Q], for each stage."""
        return [jax.device_put(drawn, stage.shapes.replicated) for stage in self.stages]

    def _advance(self, drawn: Sequence[Array]) -> None:
        """Bring the slots up to date with the tokens that the last stage has drawn."""
        for stage, tokens in zip(self.stages, drawn, strict=True):
            stage.call(_advance_key(tokens), tokens)


def _advance_key(drawn: Array) -> Key:
    """The program that takes these tokens, [2, Q]."""
    return Key(ADVANCE, (drawn.shape[1],))
