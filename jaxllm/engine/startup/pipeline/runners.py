"""What runs the stages of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxllm.cache.arrays import KVCache
from jaxllm.engine.runtime.lattice import Programs
from jaxllm.engine.runtime.pipeline.follower import StageFollower
from jaxllm.engine.runtime.pipeline.handover import Handover
from jaxllm.engine.runtime.pipeline.stages import EarlierStages, StageDispatcher
from jaxllm.engine.runtime.runner import Runner
from jaxllm.engine.startup.resolve import Setup


class Loaded(NamedTuple):
    """A stage, mostly the only one: decisions with the pool's size, programs that are compiled, and
    weights on the devices."""

    setup: Setup
    programs: Programs
    weights: tuple[jax.Array, ...]


def make_pipeline_runner(
    loaded: Sequence[Loaded], pages: Sequence[KVCache], meshes: Sequence[Mesh]
) -> Runner | StageFollower:
    """What runs these stages of a process, with their `pages`; `meshes` are those of all stages."""
    setup, programs, weights = loaded[-1]
    first, last = loaded[0].setup.stage.index, setup.stage.index
    way_in = None if first == 0 else _handover(meshes, first, setup)
    stages = [
        StageDispatcher(stage.programs, stage.weights, kv)
        for stage, kv in zip(loaded, pages, strict=True)
        if not stage.setup.stage.is_last
    ]
    if setup.stage.is_last:
        return Runner(programs, weights, pages[-1], EarlierStages(stages, way_in))
    return StageFollower(stages, way_in, _handover(meshes, last + 1, setup))


def _handover(meshes: Sequence[Mesh], to: int, setup: Setup) -> Handover:
    """From the stage before this one, of another process."""
    return Handover(meshes[to - 1], meshes[to], setup.spec.width)
