"""Bring an engine up: decide, load weights and compile side by side, allocate pages, warm up, and
report."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxllm import weights
from jaxllm.config import ConfigError, EngineConfig, Resolved
from jaxllm.engine.constraints.grammars import Grammars
from jaxllm.engine.runtime.compilation.exports import is_private
from jaxllm.engine.runtime.lattice import Programs, weight_leaves
from jaxllm.engine.runtime.pipeline.follower import StageFollower
from jaxllm.engine.runtime.pooling_runner import PoolingRunner
from jaxllm.engine.runtime.replay import encode
from jaxllm.engine.runtime.runner import Runner
from jaxllm.engine.startup.compile_workers import CompileWorkers, WorkerSpec, early_count
from jaxllm.engine.startup.device_client import (
    give_back,
    limit_bytes,
    may_use_cuda,
    reserve_as,
)
from jaxllm.engine.startup.pin_host_memory import pinning
from jaxllm.engine.startup.pipeline.runners import Loaded, make_pipeline_runner
from jaxllm.engine.startup.pipeline.stages import StagesBefore
from jaxllm.engine.startup.pipeline.together import Together, shares
from jaxllm.engine.startup.report import Report, link_rows, table_rows
from jaxllm.engine.startup.resolve import Setup, check_same, resolve
from jaxllm.engine.startup.sizing import (
    abstract_pages,
    check_largest_step,
    fit_pool,
    known_workspace,
    make_programs,
    programs_folder,
)
from jaxllm.grammar.matcher import Matchers
from jaxllm.hosts.controller import Controller
from jaxllm.hosts.group import ALONE, Hosts
from jaxllm.locate import find
from jaxllm.mesh import make_stage_meshes, own_devices, own_meshes
from jaxllm.models import ModelSpec, Wish, read_spec
from jaxllm.sampling.processor_arguments import Function, Processor
from jaxllm.sampling.processors import read_processors
from jaxllm.tokenizer import Tokenizer
from jaxllm.weights.load import Progress

# An encoder caches nothing, so its pages have no bytes; slots are what limits requests
ENCODER_PAGES = 2**14


type Running = Runner | PoolingRunner | StageFollower


@dataclass(frozen=True)
class Started:
    """The parts of an `Engine`.

    Attributes:
        give_back: returns device memory that is free to the driver, where the engine may.
    """

    resolved: Resolved
    runner: Running
    tokenizer: Tokenizer | None
    grammars: Grammars
    weights: WeightSource
    give_back: Callable[[], None]


class WeightSource:
    """Where the weights of these stages come from, at an engine's start and later.

    Args:
        setups: of the stages.
        config: of the engine.
        loader: serves all loads; by default one of its own.
        files: the model's own, while they are open for the start; None: later loads open them.
    """

    def __init__(
        self,
        setups: Sequence[Setup],
        config: EngineConfig,
        loader: weights.Loader | None = None,
        files: weights.ModelFiles | None = None,
    ):
        self._setups, self._config = tuple(setups), config
        self._loader = loader or weights.Loader()
        self._files = files

    @property
    def rounds(self) -> bool:
        """Whether devices hold weights as plain numbers before they hold them in few bits."""
        return any(setup.spec.formats for setup in self._setups)

    def check(self, given: weights.ModelFiles) -> None:
        """Raise ConfigError unless these weights fit the engine: from a checkpoint's headers and
        scales, or from the arrays' names, types and shapes."""
        weights.check(given, self._setups[-1].outline, "auto")

    def read(
        self,
        given: weights.Model | None = None,
        progress: Progress | None = None,
        before: Sequence[jax.Array] = (),
    ) -> tuple[jax.Array, ...]:
        """The weights of a checkpoint or of arrays, by default the engine's own, one stage's after
        another's; all are on the devices. They are written into those of `before`, which are lost.
        Raises ConfigError."""
        found: list[jax.Array] = []
        for setup in self._setups:
            _, state = weights.load(
                given or self._files or setup.resolved.model_dir,
                setup.outline,
                "auto" if given else self._config.load_format,
                seed=self._config.seed,
                progress=progress,
                cache=weight_cache(self._config),
                before=before[len(found) :],
                loader=self._loader,
            )
            leaves, _ = weight_leaves(state)
            found += leaves
        return tuple(jax.block_until_ready(found))


def weight_cache(config: EngineConfig) -> Path | None:
    """The directory that keeps weights, if one is wanted."""
    wanted = config.weight_cache_dir
    return None if wanted is None else Path(os.path.expanduser(wanted)).absolute()


def start(
    config: EngineConfig,
    report: Report,
    logits_processors: Sequence[Function] = (),
    hosts: Hosts = ALONE,
    leave_late: bool = False,
) -> Started:
    """Load, compile and warm up; `hosts` start the same engine. Raises ConfigError before any
    loading when it cannot work.

    Args:
        leave_late: on CPUs, leave for `make_late` what an engine can be ready without.
    """
    config, files, spec = read_model(config)
    use_compilation_cache(config.compilation_cache_dir)
    reserve_as(config)
    loader = weights.Loader()
    with files, CompileWorkers(_early_workers(config)) as workers:
        # JAX takes seconds to find GPUs, mostly without Python's lock, and XLA compiles without it
        pool = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        reading = pool.submit(read_tokenizer, config, files.path, spec)
        pool.shutdown(wait=False)
        meshes = make_stage_meshes(config.tensor_parallel_size, config.pipeline_parallel_size)
        setup = resolve(config, files, meshes, spec, hosts)
        weights.check(files, setup.outline, config.load_format, weight_cache(config))
        if logits_processors and setup.spec.pooling is not None:
            raise ConfigError("logits_processors are for models that generate; leave them out")
        processors = read_processors(logits_processors, setup.resolved.vocab_size)
        # Before the runner, whose buffers in pinned memory would wait for it
        devices = own_devices(meshes)
        with pinning(setup, devices, report) as pinned:
            leave_late = leave_late and _may_leave_late(setup, config)
            load = partial(_load, config, report, loader, files, reading)
            loaded = _load_and_compile(
                workers, setup, meshes, config, report, processors, leave_late, load
            )
    setup = loaded[-1].setup
    tokenizer, matchers = reading.result()
    grammars = Grammars(matchers, setup.resolved.vocab_size, setup.resolved.eos_ids)
    check_same(hosts, setup.resolved)
    runner = _make_runner(loaded, meshes, report)
    _warm_up(runner, config, report, hosts)
    rows = table_rows(setup, [stage.programs for stage in loaded], runner.compiles, report)
    link = [] if isinstance(runner, StageFollower) else link_rows(setup, runner)
    report.show_table("jaxllm", rows + pinned.rows + link)
    returning = partial(give_back, devices if config.enable_sleep_mode else ())
    source = WeightSource([stage.setup for stage in loaded], config, loader)
    return Started(setup.resolved, runner, tokenizer, grammars, source, returning)


def read_model(config: EngineConfig) -> tuple[EngineConfig, weights.ModelFiles, ModelSpec]:
    """The model's open files, for the caller to close, its spec, and the configuration for a model
    of its kind. Raises ConfigError when the files are not those of such a model."""
    located = find(config.model, config.revision, config.download_dir)
    with ExitStack() as stack:
        files = stack.enter_context(weights.ModelFiles(*located))
        spec = read_spec(located.directory, Wish.of(config))
        if spec.pooling is not None and spec.pooling.bidirectional:
            config = replace(
                config, num_gpu_blocks_override=ENCODER_PAGES, kv_cache_memory_bytes=None
            )
        weights.check_shapes(files, spec, config.load_format)
        stack.pop_all()
    return config, files, spec


def use_compilation_cache(directory: str | None) -> None:
    """Keep executables between runs in a directory that its owner alone can read. A directory that
    JAX was already given stays.

    Raises ConfigError when a directory that was asked for cannot be used.
    """
    if jax.config.jax_compilation_cache_dir and directory is None:
        return
    try:
        path = Path(directory or "~/.cache/jaxllm/xla").expanduser()
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_private(path):
            raise OSError(None, "others may write to it, and what lies in it is run (chmod go-w)")
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user, or no home
        if directory is None:
            return  # costs time only
        trouble = getattr(error, "strerror", error)
        raise ConfigError(
            f"--compilation-cache-dir {directory} cannot be used: {trouble}"
        ) from None
    drop_empty(path)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def drop_empty(folder: Path) -> None:
    """Delete the programs that a full disk took nothing of: JAX can neither read nor replace them,
    and would compile them at every start."""
    for entry in folder.glob("*-cache"):
        with suppress(OSError):  # a read-only one stays
            if entry.stat().st_size == 0:
                entry.unlink()


def read_tokenizer(
    config: EngineConfig, model_dir: Path, spec: ModelSpec
) -> tuple[Tokenizer | None, Matchers | None]:
    """The tokenizer and the grammar matchers of its vocabulary. Raises ConfigError.

    With a stall limit, matchers read the vocabulary now: read with the first grammar, it would
    stall every stream for a second. Without one, only the first structured request waits for it.
    """
    if config.skip_tokenizer_init:
        return None, None
    tokenizer = Tokenizer.load(config.tokenizer or str(model_dir))
    matchers = Matchers(tokenizer.backend, spec.vocab_size, spec.eos_token_ids)
    if config.max_stall_ms is not None:
        matchers.start_vocabulary()
    return tokenizer, matchers


def _load_and_compile(
    workers: CompileWorkers,
    setup: Setup,
    meshes: Sequence[Mesh],
    config: EngineConfig,
    report: Report,
    processors: tuple[Processor, ...],
    leave_late: bool,
    load: Callable[[Together, Sequence[Setup]], list[tuple[jax.Array, ...]]],
) -> list[Loaded]:
    """All stages of this process, the last one at the end: mostly that one alone, which `setup` is
    of.

    `load` gives the weights of each, in threads, while programs are compiled from abstract shapes.
    A compiled step of the last stage gives the pool's size. From then on the stages before it
    compile beside it. If reading weights or the tokenizer fails, all that ends.
    """
    programs = make_programs(setup, processors=processors)
    # A known need fits the pool before anything is compiled
    if known := all(setup.hosts.agree(known_workspace(programs) is not None)):
        setup, programs = fit_pool(setup, programs, config)
    workers.configure(
        _worker_spec(setup, config)
        if much_is_missing(programs) and not config.enforce_eager and config.nnodes == 1
        else WorkerSpec(0)
    )
    *others, _ = own_meshes(meshes).items()
    before = StagesBefore(dict(others), workers, programs.executables.compiles)
    own = [*before.setups(setup), setup]
    with Together(2 * len(own) + 1) as together:
        loading = together.begin(partial(load, together, own))
        if config.enforce_eager:
            stages = [(stage, before.programs(stage)) for stage in own[:-1]]
        else:
            with report.phase("Compiling") as progress:
                *told, last = map(together.watched, shares(progress, len(own)))
                decided = partial(before.begin, together, told)
                if not known:
                    workers.start(
                        setup, programs, programs.early_keys(setup.memory.budget.expected)
                    )
                    setup, programs = fit_pool(setup, programs, config, last, decided)
                workers.start(setup, programs, programs.lattice)
                if known:
                    decided(setup)
                if leave_late:
                    programs.leave_late()
                programs.compile_all(last)
                stages = before.compiled()
            check_largest_step(setup, programs)
        leaves = loading.result()
    return [
        Loaded(*stage, own) for stage, own in zip([*stages, (setup, programs)], leaves, strict=True)
    ]


def _may_leave_late(setup: Setup, config: EngineConfig) -> bool:
    """Whether programs may come while the engine serves. On accelerators all streams would wait for
    one; several devices would wait for each other."""
    alone = setup.hosts.count == setup.stage.count == setup.mesh.size == 1
    on_cpu = setup.mesh.devices.flat[0].platform == "cpu"
    return on_cpu and alone and setup.spec.pooling is None and not config.enforce_eager


def _load(
    config: EngineConfig,
    report: Report,
    loader: weights.Loader,
    files: weights.ModelFiles,
    reading: Future[Any],
    together: Together,
    stages: Sequence[Setup],
) -> list[tuple[jax.Array, ...]]:
    """The weights of each stage, all at once, beside `reading` the tokenizer."""
    together.begin(reading.result)
    with report.phase("Loading weights") as progress:
        told = map(together.watched, shares(progress, len(stages)))
        reading = [
            together.begin(partial(WeightSource([stage], config, loader, files).read, progress=own))
            for stage, own in zip(stages, told, strict=True)
        ]
        return [each.result() for each in reading]


def _make_runner(loaded: Sequence[Loaded], meshes: Sequence[Mesh], report: Report) -> Running:
    """What runs the programs of this process's stages, with new pages."""
    with report.phase("Allocating KV pages"):
        pages = [stage.programs.shapes.zeros(abstract_pages(stage.setup)) for stage in loaded]
        jax.block_until_ready(pages)
    setup, programs, leaves = loaded[-1]
    if setup.spec.pooling is not None:
        return PoolingRunner(programs, leaves, pages[-1])
    if setup.stage.count > 1:
        return make_pipeline_runner(loaded, pages, meshes)
    return Runner(programs, leaves, pages[-1])


def _warm_up(runner: Running, config: EngineConfig, report: Report, hosts: Hosts) -> None:
    """Run every program, if they are compiled. From then on followers do what this host does.

    Hosts with devices of every layer warm up alike. Those with stages hear of the warm-up too:
    a step needs all of them.
    """
    leads_stages = False
    if isinstance(runner, Runner) and runner.shapes.stage.count > 1:
        leads_stages = True
        _lead(runner, hosts)
    if not config.enforce_eager:
        with report.phase("Warming up"):
            # A second step in flight gains 0.5 % even where steps are long, but new requests wait
            # for it: not with a stall limit.
            runner.warm_up(deep=config.max_stall_ms is None)
    runner.compiles.warmed_up()
    if not leads_stages and not isinstance(runner, StageFollower):
        _lead(runner, hosts)


def _lead(runner: Runner | PoolingRunner, hosts: Hosts) -> None:
    """Have the followers do what the runner does from now on, if there are any, and fail when this
    process ends without a word."""
    if isinstance(hosts, Controller):
        runner.tell = lambda command: hosts.tell(encode(command))
        runner.leave = hosts.close
        atexit.register(hosts.close, "its engine process has ended")


def much_is_missing(programs: Programs) -> bool:
    """Whether workers are worth starting: earlier starts have not kept a quarter of the programs or
    more. That holds for a first start, and for one with a pool of another size."""
    exports = programs.executables.exports
    if exports is None:
        return False
    kept = [exports.has(programs.name(key)) for key in programs.lattice if programs.is_kept(key)]
    return kept.count(False) * 4 >= len(kept)


def _early_workers(config: EngineConfig) -> int:
    """Workers to start before anything is known: some where there may be a GPU and no start has
    kept anything yet."""
    folder = programs_folder()
    if config.enforce_eager or config.nnodes > 1 or not may_use_cuda() or folder is None:
        return 0
    try:
        return 0 if folder.is_dir() and any(folder.iterdir()) else early_count(os.cpu_count() or 1)
    except OSError:  # another user's: nothing will be kept
        return 0


def _worker_spec(setup: Setup, config: EngineConfig) -> WorkerSpec:
    """Workers for a first start, within the device memory that this engine leaves to others."""
    device = setup.mesh.devices.flat[0]
    share = config.gpu_memory_utilization
    limit = limit_bytes(device, share) if device.platform == "gpu" else 0
    spare = int(limit / share) - limit
    devices = setup.mesh.size * setup.stage.count
    return WorkerSpec.within(os.cpu_count() or 1, device.platform, devices, spare)
