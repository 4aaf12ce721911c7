"""`Started`: an engine's parts. Decides, loads weights and compiles side by side, allocates pages,
warms up, and reports."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import jax
from jax.sharding import Mesh

from jaxllm import weights
from jaxllm.config import ConfigError, EngineConfig, Resolved
from jaxllm.engine.constraints.grammars import Grammars
from jaxllm.engine.runtime.lattice import Progress
from jaxllm.engine.runtime.pipeline.follower import StageFollower
from jaxllm.engine.runtime.pooling_runner import PoolingRunner
from jaxllm.engine.runtime.replay import encode
from jaxllm.engine.runtime.runner import Runner
from jaxllm.engine.startup.compile_workers import CompileWorkers, early_count
from jaxllm.engine.startup.device_client import give_back, may_use_cuda, reserve_as
from jaxllm.engine.startup.lattice import check_same, plan_lattice
from jaxllm.engine.startup.measure import CompiledSteps
from jaxllm.engine.startup.memory_plan import MemoryPlan, estimated_plan, first_plan, fit
from jaxllm.engine.startup.model_plan import ModelPlan, plan_model
from jaxllm.engine.startup.pin_host_memory import pinning
from jaxllm.engine.startup.program_cache import programs_folder, use_compilation_cache
from jaxllm.engine.startup.report import Report, Rows
from jaxllm.engine.startup.runners import Loaded, Running, make_runner
from jaxllm.engine.startup.table import decided_rows, link_rows, programs_rows
from jaxllm.engine.startup.together import Together, shares
from jaxllm.engine.startup.weight_source import WeightSource, check_weights
from jaxllm.engine.startup.wishes import Wishes, read_wishes
from jaxllm.grammar.matcher import Matchers
from jaxllm.hosts.controller import Controller
from jaxllm.hosts.group import ALONE, Hosts
from jaxllm.mesh import make_stage_meshes
from jaxllm.sampling.processor_arguments import Function, Processor
from jaxllm.sampling.processors import read_processors
from jaxllm.tokenizer import Tokenizer

type Reading = Future[tuple[Tokenizer | None, Matchers | None]]


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
    wishes = read_wishes(config, hosts)
    with ExitStack() as stack:
        stack.enter_context(wishes.files)
        use_compilation_cache(wishes.config.compilation_cache_dir)
        reserve_as(wishes.config)
        workers = stack.enter_context(CompileWorkers(_early_workers(wishes.config)))
        # JAX takes seconds to find GPUs, mostly without Python's lock, and XLA compiles without it
        pool = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        reading = pool.submit(read_tokenizer, wishes)
        pool.shutdown(wait=False)
        model = plan_model(wishes, _meshes(wishes))
        first = first_plan(model)
        check_weights(model, use_cache=True)
        processors = _processors(model, logits_processors)
        # Before the runner, whose buffers in pinned memory would wait for it
        with pinning(model, first, report) as pinned:
            leave_late = leave_late and _may_leave_late(model)
            memory, steps, source, leaves = _load_and_compile(
                model, first, workers, report, processors, leave_late, reading
            )
    resolved = steps.lattice.resolved
    tokenizer, matchers = reading.result()
    check_same(hosts, resolved)
    loaded = [Loaded(*stage) for stage in zip(steps.programs, leaves, strict=True)]
    runner = make_runner(model, loaded, report)
    _warm_up(runner, wishes.config, report, hosts)
    step = max(programs.peak_bytes for programs in steps.programs)
    rows = decided_rows(model, memory, resolved, step)
    rows += programs_rows(steps.programs, runner.compiles, report) + pinned.rows
    if not isinstance(runner, StageFollower):
        rows += link_rows(model, runner)
    report.show_table("jaxllm", rows)
    return Started(
        resolved=resolved,
        runner=runner,
        tokenizer=tokenizer,
        grammars=Grammars(matchers, resolved.vocab_size, resolved.eos_ids),
        weights=source,
        give_back=partial(give_back, model.own_devices if config.enable_sleep_mode else ()),
    )


def check_fit(config: EngineConfig) -> Rows:
    """The decisions of a start, by an estimate of the largest step where a start would measure it;
    nothing is loaded or compiled. Raises ConfigError when it cannot work."""
    wishes = read_wishes(config)
    with wishes.files:
        reserve_as(wishes.config)
        model = plan_model(wishes, _meshes(wishes))
        first_plan(model)
        check_weights(model)
        memory = estimated_plan(model)
    return decided_rows(model, memory, plan_lattice(model, memory).resolved, None)


def _meshes(wishes: Wishes) -> list[Mesh]:
    config = wishes.config
    return make_stage_meshes(config.tensor_parallel_size, config.pipeline_parallel_size)


def _processors(model: ModelPlan, functions: Sequence[Function]) -> tuple[Processor, ...]:
    """Research code that changes logits. Raises ConfigError."""
    if functions and model.spec.pooling is not None:
        raise ConfigError("logits_processors are for models that generate; leave them out")
    return read_processors(functions, model.spec.vocab_size)


def read_tokenizer(wishes: Wishes) -> tuple[Tokenizer | None, Matchers | None]:
    """The tokenizer and the grammar matchers of its vocabulary. Raises ConfigError.

    With a stall limit, matchers read the vocabulary now: read with the first grammar, it would
    stall every stream for a second. Without one, only the first structured request waits for it.
    """
    config = wishes.config
    if config.skip_tokenizer_init:
        return None, None
    tokenizer = Tokenizer.load(config.tokenizer or str(wishes.directory))
    spec = wishes.spec
    matchers = Matchers(tokenizer.backend, spec.vocab_size, spec.eos_token_ids)
    if config.max_stall_ms is not None:
        matchers.start_vocabulary()
    return tokenizer, matchers


def _load_and_compile(
    model: ModelPlan,
    first: MemoryPlan,
    workers: CompileWorkers,
    report: Report,
    processors: tuple[Processor, ...],
    leave_late: bool,
    reading: Reading,
) -> tuple[MemoryPlan, CompiledSteps, WeightSource, list[tuple[jax.Array, ...]]]:
    """The pools, by their `first` plan, the compiled programs and the weights of all stages of this
    process.

    Weights load in threads while programs are compiled from abstract shapes. If `reading` the
    tokenizer fails, all that ends.
    """
    own_stages = model.own_stages()
    loader = weights.Loader()
    with Together(2 * len(own_stages) + 2) as together:
        together.begin(reading.result)
        loading = together.begin(partial(_load, together, own_stages, report, loader))
        with _compiling(report, model.config) as progress:
            steps = CompiledSteps(
                model, own_stages, workers, together, progress, processors, leave_late
            )
            memory = fit(model, first, steps)
        leaves = loading.result()
    return memory, steps, WeightSource(own_stages, loader), leaves


@contextmanager
def _compiling(report: Report, config: EngineConfig) -> Iterator[Progress]:
    """The phase of compiling, in an engine that compiles at start."""
    if config.enforce_eager:
        yield lambda done, total: None
        return
    with report.phase("Compiling") as progress:
        yield progress


def _may_leave_late(model: ModelPlan) -> bool:
    """Whether programs may come while the engine serves. On accelerators all streams would wait for
    one; several devices would wait for each other."""
    is_alone = model.wishes.hosts.count == model.stage.count == model.mesh.size == 1
    on_cpu = model.device.platform == "cpu"
    generates = model.spec.pooling is None
    return on_cpu and is_alone and generates and not model.config.enforce_eager


def _load(
    together: Together,
    own_stages: Sequence[ModelPlan],
    report: Report,
    loader: weights.Loader,
) -> list[tuple[jax.Array, ...]]:
    """The weights of each stage, all at once."""
    with report.phase("Loading weights") as progress:
        told = map(together.watched, shares(progress, len(own_stages)))
        reading = [
            together.begin(
                partial(WeightSource([stage], loader, stage.wishes.files).read, progress=share)
            )
            for stage, share in zip(own_stages, told, strict=True)
        ]
        return [stage.result() for stage in reading]


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


def _early_workers(config: EngineConfig) -> int:
    """Workers to start before anything is known: some where there may be a GPU and no start has
    kept anything yet."""
    folder = programs_folder()
    if config.enforce_eager or config.nnodes > 1 or not may_use_cuda() or folder is None:
        return 0
    try:
        if folder.is_dir() and any(folder.iterdir()):
            return 0
        return early_count(os.cpu_count() or 1)
    except OSError:  # another user's: nothing will be kept
        return 0
