"""Stages of a process that follows: the controller has the last one."""

from __future__ import annotations

from collections.abc import Sequence

from jax import Array

from jaxllm.engine.runtime.launch import Launch
from jaxllm.engine.runtime.pipeline.handover import Handover
from jaxllm.engine.runtime.pipeline.stages import (
    FORWARDS,
    EarlierStages,
    StageDispatcher,
    pass_stages,
)
from jaxllm.engine.scheduling.plan import Moves


class StageFollower:
    """Does for its stages what the `PipelineRunner` of another process tells, the warm-up included.

    `way_in` comes from the stage before, and `way_out` leads to the one behind, each of another
    process; the first stage of all has no way in.
    """

    def __init__(
        self, stages: Sequence[StageDispatcher], way_in: Handover | None, way_out: Handover
    ):
        self._stages, self._way_in, self._way_out = EarlierStages(stages), way_in, way_out
        self.compiles = stages[-1].compiles

    def run(self, launch: Launch) -> None:
        """Dispatch what concerns these stages; the draw and what follows it do not."""
        for key, buffer in launch.calls:
            if key.program in FORWARDS:
                inputs = pass_stages(self._stages, key, buffer, self._way_in)
                (given,) = self._stages[-1].call(key, *inputs)
                self._way_out.send(given)
            else:
                self._stages.dispatch(key, buffer)

    def warm_up(self, deep: bool = False) -> None:
        """Run the programs that need no other process."""
        self._stages.warm_up()

    def move(self, moves: Moves) -> None:
        """As of `Dispatcher`."""
        self._stages.move(moves)

    def lost(self) -> list[int]:
        """As of `Dispatcher`."""
        return self._stages.lost()

    def sleep(self, keep_weights: bool) -> None:
        """As of `Dispatcher`."""
        self._stages.sleep(keep_weights)

    def release(self, *, keep_pages: bool) -> tuple[Array, ...]:
        """As of `Dispatcher`; one stage's weights after another's."""
        return self._stages.release(keep_pages=keep_pages)

    def wake(self, weights: tuple[Array, ...] | None = None) -> None:
        """As of `Dispatcher`; `weights` are one stage's after another's."""
        self._stages.wake(weights)

    def reset(self) -> None:
        """As of `Dispatcher`."""
        self._stages.reset()
