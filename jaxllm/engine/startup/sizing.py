"""The pool of KV pages, fitted to what the largest step needs by XLA's own account."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from jaxllm import weights
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.runtime.compilation.executables import Executables
from jaxllm.engine.runtime.compilation.exports import Exports
from jaxllm.engine.runtime.lattice import Programs, Progress, needed_bytes
from jaxllm.engine.startup.make_programs import (
    abstract_pages,
    make_programs,
    options_of,
    table_width,
)
from jaxllm.engine.startup.memory import MemoryBudget
from jaxllm.engine.startup.plan_memory import is_measured, plan_memory
from jaxllm.engine.startup.resolve import Setup, with_plan
from jaxllm.units import GIB

UNUSED_SHARE = 100  # one part of it, of what pages may have, may go unused
SIZING_LAYERS = 4  # enough for two cache groups in turn


def fit_pool(
    setup: Setup, programs: Programs, config: EngineConfig, progress: Progress | None = None
) -> tuple[Setup, Programs]:
    """The pool that the largest step leaves memory for, and the programs for it.

    XLA knows the need of a compiled step only. A step reuses the memory of one layer for the next,
    so a step of a few layers tells the need of all, in a fraction of the time;
    `check_largest_step` looks again when all programs are compiled. The need does not depend on the
    pool, and is kept for later starts. Where the expected need is probably right, all programs are
    compiled meanwhile, with `progress`.
    """
    if not is_measured(config, setup.memory.budget):
        return setup, programs
    if (workspace := known_workspace(programs)) is None:
        workspace = _measure_workspace(setup, programs, config, progress)
        if exports := _exports_of(programs):
            exports.keep_figures({"workspace": workspace})
    fitted = with_workspace(setup, config, workspace)
    if fitted.resolved == setup.resolved:
        return fitted, programs
    return fitted, programs.for_pool(abstract_pages(fitted), table_width(fitted))


def with_workspace(setup: Setup, config: EngineConfig, workspace: int) -> Setup:
    """The same decisions, with the pool that is left when the largest step needs `workspace` bytes.
    Raises ConfigError as `resolve`."""
    budget = replace(setup.memory.budget, workspace=workspace, expected=False)
    return with_plan(setup, config, plan_memory(config, budget, setup.need))


def known_workspace(programs: Programs) -> int | None:
    """Bytes that the largest step needs, where an earlier start has measured it."""
    exports = _exports_of(programs)
    return exports.figures().get("workspace") if exports else None


def _exports_of(programs: Programs) -> Exports | None:
    # What is kept knows nothing of research code
    return None if programs.shapes.model.processors else programs.executables.exports


def workspace_to_reserve(budget: MemoryBudget, need: int) -> int:
    """Bytes to keep for a largest step of this `need`: the expected ones if they are enough and
    waste little, so that programs for that pool need not be made again."""
    enough = need <= budget.workspace <= need + budget.for_pages // UNUSED_SHARE
    return budget.workspace if budget.expected and enough else need


def _measure_workspace(
    setup: Setup, programs: Programs, config: EngineConfig, progress: Progress | None
) -> int:
    """Bytes to keep for the largest step. Meanwhile programs are compiled, for as long as the pool
    may be the right one."""
    budget = setup.memory.budget
    few = make_programs(
        shallow(setup), Executables(options_of(setup), platform=setup.mesh.devices.flat[0].platform)
    )
    keys = programs.early_keys(likely=True) if budget.expected else programs.largest_others
    with ThreadPoolExecutor(1, thread_name_prefix="lattice") as pool:
        lattice = pool.submit(programs.compile, keys, progress)
        try:
            few.compile([few.largest])
            need = max(
                few.peak_bytes,
                *(needed_bytes(programs.get(key)) for key in programs.largest_others),
            )
            workspace = workspace_to_reserve(budget, need)
            if with_workspace(setup, config, workspace).resolved != setup.resolved:
                programs.stop()
            lattice.result()
        except BaseException:
            programs.stop()
            raise
    return workspace


def shallow(setup: Setup, layers: int = SIZING_LAYERS) -> Setup:
    """The same model cut off after a few layers, with the pools of their cache groups."""
    spec = setup.spec.first_layers(layers)
    graphdef, abstract = weights.abstract(spec, setup.mesh, setup.dtype)
    few = replace(setup, spec=spec, graphdef=graphdef, abstract_weights=abstract)
    groups = sorted(set(few.layer_groups))
    pages = setup.resolved.num_pages, *setup.resolved.more_pages
    first, *more = (pages[group] for group in groups)
    windows = tuple(setup.resolved.windows[group] for group in groups)
    return replace(
        few,
        resolved=replace(setup.resolved, windows=windows, num_pages=first, more_pages=tuple(more)),
    )


def check_largest_step(setup: Setup, programs: Programs) -> None:
    """Raises ConfigError when a compiled step needs more than weights, logits and pages leave of a
    device's own memory."""
    memory, resolved, longest = setup.memory, setup.resolved, setup.longest
    budget = memory.budget
    left = budget.usable - budget.weights - budget.resident - budget.staged - memory.kv_bytes
    if programs.peak_bytes <= left or budget.shared:
        return
    share = max(0, left) / programs.peak_bytes
    tokens = int(resolved.max_num_batched_tokens * share) // 16 * 16
    helps = [
        f"--max-num-batched-tokens {tokens}"
        if tokens >= resolved.max_num_seqs
        else "a lower --max-num-seqs"
    ]
    pages = longest.pages_in(max(0, memory.kv_bytes + left - programs.peak_bytes))
    if pages >= longest.pages_per_request:
        helps.append(
            f"--num-gpu-blocks-override {pages} (--kv-cache-memory-bytes {longest.bytes_of(pages)})"
        )
    raise ConfigError(
        f"the largest step needs {programs.peak_bytes / GIB:.2f} GiB, but {left / GIB:.2f} GiB is "
        f"left for it ({budget.breakdown}, {memory.kv_bytes / GIB:.2f} for KV pages); "
        f"what helps: {'; or '.join(helps)}"
    )
