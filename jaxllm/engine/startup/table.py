"""The table that a start ends with: what was decided, and what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
from flax import nnx

from jaxllm import weights
from jaxllm.cache.backends import Target
from jaxllm.config import Resolved
from jaxllm.engine.runtime.compilation.compile_counter import CompileCounter
from jaxllm.engine.runtime.lattice import Programs
from jaxllm.engine.runtime.pooling_runner import PoolingRunner
from jaxllm.engine.runtime.runner import Runner
from jaxllm.engine.scheduling.chunk_planner import seconds_per_token
from jaxllm.engine.startup.budget import shard_bytes
from jaxllm.engine.startup.memory_plan import MemoryPlan
from jaxllm.engine.startup.model_plan import ModelPlan
from jaxllm.engine.startup.report import Report, Rows
from jaxllm.mesh import stages
from jaxllm.models import ModelSpec
from jaxllm.models.config.build import head_name, table_name
from jaxllm.nn.weight.experts import HeldExperts
from jaxllm.nn.weight.int4 import Int4
from jaxllm.nn.weight.schemes import SCHEMES, backend, has_kernel
from jaxllm.quantisation import WeightFormat
from jaxllm.units import GIB, amount

LEAST_EXACT = "float8_e5m2"  # of the types of pages
EXPERTS = "one tile of tokens after the other: slower than 16 bits"
# As measured on Hopper; tests hold it against the records
PROMPTS = "4-bit weights: from 512 tokens on up to 8 % slower than 16 bits (docs/modes.md)"


def programs_rows(programs: Sequence[Programs], compiles: CompileCounter, report: Report) -> Rows:
    """Compiled programs of all stages, and the seconds of each phase."""
    count = sum(len(stage.lattice) for stage in programs)
    late = sum(len(stage.late) for stage in programs)
    shown = f"{count - late}"
    if late:
        shown += f", {late} more behind /ready"
    lowered = sum(stage.executables.lowered for stage in programs)
    fresh = compiles.compiles - compiles.cache_hits
    kept = f"{lowered} lowered, {fresh} compiled, {compiles.cache_hits} cached"
    return [
        ("step programs", f"{shown}; {kept}"),
        *((name.lower(), f"{spent:.2f} s") for name, spent in report.seconds.items()),
    ]


def decided_rows(
    model: ModelPlan, memory: MemoryPlan, resolved: Resolved, largest_step: int | None
) -> Rows:
    """Decisions; the largest step needs these bytes, None while it is not compiled."""
    devices = model.mesh.size * resolved.pipeline_parallel_size
    at_once = resolved.num_pages / memory.need.pages_per_request
    return [
        ("model", f"{resolved.model_dir} ({resolved.model_type})"),
        (
            "device",
            f"{devices} × {model.device.device_kind} ({model.device.platform}), "
            f"tensor parallel {resolved.tensor_parallel_size}",
        ),
        *_stage_rows(model, resolved),
        ("dtype", resolved.dtype),
        *_memory_rows(memory, resolved, largest_step),
        *_format_rows(model),
        *_scales_rows(model),
        ("sliding window", _window_row(model, memory)),
        ("maximum concurrency", f"{at_once:.2f}x at {resolved.max_model_len} tokens per request"),
        ("prefix caching", "on" if resolved.enable_prefix_caching else "off"),
        ("preemption", resolved.preemption_mode),
        ("host memory", _host_row(model)),
        ("attention", f"{resolved.attention_backend} ({resolved.attention_reason})"),
        *_sums_rows(resolved),
        *_expert_rows(model),
        (
            "limits of a step",
            f"{resolved.step_seqs} requests, {resolved.max_num_batched_tokens} tokens",
        ),
        ("queue", f"{resolved.max_num_queued_reqs} requests, {resolved.scheduling_policy}"),
    ]


def _stage_rows(model: ModelPlan, resolved: Resolved) -> Rows:
    """Which layers are where, if they are divided."""
    count = model.stage.count
    if count == 1:
        return []
    parts = [stage.layers(len(model.spec.layers)) for stage in stages(count)]
    layers = "; ".join(f"layers {part.start} to {part.stop - 1}" for part in parts)
    waves = f"{count} groups of {resolved.step_seqs} requests in turn"
    hosts = model.wishes.hosts.count
    where = ""
    if hosts != 1:
        where = f", {count // hosts} a host, the last on host 0"
    return [("stages", f"{layers} on {model.mesh.size} devices each{where}; {waves}")]


def _sums_rows(resolved: Resolved) -> Rows:
    """How several devices add up."""
    if resolved.tensor_parallel_size == 1:
        return []
    return [("sums over devices", f"{resolved.all_reduce} ({resolved.all_reduce_reason})")]


def _expert_rows(model: ModelPlan) -> Rows:
    """How experts lie on several devices."""
    sizes = model.spec.mixture
    devices = model.mesh.size
    if sizes is None or devices == 1:
        return []
    groups = model.mesh.shape["expert"]
    share = -(-sizes.experts // groups)
    shards = devices // groups
    width = "whole"
    if shards > 1:
        width = f"{sizes.inner // shards} of {sizes.inner} columns of each"
    return [("experts of a device", f"{share} of {sizes.experts}, {width}")]


def _memory_rows(memory: MemoryPlan, resolved: Resolved, largest_step: int | None) -> Rows:
    """The terms of the sum that sizes the pool, per device, and the pool."""
    budget = memory.budget
    size = resolved.page_size
    tokens = resolved.num_pages * size
    more = zip(resolved.windows[1:], resolved.group_pages[1:], strict=True)
    pools = [
        f"{resolved.num_pages} pages × {size} = {tokens} tokens",
        *(f"{pages} pages for {_layers_with(window)}" for window, pages in more),
    ]
    needed = "an estimate"
    if largest_step is not None:
        needed = f"{largest_step / GIB:.2f} GiB needed"
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
    if window is None:
        return "layers with other heads"
    return f"layers with a window of {window}"


def _format_rows(model: ModelPlan) -> Rows:
    """What weights are held in, and what that saves."""
    spec = model.spec
    if not spec.formats:
        return []
    counts = Counter(spec.formats.values())
    forms = "; ".join(f"{count} matrices in {form.title}" for form, count in counts.items())
    plain = weights.outline(replace(spec, formats={}), model.mesh, model.dtype)
    saved = shard_bytes(jax.tree.leaves(plain.state)) - model.budget.weights
    paths = jax.tree_util.tree_leaves_with_path(model.outline.state)
    others = shard_bytes(leaf for path, leaf in paths if _is_plain(path))
    module = nnx.merge(model.outline.graphdef, model.outline.state)
    experts = [part.stacked for _, part in nnx.iter_graph(module) if isinstance(part, HeldExperts)]
    by_tile = any(not weight.takes_all(model.target) for weight in experts)
    token = model.need.group_bytes / model.need.page_size
    products = {backend(form, model.target) for form in counts}
    has_kernels = all(has_kernel(form, model.target) for form in counts)
    slow = " (plain JAX: may be slower than 16 bits)"
    if has_kernels:
        slow = ""
    return [
        *([] if spec.scheme is None else [("checkpoint", spec.scheme.title)]),
        ("quantised weights", forms),
        (
            "quantisation saves",
            f"{amount(saved)} per device, {int(saved / token) if token else 0} tokens of KV",
        ),
        ("other weights", f"{amount(others)} per device as plain numbers"),
        *([("output head", _head_row(spec))] if spec.has_head else []),
        ("products of these", f"{', '.join(sorted(products))}{slow}"),
        *([("products of experts", EXPERTS)] if by_tile else []),
        *([("prompts", PROMPTS)] if _has_kernels_of_4_bits(counts, model.target) else []),
    ]


def _head_row(spec: ModelSpec) -> str:
    """What makes logits."""
    form = spec.formats.get(table_name(spec) if spec.tied else head_name(spec))
    text = "plain numbers"
    if form is not None:
        text = f"{form.numbers}, summed in float32"
    if spec.tied:
        text += ", also the table of tokens"
    return text


def _has_kernels_of_4_bits(forms: Iterable[WeightFormat], target: Target) -> bool:
    """Whether kernels multiply with weights of 4 bits."""
    return any(SCHEMES[form.numbers] is Int4 and has_kernel(form, target) for form in forms)


def _is_plain(path: tuple[Any, ...]) -> bool:
    """Whether a parameter is an array of plain numbers, not one of those that make a weight."""
    keys = _keys(path)
    return "weight" not in keys or keys[-1] == "weight" or isinstance(keys[-1], int)


def _keys(path: tuple[Any, ...]) -> list[Any]:
    return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]


def _scales_rows(model: ModelPlan) -> Rows:
    """The source of the scales of 8-bit pages."""
    if model.kv_dtype == model.dtype:
        return []
    layers = model.spec.layers
    scaled = sum(layer.scales is not None for layer in layers)
    text = "one for each token and head, computed when it is written"
    if scaled == len(layers):
        text = "the checkpoint's"
    elif scaled:
        text = f"the checkpoint's for {scaled} of {len(layers)} layers; for the others {text}"
    rows = [("KV scales", text)]
    if model.kv_dtype.name == LEAST_EXACT:
        cost = "perplexity of the demo model 1.4 % off, with fp8_e4m3 0.1 % (docs/modes.md)"
        rows.append(("KV accuracy", f"{LEAST_EXACT}: {cost}"))
    return rows


def _window_row(model: ModelPlan, memory: MemoryPlan) -> str:
    """Windows, and what becomes of pages behind them."""
    windows = {window for window in model.spec.windows if window is not None}
    if not windows:
        return "none"
    tokens = " and ".join(str(window) for window in sorted(windows))
    if memory.need.windows == (None,):
        why = "no sequence is longer"
        if model.host.pages:
            why = "pages may go to host memory"
        return f"{tokens} tokens; pages behind it are kept, since {why}"
    pages = " and ".join(map(str, memory.need.group_pages_per_request))
    return f"{tokens} tokens; pages behind it are given back: a request holds at most {pages}"


def _host_row(model: ModelPlan) -> str:
    host = model.host
    if not host.pages:
        return "holds no pages"
    size = amount(host.pages * model.need.group_bytes * model.mesh.size * model.stage.count)
    cached = ""
    if host.cached:
        cached = f", {host.cached} of them for cached prefixes"
    return f"{host.pages} pages, {size}{cached}; {host.moved} move at once"


def link_rows(model: ModelPlan, runner: Runner | PoolingRunner) -> Rows:
    """The link to host memory as warm-up measured it, beside the time to compute a page."""
    link = runner.link
    if link is None:
        return []
    compute = model.page_size * seconds_per_token(runner.seconds)
    load = link.seconds(link.width) / link.width
    speed = model.need.group_bytes / load / 1e9
    alone = link.seconds(1)
    return [
        (
            "link to host memory",
            f"{speed:.1f} GB/s per device: a page is loaded in {load * 1e3:.2f} ms, "
            f"alone in {alone * 1e3:.2f} ms, and computed in {compute * 1e3:.2f} ms",
        )
    ]
