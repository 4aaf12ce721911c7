"""Stages of a process that follows: the controller has the last one."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.engine.runtime.launch import Launch
from jaxllm.engine.runtime.pipeline.handover import Handover
from jaxllm.engine.runtime.pipeline.stages import (
    FORWARDS,
    EarlierStages,
    StageDispatcher,
    pass_stages,
)
from jaxllm.engine.scheduling.kv_offload import Link


class StageFollower(EarlierStages):
    """Does for its stages what the runner of another process tells, the warm-up included.

    `way_in` comes from the stage before, and `way_out` leads to the one behind, each of another
    process; the first stage of all has no way in.
    """

    def __init__(
        self, stages: Sequence[StageDispatcher], way_in: Handover | None, way_out: Handover
    ):
        super().__init__(stages, way_in)
        self._way_out = way_out
        self.compiles = self.stages[-1].compiles

    def run(self, launch: Launch) -> None:
        """Dispatch what concerns these stages; the draw and what follows it do not."""
        for key, buffer in launch.calls:
            if key.program in FORWARDS:
                inputs = pass_stages(self.stages, key, buffer, self.way_in)
                (hidden,) = self.stages[-1].call(key, *inputs)
                self._way_out.send(hidden)
            else:
                self.dispatch(key, buffer)

    def warm_up(self, deep: bool = False) -> list[Link]:
        """Run the programs that need no other process."""
        return super().warm_up()
