"""What runs the stages of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxllm.engine.runtime.lattice import Programs
from jaxllm.engine.runtime.pipeline.follower import StageFollower
from jaxllm.engine.runtime.pipeline.handover import Handover
from jaxllm.engine.runtime.pipeline.stages import EarlierStages, StageDispatcher
from jaxllm.engine.runtime.pooling_runner import PoolingRunner
from jaxllm.engine.runtime.runner import Runner
from jaxllm.engine.startup.model_plan import ModelPlan
from jaxllm.engine.startup.report import Report

type Running = Runner | PoolingRunner | StageFollower


class Loaded(NamedTuple):
    """A stage, mostly the only one: programs that are compiled, and weights on the devices."""

    programs: Programs
    weights: tuple[jax.Array, ...]


def make_runner(model: ModelPlan, loaded: Sequence[Loaded], report: Report) -> Running:
    """What runs the programs of this process's stages, with new pages; `model` is of the last of
    them."""
    with report.phase("Allocating KV pages"):
        shapes = [stage.programs.shapes for stage in loaded]
        pages = [own.zeros(own.kv) for own in shapes]
        jax.block_until_ready(pages)
    programs, weights = loaded[-1]
    if model.spec.pooling is not None:
        return PoolingRunner(programs, weights, pages[-1])
    if model.stage.count == 1:
        return Runner(programs, weights, pages[-1])
    last = model.stage
    first = loaded[0].programs.shapes.stage
    way_in = None
    if not first.is_first:
        way_in = _handover(model, first.index)
    stages = [
        StageDispatcher(stage.programs, stage.weights, kv)
        for stage, kv in zip(loaded, pages, strict=True)
        if not stage.programs.shapes.stage.is_last
    ]
    if last.is_last:
        return Runner(programs, weights, pages[-1], EarlierStages(stages, way_in))
    return StageFollower(stages, way_in, _handover(model, last.index + 1))


def _handover(model: ModelPlan, to: int) -> Handover:
    """From the stage before this one, of another process."""
    return Handover(model.meshes[to - 1], model.meshes[to], model.spec.width)
