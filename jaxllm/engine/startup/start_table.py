"""Rows of the table that an engine prints when it has started."""

from __future__ import annotations

from jaxllm.engine.runtime.compilation.compile_counter import CompileCounter
from jaxllm.engine.runtime.lattice import Programs
from jaxllm.engine.runtime.runner import Runner
from jaxllm.engine.scheduling.prefill_budget import seconds_per_token
from jaxllm.engine.startup.report import Report
from jaxllm.engine.startup.resolve import Setup
from jaxllm.units import GIB, amount

type Rows = list[tuple[str, str]]


def table_rows(setup: Setup, programs: Programs, compiles: CompileCounter, report: Report) -> Rows:
    """Decisions, compiled programs, and the seconds of each phase."""
    resolved, seconds = setup.resolved, report.seconds
    device, devices = setup.mesh.devices.flat[0], setup.mesh.size
    at_once = resolved.num_pages / setup.longest.pages_per_request
    fresh = compiles.compiles - compiles.cache_hits
    kept = f"{programs.executables.lowered} lowered, {fresh} compiled, {compiles.cache_hits} cached"
    return [
        ("model", f"{resolved.model_dir} ({resolved.model_type})"),
        (
            "device",
            f"{devices} × {device.device_kind} ({device.platform}), "
            f"tensor parallel {resolved.tensor_parallel_size}",
        ),
        ("dtype", resolved.dtype),
        *_memory_rows(setup, programs),
        *_scales_rows(setup),
        ("sliding window", _window_row(setup)),
        ("maximum concurrency", f"{at_once:.2f}x at {resolved.max_model_len} tokens per request"),
        ("prefix caching", "on" if resolved.enable_prefix_caching else "off"),
        ("preemption", resolved.preemption_mode),
        ("host memory", _host_row(setup)),
        ("attention", f"{resolved.attention_backend} ({resolved.attention_reason})"),
        (
            "limits of a step",
            f"{resolved.max_num_seqs} requests, {resolved.max_num_batched_tokens} tokens",
        ),
        ("queue", f"{resolved.max_num_queued_reqs} requests, {resolved.scheduling_policy}"),
        ("step programs", f"{len(programs.lattice)}; {kept}"),
        *((name.lower(), f"{spent:.2f} s") for name, spent in seconds.items()),
    ]


def _memory_rows(setup: Setup, programs: Programs) -> Rows:
    """The terms of the sum that sizes the pool, per device, and the pool."""
    resolved, memory = setup.resolved, setup.memory
    budget, size = memory.budget, resolved.page_size
    tokens = resolved.num_pages * size
    more = zip(resolved.windows[1:], resolved.more_pages, strict=True)
    pools = [
        f"{resolved.num_pages} pages × {size} = {tokens} tokens",
        *(f"{pages} pages for layers with a window of {window}" for window, pages in more),
    ]
    needed = f"{programs.peak_bytes / GIB:.2f} GiB needed"
    return [
        ("usable memory", f"{budget.usable / GIB:.2f} GiB per device"),
        ("weights", f"{budget.weights / GIB:.2f} GiB per device"),
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


def _scales_rows(setup: Setup) -> Rows:
    """The source of the scales of 8-bit pages."""
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
    resolved, page = setup.resolved, setup.memory.page_bytes * setup.mesh.size
    if not resolved.host_pages:
        return "holds no pages"
    cached = f", {resolved.host_cached_pages} of them for cached prefixes"
    return (
        f"{resolved.host_pages} pages, {amount(resolved.host_pages * page)}"
        f"{cached if resolved.host_cached_pages else ''}; {resolved.moved_pages} move at once"
    )


def link_rows(setup: Setup, runner: Runner) -> Rows:
    """The link to host memory as warm-up measured it, beside the time to compute a page."""
    if runner.link is None:
        return []
    link, compute = runner.link, setup.resolved.page_size * seconds_per_token(runner.seconds)
    load = link.seconds(link.width) / link.width
    speed, alone = setup.memory.page_bytes / load / 1e9, link.seconds(1)
    return [
        (
            "link to host memory",
            f"{speed:.1f} GB/s per device: a page is loaded in {load * 1e3:.2f} ms, "
            f"alone in {alone * 1e3:.2f} ms, and computed in {compute * 1e3:.2f} ms",
        )
    ]
