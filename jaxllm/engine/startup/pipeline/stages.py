"""The stages of a pipeline that are not the last of their process: compiled as the last one
decided, at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from jax.sharding import Mesh

from jaxllm import weights
from jaxllm.engine.runtime.compilation.compile_counter import CompileCounter
from jaxllm.engine.runtime.lattice import Programs, Progress
from jaxllm.engine.startup.compile_workers import CompileWorkers
from jaxllm.engine.startup.pipeline.together import Together
from jaxllm.engine.startup.resolve import Setup
from jaxllm.engine.startup.sizing import make_programs
from jaxllm.mesh import over_experts, stages


class StagesBefore:
    """The stages of this process before its last one, with their `meshes`; `compiles` counts
    compilations of all."""

    def __init__(
        self, meshes: Mapping[int, Mesh], workers: CompileWorkers, compiles: CompileCounter
    ):
        self._meshes, self._workers, self._compiles = meshes, workers, compiles
        self._compiling: list[Future[tuple[Setup, Programs]]] = []

    def setups(self, setup: Setup) -> list[Setup]:
        """What the last stage's `setup` says, for each."""
        return [at_stage(setup, mesh, index) for index, mesh in self._meshes.items()]

    def programs(self, setup: Setup) -> Programs:
        """Those of one, uncompiled."""
        programs = make_programs(setup)
        programs.executables.compiles = self._compiles
        return programs

    def begin(self, together: Together, progress: Sequence[Progress], setup: Setup) -> None:
        """Begin to compile, now that the last stage's `setup` is final."""
        for (index, mesh), told in zip(self._meshes.items(), progress, strict=True):
            own = partial(at_stage, setup, mesh, index)
            self._compiling.append(together.begin(partial(self._compile, own, told)))

    def compiled(self) -> list[tuple[Setup, Programs]]:
        """Wait for all. Raises the error of one that failed."""
        return [each.result() for each in self._compiling]

    def _compile(self, own: Callable[[], Setup], progress: Progress) -> tuple[Setup, Programs]:
        programs = self.programs(setup := own())
        self._workers.start(setup, programs, programs.lattice)
        programs.compile_all(progress)
        return setup, programs


def at_stage(setup: Setup, mesh: Mesh, index: int) -> Setup:
    """The same decisions for another stage."""
    stage, mesh = stages(setup.stage.count)[index], over_experts(mesh, setup.mesh.shape["expert"])
    outline = weights.outline(setup.spec, mesh, setup.dtype, stage)
    return replace(setup, mesh=mesh, stage=stage, outline=outline)
