"""The stages of a pipeline that are not the last: loaded and compiled as the last one decided."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
from jax.sharding import Mesh

from jaxllm import weights
from jaxllm.cache.kv import zeros_of
from jaxllm.config import EngineConfig
from jaxllm.engine.runtime.compilation.compile_counter import CompileCounter
from jaxllm.engine.runtime.lattice import weight_leaves
from jaxllm.engine.runtime.pipeline import StageDispatcher
from jaxllm.engine.startup.report import Report
from jaxllm.engine.startup.resolve import Setup
from jaxllm.engine.startup.sizing import abstract_pages, make_programs
from jaxllm.mesh import over_experts, stages


def start_stages(
    setup: Setup,
    meshes: Sequence[Mesh],
    config: EngineConfig,
    report: Report,
    compiles: CompileCounter,
) -> list[StageDispatcher]:
    """The stages before the last, whose `setup` has all decisions and whose counter counts
    `compiles` of all, on these meshes."""
    own = [at_stage(setup, mesh, index) for index, mesh in enumerate(meshes)]
    with (
        report.phase("Starting the other stages"),
        ThreadPoolExecutor(len(own), thread_name_prefix="stage") as pool,
    ):
        return list(pool.map(lambda each: _start(each, config, compiles), own))


def at_stage(setup: Setup, mesh: Mesh, index: int) -> Setup:
    """The same decisions for another stage."""
    stage, mesh = stages(setup.stage.count)[index], over_experts(mesh, setup.mesh.shape["expert"])
    graphdef, abstract = weights.abstract(setup.spec, mesh, setup.dtype, stage)
    return replace(setup, mesh=mesh, stage=stage, graphdef=graphdef, abstract_weights=abstract)


def _start(setup: Setup, config: EngineConfig, compiles: CompileCounter) -> StageDispatcher:
    programs = make_programs(setup)
    programs.executables.compiles = compiles
    with ThreadPoolExecutor(1, thread_name_prefix="load") as pool:
        loading = pool.submit(_weights, setup, config)
        if not config.enforce_eager:
            programs.compile_all()
        leaves = loading.result()
    kv = zeros_of(abstract_pages(setup))
    jax.block_until_ready(kv)
    return StageDispatcher(programs, leaves, kv)


def _weights(setup: Setup, config: EngineConfig) -> tuple[jax.Array, ...]:
    _, state = weights.load(
        setup.resolved.model_dir,
        setup.spec,
        setup.mesh,
        setup.dtype,
        config.load_format,
        seed=config.seed,
        stage=setup.stage,
    )
    leaves, _ = weight_leaves(state)
    jax.block_until_ready(leaves)
    return leaves
