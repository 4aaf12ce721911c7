"""The stages of a pipeline that are not the last: loaded and compiled as the last one decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax
from jax.sharding import Mesh

from jaxllm import weights
from jaxllm.cache.kv import zeros_of
from jaxllm.engine.runtime.compilation.compile_counter import CompileCounter
from jaxllm.engine.runtime.pipeline import StageDispatcher
from jaxllm.engine.startup.resolve import Setup
from jaxllm.engine.startup.sizing import abstract_pages, make_programs
from jaxllm.mesh import over_experts, stages

type Read = Callable[[Setup], tuple[jax.Array, ...]]  # the weights of a stage, on its devices


def start_stages(
    setup: Setup, meshes: Sequence[Mesh], read: Read, compiles: CompileCounter, eager: bool
) -> list[StageDispatcher]:
    """The stages before the last, whose `setup` has all decisions and whose counter counts
    `compiles` of all, on these meshes; `eager` ones compile each program at its first use."""
    own = [at_stage(setup, mesh, index) for index, mesh in enumerate(meshes)]
    with ThreadPoolExecutor(len(own), thread_name_prefix="stage") as pool:
        return list(pool.map(partial(_start, read=read, compiles=compiles, eager=eager), own))


def at_stage(setup: Setup, mesh: Mesh, index: int) -> Setup:
    """The same decisions for another stage."""
    stage, mesh = stages(setup.stage.count)[index], over_experts(mesh, setup.mesh.shape["expert"])
    graphdef, abstract = weights.abstract(setup.spec, mesh, setup.dtype, stage)
    return replace(setup, mesh=mesh, stage=stage, graphdef=graphdef, abstract_weights=abstract)


def _start(setup: Setup, read: Read, compiles: CompileCounter, eager: bool) -> StageDispatcher:
    programs = make_programs(setup)
    programs.executables.compiles = compiles
    with ThreadPoolExecutor(1, thread_name_prefix="load") as pool:
        loading = pool.submit(read, setup)
        if not eager:
            programs.compile_all()
        leaves = loading.result()
    kv = zeros_of(abstract_pages(setup))
    jax.block_until_ready(kv)
    return StageDispatcher(programs, leaves, kv)
