"""Progress of a start for its operator: phases with times, then one table of decisions."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import jax
import rich.progress
from flax import nnx
from rich.console import Console
from rich.table import Table

from jaxllm import weights
from jaxllm.cache.backends import Target
from jaxllm.config import Resolved
from jaxllm.engine.runtime.compilation.compile_counter import CompileCounter
from jaxllm.engine.runtime.lattice import Programs, Progress
from jaxllm.engine.runtime.pooling_runner import PoolingRunner
from jaxllm.engine.runtime.runner import Runner
from jaxllm.engine.scheduling.chunk_planner import seconds_per_token
from jaxllm.engine.startup.memory import shard_bytes
from jaxllm.engine.startup.resolve import Setup
from jaxllm.mesh import stages
from jaxllm.models.config.build import head_name, table_name
from jaxllm.nn.weight.experts import HeldExperts
from jaxllm.nn.weight.int4 import Int4
from jaxllm.nn.weight.schemes import SCHEMES, backend, has_kernel
from jaxllm.quantisation import WeightFormat
from jaxllm.units import GIB, amount

logger = logging.getLogger("jaxllm.engine")

LEAST_EXACT = "float8_e5m2"  # of the types of pages
EXPERTS = "one tile of tokens after the other: slower than 16 bits"
# As measured on Hopper; tests hold it against the records
PROMPTS = "4-bit weights: from 512 tokens on up to 8 % slower than 16 bits (docs/modes.md)"
type Rows = list[tuple[str, str]]


class Report:
    """A silent report, for subclasses to show. Phases may overlap in threads.

    Attributes:
        seconds: Duration of each finished phase, by name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[Progress]:
        """Time one phase of the start; yields `progress(done, total)`. A phase that raises is not
        reported."""
        start = time.perf_counter()
        with self._bar(name) as shown:

            def progress(done: int, total: int) -> None:
                shown(done, total)
                self.phase_moved(name, done, total)

            self.phase_moved(name, 0, 0)
            yield progress
        with self._lock:
            self.seconds[name] = time.perf_counter() - start
            self.phase_finished(name, self.seconds[name])

    @contextmanager
    def _bar(self, name: str) -> Iterator[Progress]:
        yield lambda done, total: None

    def phase_moved(self, name: str, done: int, total: int) -> None:
        """Called when a phase begins, with zeros, and whenever it is further, by any thread."""

    def phase_finished(self, name: str, seconds: float) -> None:
        """Called once a phase, by the phase's thread, by one thread at a time."""

    def show_table(self, title: str, rows: Rows) -> None:
        """Called once, with the decisions and measurements of the start."""


class ConsoleReport(Report):
    """Progress bars and the table on stderr; plain lines where stderr is no terminal. What cannot
    be written, as on a full disk, is not shown."""

    def __init__(self) -> None:
        super().__init__()
        self.console = Console(file=sys.stderr, highlight=False)
        columns = (
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.percentage:>3.0f}%"),
            rich.progress.TimeElapsedColumn(),
        )
        self._bars = rich.progress.Progress(*columns, console=self.console, transient=True)

    @contextmanager
    def _bar(self, name: str) -> Iterator[Progress]:
        if not self.console.is_terminal:
            self._print(f"{name} …")
            yield lambda done, total: None
            return
        with self._lock:
            task = self._bars.add_task(name, total=None)
            self._bars.start()  # changes nothing where bars are shown already
        try:
            yield lambda done, total: self._bars.update(task, completed=done, total=total)
        finally:
            with self._lock:
                self._bars.remove_task(task)
                if not self._bars.tasks:
                    self._bars.stop()

    def phase_finished(self, name: str, seconds: float) -> None:
        self._print(f"{name} took {seconds:.2f} seconds")

    def show_table(self, title: str, rows: Rows) -> None:
        table = Table(title=title, show_header=False)
        for name, value in rows:
            table.add_row(name, value)
        self._print(table)

    def _print(self, shown: str | Table) -> None:
        with suppress(OSError):
            self.console.print(shown)


class LogReport(Report):
    """Phases and the table as log lines, for logs that machines read."""

    def phase_finished(self, name: str, seconds: float) -> None:
        logger.info("%s took %.2f seconds", name, seconds)

    def show_table(self, title: str, rows: Rows) -> None:
        for name, value in rows:
            logger.info("%s: %s", name, value)


def table_rows(
    setup: Setup, programs: Sequence[Programs], compiles: CompileCounter, report: Report
) -> Rows:
    """Decisions, compiled programs of all stages, and the seconds of each phase."""
    count = sum(len(each.lattice) for each in programs)
    late = sum(len(stage.late) for stage in programs)
    shown = f"{count - late}"
    if late:
        shown += f", {late} more behind /ready"
    lowered = sum(each.executables.lowered for each in programs)
    fresh = compiles.compiles - compiles.cache_hits
    kept = f"{lowered} lowered, {fresh} compiled, {compiles.cache_hits} cached"
    return [
        *decided_rows(setup, max(each.peak_bytes for each in programs)),
        ("step programs", f"{shown}; {kept}"),
        *((name.lower(), f"{spent:.2f} s") for name, spent in report.seconds.items()),
    ]


def decided_rows(setup: Setup, largest_step: int | None) -> Rows:
    """Decisions; the largest step needs these bytes, None while it is not compiled."""
    resolved = setup.resolved
    device = setup.mesh.devices.flat[0]
    devices = setup.mesh.size * resolved.pipeline_parallel_size
    at_once = resolved.num_pages / setup.longest.pages_per_request
    return [
        ("model", f"{resolved.model_dir} ({resolved.model_type})"),
        (
            "device",
            f"{devices} × {device.device_kind} ({device.platform}), "
            f"tensor parallel {resolved.tensor_parallel_size}",
        ),
        *_stage_rows(setup),
        ("dtype", resolved.dtype),
        *_memory_rows(setup, largest_step),
        *_format_rows(setup),
        *_scales_rows(setup),
        ("sliding window", _window_row(setup)),
        ("maximum concurrency", f"{at_once:.2f}x at {resolved.max_model_len} tokens per request"),
        ("prefix caching", "on" if resolved.enable_prefix_caching else "off"),
        ("preemption", resolved.preemption_mode),
        ("host memory", _host_row(setup)),
        ("attention", f"{resolved.attention_backend} ({resolved.attention_reason})"),
        *_sums_rows(resolved),
        *_expert_rows(setup),
        (
            "limits of a step",
            f"{resolved.step_seqs} requests, {resolved.max_num_batched_tokens} tokens",
        ),
        ("queue", f"{resolved.max_num_queued_reqs} requests, {resolved.scheduling_policy}"),
    ]


def _stage_rows(setup: Setup) -> Rows:
    """Which layers are where, if they are divided."""
    if setup.stage.count == 1:
        return []
    own = [stage.layers(len(setup.spec.layers)) for stage in stages(setup.stage.count)]
    layers = "; ".join(f"layers {some.start} to {some.stop - 1}" for some in own)
    turns = f"{setup.stage.count} groups of {setup.resolved.step_seqs} requests in turn"
    hosts = setup.hosts.count
    where = "" if hosts == 1 else f", {setup.stage.count // hosts} a host, the last on host 0"
    return [("stages", f"{layers} on {setup.mesh.size} devices each{where}; {turns}")]


def _sums_rows(resolved: Resolved) -> Rows:
    """How several devices add up."""
    if resolved.tensor_parallel_size == 1:
        return []
    return [("sums over devices", f"{resolved.all_reduce} ({resolved.all_reduce_reason})")]


def _expert_rows(setup: Setup) -> Rows:
    """How experts lie on several devices."""
    sizes, devices = setup.spec.mixture, setup.mesh.size
    if sizes is None or devices == 1:
        return []
    groups = setup.resolved.expert_parallel_size
    share, shards = -(-sizes.experts // groups), devices // groups
    width = f"{sizes.inner // shards} of {sizes.inner} columns of each" if shards > 1 else "whole"
    return [("experts of a device", f"{share} of {sizes.experts}, {width}")]


def _memory_rows(setup: Setup, largest_step: int | None) -> Rows:
    """The terms of the sum that sizes the pool, per device, and the pool."""
    resolved, memory = setup.resolved, setup.memory
    budget, size = memory.budget, resolved.page_size
    tokens = resolved.num_pages * size
    more = zip(resolved.windows[1:], resolved.group_pages[1:], strict=True)
    pools = [
        f"{resolved.num_pages} pages × {size} = {tokens} tokens",
        *(f"{pages} pages for {_layers_with(window)}" for window, pages in more),
    ]
    needed = "an estimate" if largest_step is None else f"{largest_step / GIB:.2f} GiB needed"
    return [
        ("usable memory", f"{budget.usable / GIB:.2f} GiB per device"),
        ("weights", f"{budget.weights / GIB:.2f} GiB per device{budget.unpacked}"),
        ("largest step", f"{budget.workspace / GIB:.2f} GiB reserved per device, {needed}"),
        ("sampling buffers", f"{budget.resident / GIB:.2f} GiB per device"),
        ("spare", f"{budget.spare / GIB:.2f} GiB per device"),
        (
            "left for KV pages",
            f"{budget.breakdown} = {max(0, budget.for_pages) / GIB:.2f} GiB per device",
        ),
        (
            "KV cache",
            f"{', '.join(pools)} in {resolved.kv_dtype}, {amount(memory.kv_bytes)} per device",
        ),
    ]


def _layers_with(window: int | None) -> str:
    """What a further cache group is for."""
    return "layers with other heads" if window is None else f"layers with a window of {window}"


def _format_rows(setup: Setup) -> Rows:
    """What weights are held in, and what that saves."""
    spec, mesh = setup.spec, setup.mesh
    if not spec.formats:
        return []
    counts = Counter(spec.formats.values())
    held = "; ".join(f"{count} matrices in {kind.title}" for kind, count in counts.items())
    plain = weights.outline(replace(spec, formats={}), mesh, setup.dtype)
    saved = shard_bytes(jax.tree.leaves(plain.state)) - setup.memory.budget.weights
    paths = jax.tree_util.tree_leaves_with_path(setup.outline.state)
    others = shard_bytes(leaf for path, leaf in paths if _is_plain(path))
    model = nnx.merge(setup.outline.graphdef, setup.outline.state)
    experts = [part.each for _, part in nnx.iter_graph(model) if isinstance(part, HeldExperts)]
    target = setup.resolved.target
    by_tile = any(not each.takes_all(target) for each in experts)
    token = setup.need.group_bytes / setup.need.page_size
    products = {backend(kind, target) for kind in counts}
    has_kernels = all(has_kernel(kind, target) for kind in counts)
    slow = "" if has_kernels else " (plain JAX: may be slower than 16 bits)"
    return [
        *([] if spec.scheme is None else [("checkpoint", spec.scheme.title)]),
        ("quantised weights", held),
        (
            "quantisation saves",
            f"{amount(saved)} per device, {int(saved / token) if token else 0} tokens of KV",
        ),
        ("other weights", f"{amount(others)} per device as plain numbers"),
        *([("output head", _head_row(setup))] if spec.has_head else []),
        ("products of these", f"{', '.join(sorted(products))}{slow}"),
        *([("products of experts", EXPERTS)] if by_tile else []),
        *([("prompts", PROMPTS)] if _has_kernels_of_4_bits(counts, target) else []),
    ]


def _head_row(setup: Setup) -> str:
    """What makes logits."""
    name = table_name(setup.spec) if setup.spec.tied else head_name(setup.spec)
    own = setup.spec.formats.get(name)
    held = "plain numbers" if own is None else f"{own.numbers}, summed in float32"
    return f"{held}, also the table of tokens" if setup.spec.tied else held


def _has_kernels_of_4_bits(kinds: Iterable[WeightFormat], target: Target) -> bool:
    """Whether kernels multiply with weights of 4 bits."""
    return any(SCHEMES[kind.numbers] is Int4 and has_kernel(kind, target) for kind in kinds)


def _is_plain(path: tuple[Any, ...]) -> bool:
    """Whether a parameter is an array of plain numbers, not one of those that make a weight."""
    keys = _keys(path)
    return "weight" not in keys or keys[-1] == "weight" or isinstance(keys[-1], int)


def _keys(path: tuple[Any, ...]) -> list[Any]:
    return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]


def _scales_rows(setup: Setup) -> Rows:
    """The source of the scales of 8-bit pages."""
    if setup.resolved.kv_dtype == setup.resolved.dtype:
        return []
    layers = setup.spec.layers
    given = sum(layer.scales is not None for layer in layers)
    text = "one for each token and head, computed when it is written"
    if given:
        some = f" for {given} of {len(layers)} layers; for the others {text}"
        text = f"the checkpoint's{'' if given == len(layers) else some}"
    rows = [("KV scales", text)]
    if setup.resolved.kv_dtype == LEAST_EXACT:
        cost = "perplexity of the demo model 1.4 % off, with fp8_e4m3 0.1 % (docs/modes.md)"
        rows.append(("KV accuracy", f"{LEAST_EXACT}: {cost}"))
    return rows


def _window_row(setup: Setup) -> str:
    """Windows, and what becomes of pages behind them."""
    windows = {window for window in setup.spec.windows if window is not None}
    if not windows:
        return "none"
    tokens = " and ".join(str(window) for window in sorted(windows))
    if setup.resolved.windows == (None,):
        why = (
            "pages may go to host memory" if setup.resolved.host_pages else "no sequence is longer"
        )
        return f"{tokens} tokens; pages behind it are kept, since {why}"
    pages = " and ".join(map(str, setup.longest.group_pages_per_request))
    return f"{tokens} tokens; pages behind it are given back: a request holds at most {pages}"


def _host_row(setup: Setup) -> str:
    resolved, devices = setup.resolved, setup.mesh.size * setup.stage.count
    if not resolved.host_pages:
        return "holds no pages"
    size = amount(resolved.host_pages * setup.need.group_bytes * devices)
    cached = f", {resolved.host_cached_pages} of them for cached prefixes"
    return (
        f"{resolved.host_pages} pages, {size}"
        f"{cached if resolved.host_cached_pages else ''}; {resolved.moved_pages} move at once"
    )


def link_rows(setup: Setup, runner: Runner | PoolingRunner) -> Rows:
    """The link to host memory as warm-up measured it, beside the time to compute a page."""
    if runner.link is None:
        return []
    link, compute = runner.link, setup.resolved.page_size * seconds_per_token(runner.seconds)
    load = link.seconds(link.width) / link.width
    speed, alone = setup.need.group_bytes / load / 1e9, link.seconds(1)
    return [
        (
            "link to host memory",
            f"{speed:.1f} GB/s per device: a page is loaded in {load * 1e3:.2f} ms, "
            f"alone in {alone * 1e3:.2f} ms, and computed in {compute * 1e3:.2f} ms",
        )
    ]
