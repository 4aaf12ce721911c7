"""What the largest step needs, by XLA's own account of compiled programs."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxllm import weights
from jaxllm.config import ConfigError
from jaxllm.engine.runtime.compilation.executables import Executables
from jaxllm.engine.runtime.compilation.exports import Exports
from jaxllm.engine.runtime.lattice import Programs, Progress, needed_bytes
from jaxllm.engine.startup.compile_workers import CompileWorkers, WorkerSpec
from jaxllm.engine.startup.device_client import limit_bytes
from jaxllm.engine.startup.kv_requirements import model_groups
from jaxllm.engine.startup.lattice import Lattice, make_programs, plan_lattice
from jaxllm.engine.startup.memory_plan import MemoryPlan
from jaxllm.engine.startup.model_plan import ModelPlan
from jaxllm.engine.startup.together import Together, shares
from jaxllm.mesh import WHOLE, stages
from jaxllm.sampling.processor_arguments import Processor

# XLA lets a step's first and last layer share memory with what is before and after them. Buffers
# between layers are all there from the third one on
LEAST_LAYERS = 3
FIGURE = "workspace"  # the need's name among kept figures


class CompiledSteps:
    """The step programs of this process's stages, as a `Measure`.

    Weights load meanwhile. Earlier stages compile beside the last one, and `workers` lower the
    programs of each.

    Attributes:
        lattice: of the last stage, for the pools that were asked for last.
        programs: of each stage, likewise.
    """

    def __init__(
        self,
        model: ModelPlan,
        own_stages: Sequence[ModelPlan],
        workers: CompileWorkers,
        together: Together,
        progress: Progress,
        processors: tuple[Processor, ...] = (),
        leave_late: bool = False,
    ):
        self._model = model
        self._stages = tuple(own_stages)
        self._workers = workers
        self._together = together
        self._progress = progress
        self._processors = processors
        self._leave_late = leave_late
        self._has_hired = False
        # Its programs are compiled while the need is measured
        self._likely: MemoryPlan | None = None
        self.lattice: Lattice
        self.programs: list[Programs] = []

    def expected(self, model: ModelPlan, plan: MemoryPlan) -> int:
        """As of `Measure`: what an earlier start has kept, or else programs that are compiled now.
        Meanwhile all programs of likely pools are made, or those that are the same for any."""
        lattice = plan_lattice(model, plan)
        programs = make_programs(lattice, processors=self._processors)
        is_served = model is self._model
        if is_served:
            self.lattice = lattice
            self.programs = [programs]
        else:
            self._drop_likely()  # it has no room
        figure = kept_need(programs)
        if all(model.wishes.hosts.agree(figure is not None)):
            assert figure is not None
            return figure
        if is_served:
            self._hire(programs)
            keys = programs.early_keys(plan.is_likely)
            self._workers.start(lattice, programs, keys)
            if plan.is_likely:
                self._likely = plan
                progress = self._together.watched(self._progress)
                self._together.begin(partial(programs.compile, keys, progress))
        return measured_need(model, plan, programs)

    def compiled(self, plan: MemoryPlan) -> int:
        """As of `Measure`."""
        if plan != self._likely:
            self._drop_likely()
        lattices = [plan_lattice(stage, plan) for stage in self._stages]
        self.lattice = lattices[-1]
        self.programs = self._programs_of(lattices)
        if self._model.config.enforce_eager:
            return 0
        self._hire(self.programs[-1])
        if self._leave_late:
            self.programs[-1].leave_late()
        told = map(self._together.watched, shares(self._progress, len(lattices)))
        parts = [
            partial(self._compile, *part)
            for part in zip(lattices, self.programs, told, strict=True)
        ]
        compiling = [self._together.begin(part) for part in parts[:-1]]
        parts[-1]()
        for stage in compiling:
            stage.result()
        return max(programs.peak_bytes for programs in self.programs)

    def keep(self, step: int) -> None:
        """As of `Measure`."""
        exports = _exports_of(self.programs[-1])
        if exports is not None and exports.figures().get(FIGURE) != step:
            exports.keep_figures({FIGURE: step})

    def _drop_likely(self) -> None:
        """Compile no further programs of pools that are not to be."""
        if self._likely is not None:
            self.programs[-1].stop()
            self._likely = None

    def _programs_of(self, lattices: Sequence[Lattice]) -> list[Programs]:
        """Uncompiled programs, but for those that were compiled for other pools and do not depend
        on pools. One counter has the compilations of all."""
        before: list[Programs | None] = [None] * (len(lattices) - len(self.programs))
        before += self.programs
        made = [
            _for_pools(lattice, programs, self._processors)
            for lattice, programs in zip(lattices, before, strict=True)
        ]
        if self._likely is not None:
            made[-1] = self.programs[-1]
        for programs in made:
            programs.executables.compiles = made[-1].executables.compiles
        return made

    def _compile(self, lattice: Lattice, programs: Programs, progress: Progress) -> None:
        self._workers.start(lattice, programs, programs.lattice)
        programs.compile_all(progress)

    def _hire(self, programs: Programs) -> None:
        """Have as many workers as the last stage's programs are worth."""
        if self._has_hired:
            return
        self._has_hired = True
        config = self._model.config
        wanted = much_is_missing(programs) and not config.enforce_eager and config.nnodes == 1
        self._workers.configure(_worker_spec(self._model) if wanted else WorkerSpec(0))


def _for_pools(
    lattice: Lattice, before: Programs | None, processors: tuple[Processor, ...]
) -> Programs:
    """The programs of a lattice; those `before` are for other pools."""
    if before is None:
        return make_programs(lattice, processors=processors)
    if before.shapes.model.graphdef is lattice.outline.graphdef:
        return before.for_pool(lattice.pages(), lattice.table_width)
    return make_programs(lattice, before.executables, processors)  # of another length


def kept_need(programs: Programs) -> int | None:
    """Bytes that the largest step needs, where an earlier start has measured it."""
    exports = _exports_of(programs)
    if exports is None:
        return None
    return exports.figures().get(FIGURE)


def _exports_of(programs: Programs) -> Exports | None:
    # What is kept knows nothing of research code
    if programs.shapes.model.processors:
        return None
    return programs.executables.exports


def measured_need(model: ModelPlan, plan: MemoryPlan, programs: Programs) -> int:
    """Bytes that the largest of these programs needs.

    A step reuses the memory of one layer for the next. Where attention runs the device's own
    kernels, the need hardly grows with the number of layers: a step of a few tells it, and one of
    twice as many tells the growth. Elsewhere the forward of all layers is compiled.
    """
    others = programs.largest_others
    if model.backend.is_kernel:
        depths = sizing_depths(model)
        forwards = [make_few(model, plan, layers) for layers in depths]
        _compile_at_once([(few, [few.largest]) for few in forwards] + [(programs, others)])
        forward = at_depth(depths, [few.peak_bytes for few in forwards], _deepest(model))
    else:
        programs.compile([programs.largest, *others])
        forward = needed_bytes(programs.get(programs.largest))
    return max([forward, *(needed_bytes(programs.get(key)) for key in others)])


def _compile_at_once(wanted: Sequence[tuple[Programs, list[Any]]]) -> None:
    """Compile keys of several lattices side by side, and those for which memory is short then once
    more, one lattice after the other. Raises ConfigError."""
    with ThreadPoolExecutor(len(wanted), thread_name_prefix="sizing") as pool:
        parts = [pool.submit(programs.compile, keys) for programs, keys in wanted]
        for part in parts:
            with suppress(ConfigError):
                part.result()
    for programs, keys in wanted:
        programs.compile(keys)


def at_depth(depths: Sequence[int], needs: Sequence[int], depth: int) -> int:
    """The need of a forward of `depth` layers, from those of one or two of fewer layers."""
    if len(depths) == 1:
        return needs[0]
    growth = max(0, needs[1] - needs[0]) / (depths[1] - depths[0])
    return needs[1] + int(growth * max(0, depth - depths[1]))


def sizing_depths(model: ModelPlan) -> tuple[int, ...]:
    """Layers of the forwards that tell the need of all: of the shortest one that has layers of
    every kind, and of one twice as deep."""
    depth = len(model.spec.layers)
    kinds = layer_kinds(model)
    few = max(LEAST_LAYERS, 1 + max(map(kinds.index, kinds)))
    if 2 * few < depth:
        return (few, 2 * few)
    return (depth,)


def layer_kinds(model: ModelPlan) -> list[Hashable]:
    """What tells one layer's computation from another's: what it remembers, how it sees positions,
    and its parameters."""
    spec = model.spec
    groups = model_groups(spec, model.need.max_model_len, model.host.pages > 0)
    numbers = {layer: number for number, group in enumerate(groups) for layer in group.layers}
    state = model.outline.at(WHOLE).state
    parameters: list[list[Hashable]] = [[] for _ in spec.layers]
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        names = [str(getattr(key, "key", key)) for key in path]
        if names[0] == "layers":
            parameters[int(names[1])].append((*names[2:], leaf.shape, str(leaf.dtype)))
    return [
        (type(cache), numbers.get(layer), spec.windows[layer], type(spec.ropes[layer]), tuple(held))
        for layer, (cache, held) in enumerate(zip(spec.layers, parameters, strict=True))
    ]


def _deepest(model: ModelPlan) -> int:
    """Layers of the stage that has most."""
    return max(len(stage.layers(len(model.spec.layers))) for stage in stages(model.stage.count))


def make_few(model: ModelPlan, plan: MemoryPlan, layers: int) -> Programs:
    """The programs of the same model cut off after a few layers, in one stage. None is kept."""
    spec = model.spec.first_layers(layers)
    outline = weights.outline(spec, model.mesh, model.dtype)
    few = replace(model, spec=spec, stage=WHOLE, outline=outline)
    lattice = plan_lattice(few, plan)
    return make_programs(lattice, Executables(lattice.options, platform=lattice.platform))


def much_is_missing(programs: Programs) -> bool:
    """Whether workers are worth starting: earlier starts have not kept a quarter of the programs or
    more. That holds for a first start, and for one with a pool of another size."""
    exports = programs.executables.exports
    if exports is None:
        return False
    kept = [exports.has(programs.name(key)) for key in programs.lattice if programs.is_kept(key)]
    return kept.count(False) * 4 >= len(kept)


def _worker_spec(model: ModelPlan) -> WorkerSpec:
    """Workers for a first start, within the device memory that this engine leaves to others."""
    share = model.config.gpu_memory_utilization
    platform = model.device.platform
    limit = 0
    if platform == "gpu":
        limit = limit_bytes(model.device, share)
    spare = int(limit / share) - limit
    devices = model.mesh.size * model.stage.count
    return WorkerSpec.within(os.cpu_count() or 1, platform, devices, spare)
