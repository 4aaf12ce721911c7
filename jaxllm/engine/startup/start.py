"""Bring an engine up: decide, load weights and compile side by side, allocate pages, warm up, print
what was decided."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import jax

from jaxllm import weights
from jaxllm.cache.kv import zeros_of
from jaxllm.config import ConfigError, EngineConfig, Resolved
from jaxllm.engine.constraints.grammars import Grammars
from jaxllm.engine.runtime.compilation.compile_counter import CompileCounter
from jaxllm.engine.runtime.compilation.exports import is_private
from jaxllm.engine.runtime.lattice import Programs, weight_leaves
from jaxllm.engine.runtime.runner import Runner
from jaxllm.engine.runtime.state import MAX_STOP_IDS
from jaxllm.engine.scheduling.prefill_budget import seconds_per_token
from jaxllm.engine.startup.compile_workers import CompileWorkers, WorkerSpec, early
from jaxllm.engine.startup.pin_host_memory import pinning
from jaxllm.engine.startup.report import Report
from jaxllm.engine.startup.resolve import Setup, resolve
from jaxllm.engine.startup.sizing import (
    abstract_pages,
    fitted,
    known_workspace,
    make_programs,
    programs_folder,
)
from jaxllm.grammar.matcher import Matchers
from jaxllm.locate import locate
from jaxllm.mesh import make_mesh
from jaxllm.models import ModelSpec, read_spec
from jaxllm.sampling.options import MAX_STOP_TOKEN_IDS
from jaxllm.sampling.processor_arguments import Function, Processor
from jaxllm.sampling.processors import read_processors
from jaxllm.tokenizer import Tokenizer
from jaxllm.units import GIB, amount


@dataclass(frozen=True)
class Started:
    """What `Engine` is made of."""

    resolved: Resolved
    runner: Runner
    tokenizer: Tokenizer | None
    grammars: Grammars


def start(
    config: EngineConfig, report: Report, logits_processors: Sequence[Function] = ()
) -> Started:
    """Load, compile and warm up. Raises ConfigError before any loading when it cannot work."""
    model_dir = locate(config.model, config.revision, config.download_dir)
    use_compilation_cache(config.compilation_cache_dir)
    reserve_memory(config.gpu_memory_utilization)
    spec = read_spec(model_dir)
    weights.check_shapes(model_dir, spec, config.load_format)
    eos_ids = end_ids(spec)
    with CompileWorkers(_early_workers(config)) as workers:
        # JAX takes seconds to find GPUs, mostly without Python's lock
        with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as pool:
            reading = pool.submit(read_tokenizer, config, model_dir, spec.vocab_size, eos_ids)
            mesh = make_mesh(config.tensor_parallel_size)
            setup = resolve(config, model_dir, mesh, spec)
            tokenizer, matchers = reading.result()
        grammars = Grammars(matchers, setup.resolved.vocab_size, eos_ids)
        weights.check(model_dir, setup.spec, mesh, setup.dtype, config.load_format)
        processors = read_processors(logits_processors, setup.resolved.vocab_size)
        compiles = CompileCounter()
        # Whatever else lies in such memory would wait for it: the runner comes later
        with pinning(setup, report) as pinned:
            setup, programs, leaves = _load_and_compile(workers, setup, config, report, processors)
    with report.phase("Allocating KV pages"):
        kv = zeros_of(abstract_pages(setup))  # zeros, because kernels may multiply what they mask
        jax.block_until_ready(kv)
    runner = Runner(programs, leaves, kv, eos_ids, compiles)
    if not config.enforce_eager:
        with report.phase("Warming up"):
            # A second step in flight gains 0.5 % even where steps are long, but new requests wait
            # for it: not where streams are watched.
            runner.warm_up(deep=config.max_stall_ms is None)
    compiles.warmed_up()
    report.show_table(
        "jaxllm",
        table_rows(setup, programs, compiles, report) + pinned.rows + link_rows(setup, runner),
    )
    return Started(setup.resolved, runner, tokenizer, grammars)


def read_tokenizer(
    config: EngineConfig, model_dir: Path, width: int, eos_ids: list[int]
) -> tuple[Tokenizer | None, Matchers | None]:
    """The tokenizer, and what makes matchers for it. Where streams are watched, these read the
    vocabulary now: with the first grammar they would hold everybody up for a second. Elsewhere only
    who asks for structured output waits for that. Raises ConfigError."""
    if config.skip_tokenizer_init:
        return None, None
    tokenizer = Tokenizer.load(config.tokenizer or str(model_dir))
    matchers = Matchers(tokenizer.backend, width, eos_ids)
    if config.max_stall_ms is not None:
        matchers.start_vocabulary()
    return tokenizer, matchers


def reserve_memory(fraction: float) -> None:
    """Tell the NVIDIA client, before it exists, which share of the device's memory to take. Other
    platforms' clients know no such option. Raises ConfigError when an engine in this process has
    asked for another share, which can no longer be given."""
    if not may_use_cuda():
        return
    before = jax.config.jax_pjrt_client_create_options
    wanted = {"memory_fraction": fraction}
    if before and before != wanted:
        raise ConfigError(
            f"this process has taken its share of the device's memory already ({before}); use the same gpu_memory_utilization, "
            "or a process of its own"
        )
    jax.config.update("jax_pjrt_client_create_options", wanted)


def may_use_cuda() -> bool:
    """Whether JAX, once asked for devices, would try NVIDIA GPUs: its CUDA plugin is installed and
    no other platform was chosen."""
    asked = jax.config.jax_platforms
    if asked and not {"cuda", "gpu"} & set(asked.split(",")):
        return False
    return any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins"))


def end_ids(spec: ModelSpec) -> list[int]:
    """The model's end-of-sequence ids. Raises ConfigError when a slot cannot hold them beside a
    request's own stop ids."""
    found = list(spec.eos_token_ids)
    room = MAX_STOP_IDS - MAX_STOP_TOKEN_IDS
    if len(found) > room:
        raise ConfigError(
            f"config.json and generation_config.json name {len(found)} end-of-sequence ids; at most {room} are supported"
        )
    return found


def use_compilation_cache(directory: str | None) -> None:
    """Persistent executables between runs, on by default, readable by their owner alone; a
    directory that JAX was already given is kept.

    Raises ConfigError when a directory that was asked for cannot be used.
    """
    if jax.config.jax_compilation_cache_dir and directory is None:
        return
    try:
        path = Path(directory or "~/.cache/jaxllm/xla").expanduser()
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        trouble = (
            None
            if is_private(path)
            else "others may write to it, and what lies in it is run (chmod go-w)"
        )
    except OSError as error:
        trouble = str(error.strerror)
    except RuntimeError as error:  # an unknown user's home, or this one has none
        trouble = str(error)
    if trouble and directory is not None:
        raise ConfigError(f"--compilation-cache-dir {directory} cannot be used: {trouble}")
    if trouble:
        return  # a read-only home, or none, only costs time
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def table_rows(
    setup: Setup, programs: Programs, compiles: CompileCounter, report: Report
) -> list[tuple[str, str]]:
    """What the start-up table says."""
    resolved, memory = setup.resolved, setup.memory
    tokens = resolved.num_pages * resolved.page_size
    pages = f"{resolved.num_pages} pages × {resolved.page_size} = {tokens} tokens"
    device = setup.mesh.devices.flat[0]
    at_once = resolved.num_pages / setup.longest.pages_per_request
    fresh = compiles.compiles - compiles.cache_hits
    rows = [
        ("model", f"{resolved.model_dir} ({resolved.model_type})"),
        (
            "device",
            f"{setup.mesh.size} × {device.device_kind} ({device.platform}), tensor parallel {resolved.tensor_parallel_size}",
        ),
        ("dtype", resolved.dtype),
        ("usable memory", f"{memory.room.usable / GIB:.2f} GiB per device"),
        ("weights", f"{memory.room.weights / GIB:.2f} GiB per device"),
        (
            "largest step",
            f"{memory.room.workspace / GIB:.2f} GiB reserved per device, {programs.peak_bytes / GIB:.2f} GiB needed",
        ),
        (
            "for sampling, spare",
            f"{memory.room.resident / GIB:.2f} and {memory.room.spare / GIB:.2f} GiB per device",
        ),
        (
            "left for KV pages",
            f"{memory.room.terms} = {max(0, memory.room.left) / GIB:.2f} GiB per device",
        ),
        (
            "KV cache",
            f"{pages}{_more_row(setup)} in {resolved.kv_dtype}, {amount(memory.kv)} per device",
        ),
        *_scales_rows(setup),
        ("sliding window", _window_row(setup)),
        ("maximum concurrency", f"{at_once:.2f}x at {resolved.max_model_len} tokens per request"),
        ("prefix caching", "on" if resolved.enable_prefix_caching else "off"),
        ("preemption", resolved.preemption_mode),
        ("host memory", _host_row(setup)),
        ("attention", f"{resolved.attention_backend} ({resolved.attention_reason})"),
        (
            "running at once",
            f"{resolved.max_num_seqs} requests, {resolved.max_num_batched_tokens} tokens a step",
        ),
        ("queue", f"{resolved.max_num_queued_reqs} requests, {resolved.scheduling_policy}"),
        (
            "buckets",
            f"{len(programs.lattice)} programs; {programs.executables.lowered} lowered, {fresh} compiled, {compiles.cache_hits} cached",
        ),
    ]
    return rows + [(name.lower(), f"{seconds:.2f} s") for name, seconds in report.seconds.items()]


def _scales_rows(setup: Setup) -> list[tuple[str, str]]:
    """Where the scales of pages of 8 bits come from."""
    if setup.resolved.kv_dtype == setup.resolved.dtype:
        return []
    layers = setup.spec.layers
    given = sum(layer.scales is not None for layer in layers)
    own = "one for each token and head, computed when it is written"
    if not given:
        return [("KV scales", own)]
    some = f" for {given} of {len(layers)} layers; for the others {own}"
    return [("KV scales", f"the checkpoint's{'' if given == len(layers) else some}")]


def _window_row(setup: Setup) -> str:
    """What becomes of pages behind the window of the model's layers."""
    found = {window for window in setup.spec.windows if window is not None}
    if not found:
        return "none"
    tokens = " and ".join(str(window) for window in sorted(found))
    if setup.resolved.windows == (None,):
        why = (
            "pages may go to host memory" if setup.resolved.host_pages else "no sequence is longer"
        )
        return f"{tokens} tokens; pages behind it are kept, since {why}"
    return f"{tokens} tokens; pages behind it are given back: a request holds at most {' and '.join(map(str, setup.longest.held))}"


def _more_row(setup: Setup) -> str:
    """Pages of layers with a window, where others have pages of their own."""
    more = zip(setup.resolved.windows[1:], setup.resolved.more_pages, strict=True)
    return "".join(
        f", {pages} pages for layers with a window of {window}" for window, pages in more
    )


def _host_row(setup: Setup) -> str:
    resolved, page = setup.resolved, setup.memory.page * setup.mesh.size
    if not resolved.host_pages:
        return "holds no pages"
    cached = (
        f", {resolved.host_cached_pages} of them for cached prefixes"
        if resolved.host_cached_pages
        else ""
    )
    return f"{resolved.host_pages} pages, {amount(resolved.host_pages * page)}{cached}; {resolved.moved_pages} move at once"


def link_rows(setup: Setup, runner: Runner) -> list[tuple[str, str]]:
    """What warm-up measured of the link to host memory, beside what computing a page takes."""
    if runner.link is None:
        return []
    link, compute = runner.link, setup.resolved.page_size * seconds_per_token(runner.seconds)
    load = link.seconds(link.width) / link.width
    speed, alone = setup.memory.page / load / 1e9, link.seconds(1)
    times = f"a page is loaded in {load * 1e3:.2f} ms, alone in {alone * 1e3:.2f} ms, and computed in {compute * 1e3:.2f} ms"
    return [("link to host memory", f"{speed:.1f} GB/s per device: {times}")]


def check_peak(setup: Setup, programs: Programs) -> None:
    """Raises ConfigError when a compiled step needs more than weights, logits and pages leave of a
    device's own memory."""
    room = setup.memory.room
    left = room.usable - room.weights - room.resident - room.staged - setup.memory.kv
    if programs.peak_bytes > left and not room.shared:
        pages = setup.longest.pages_in(max(0, setup.memory.kv + left - programs.peak_bytes))
        tokens = (
            int(setup.resolved.max_num_batched_tokens * max(0, left) / programs.peak_bytes)
            // 16
            * 16
        )
        helps = (
            [f"--max-num-batched-tokens {tokens}"]
            if tokens >= setup.resolved.max_num_seqs
            else ["a lower --max-num-seqs"]
        )
        if pages >= setup.longest.pages_per_request:
            helps.append(
                f"--num-gpu-blocks-override {pages} (--kv-cache-memory-bytes {setup.longest.bytes_of(pages)})"
            )
        raise ConfigError(
            f"the largest step needs {programs.peak_bytes / GIB:.2f} GiB, but {left / GIB:.2f} GiB is left for it ({room.terms}, "
            f"{setup.memory.kv / GIB:.2f} for KV pages); what helps: {'; or '.join(helps)}"
        )


def _load_and_compile(
    workers: CompileWorkers,
    setup: Setup,
    config: EngineConfig,
    report: Report,
    processors: tuple[Processor, ...],
) -> tuple[Setup, Programs, tuple[jax.Array, ...]]:
    """Weights load in a thread while the main thread compiles from abstract shapes; the pool's size
    comes from what is compiled."""

    def load() -> tuple[jax.Array, ...]:
        with report.phase("Loading weights") as advance:
            _, state = weights.load(
                setup.resolved.model_dir,
                setup.spec,
                setup.mesh,
                setup.dtype,
                config.load_format,
                seed=config.seed,
                progress=advance,
            )
            leaves, _ = weight_leaves(state)
            jax.block_until_ready(leaves)
        return leaves

    programs = make_programs(setup, processors=processors)
    # Then nothing is compiled to fit the pool, and it is known what there is for it
    if known := known_workspace(programs) is not None:
        setup, programs = fitted(setup, programs, config)
    workers.hire(
        _crew(setup, config)
        if much_is_missing(programs) and not config.enforce_eager
        else WorkerSpec(0)
    )
    with ThreadPoolExecutor(1, thread_name_prefix="load") as pool:
        loading = pool.submit(load)
        if not config.enforce_eager:
            with report.phase("Compiling") as advance:
                if not known:
                    workers.start(setup, programs, programs.early_keys(setup.memory.room.likely))
                    setup, programs = fitted(setup, programs, config, advance)
                workers.start(setup, programs, programs.lattice)
                programs.compile_all(advance)
            check_peak(setup, programs)
        return setup, programs, loading.result()


def much_is_missing(programs: Programs) -> bool:
    """Whether workers are worth their beginning: a quarter of the programs or more were kept by no
    earlier start, as on a first one and on one with a pool of another size."""
    exports = programs.executables.exports
    if exports is None:
        return False
    kept = [exports.has(programs.name(key)) for key in programs.lattice if programs.is_kept(key)]
    return kept.count(False) * 4 >= len(kept)


def _early_workers(config: EngineConfig) -> int:
    """Workers to begin before anything is known: where there may be a GPU, and no start has kept
    anything yet."""
    folder = programs_folder()
    if config.enforce_eager or not may_use_cuda() or folder is None:
        return 0
    try:
        return 0 if folder.is_dir() and any(folder.iterdir()) else early(os.cpu_count() or 1)
    except OSError:  # another user's: nothing will be kept
        return 0


def _crew(setup: Setup, config: EngineConfig) -> WorkerSpec:
    """Workers for a first start, within what this engine leaves of its devices to others."""
    device = setup.mesh.devices.flat[0]
    limit = ((device.memory_stats() or {}) if device.platform == "gpu" else {}).get(
        "bytes_limit", 0
    )
    spare = int(limit / config.gpu_memory_utilization) - limit
    return WorkerSpec.of(os.cpu_count() or 1, device.platform, setup.mesh.size, spare)
