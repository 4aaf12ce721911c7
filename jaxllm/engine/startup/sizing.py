"""The step programs of what was decided, and the pool of KV pages that the largest of them leaves
memory for, by XLA's own account."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm import weights
from jaxllm.cache.arrays import GroupArrays, KVCache, PagedArrays
from jaxllm.cache.groups import layer_places
from jaxllm.cache.layer import RecurrentState
from jaxllm.cache.states import StateArrays
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.runtime.compilation.executables import Executables
from jaxllm.engine.runtime.compilation.exports import Exports, fingerprint
from jaxllm.engine.runtime.compilation.xla_options import XlaOptions
from jaxllm.engine.runtime.lattice import Programs, Progress, needed_bytes, weight_leaves
from jaxllm.engine.runtime.shapes import Model, StepShapes, packed_carries
from jaxllm.engine.startup.memory import MemoryBudget, states_shape
from jaxllm.engine.startup.plan_memory import is_measured, plan_memory
from jaxllm.engine.startup.resolve import Setup, with_plan
from jaxllm.mesh import WHOLE
from jaxllm.sampling.processor_arguments import Processor
from jaxllm.units import GIB

FOLDER = "programs"  # in the compilation cache's directory
# Decisions that change no program, or a program's name already
_DECIDED_LATER = (
    *("model_dir", "async_scheduling", "enable_prefix_caching"),
    *("scheduling_policy", "max_num_queued_reqs"),
    *("group_pages", "max_model_len", "windows"),
    *("preemption_mode", "host_pages", "host_cached_pages", "moved_pages", "staged_pages"),
)
UNUSED_SHARE = 100  # one part of it, of what pages may have, may go unused
SIZING_LAYERS = 4  # enough for two cache groups in turn


def options_of(setup: Setup) -> XlaOptions:
    """XLA's options for this model on these devices."""
    found = XlaOptions.of(setup.mesh.devices.flat[0].device_kind, setup.memory.budget.weights)
    return replace(found, apart=setup.hosts.count > 1 < setup.resolved.pipeline_parallel_size)


def make_programs(
    setup: Setup, executables: Executables | None = None, processors: tuple[Processor, ...] = ()
) -> Programs:
    """The programs of a setup, uncompiled. By default they use what earlier starts have kept."""
    resolved, device = setup.resolved, setup.mesh.devices.flat[0]
    leaves, treedef = weight_leaves(setup.outline.state)
    model = Model(
        graphdef=setup.outline.graphdef,
        treedef=treedef,
        mesh=setup.mesh,
        backend=resolved.attention_backend,
        target=resolved.target,
        page_size=resolved.page_size,
        places=layer_places(setup.groups, setup.spec.layers, setup.layers),
        processors=processors,
        batch_invariant=resolved.batch_invariant,
        peers=setup.peers,
    )
    if executables is None:
        executables = Executables(options_of(setup), _exports(setup), device.platform)
    shapes = StepShapes(
        model=model,
        weights=leaves,
        kv=abstract_pages(setup),
        slots=slots(setup),
        table_width=table_width(setup),
        hidden_states=packed_carries(
            setup.mesh, *states_shape(setup.spec, setup.buckets), setup.dtype
        ),
        vocab_size=resolved.vocab_size,
        buckets=setup.buckets,
        max_logprobs=resolved.max_logprobs,
        logprobs_mode=resolved.logprobs_mode,
        moved_pages=resolved.moved_pages,
        platform=executables.platform,
        pooling=resolved.pooling,
        stage=setup.stage,
        hidden_width=setup.spec.width,
    )
    return Programs(shapes, executables)


def abstract_pages(setup: Setup) -> KVCache:
    """The pools of all cache groups, as shapes with shardings."""
    resolved = setup.resolved
    counts = iter(resolved.group_pages)
    kv_dtype = jnp.dtype(resolved.kv_dtype)
    arrays: list[GroupArrays] = []
    for group in setup.groups:
        layers = len(group.among(setup.layers))
        if isinstance(group.spec, RecurrentState):
            arrays.append(StateArrays.abstract(group.spec, layers, slots(setup), setup.mesh))
        else:
            sizes = (next(counts), resolved.page_size)
            arrays.append(PagedArrays.abstract(group.spec, layers, *sizes, kv_dtype, setup.mesh))
    return tuple(arrays)


def slots(setup: Setup) -> int:
    """Usable slots: the largest decode step may have more rows than there are requests."""
    return max(setup.resolved.max_num_seqs, setup.buckets.decode[-1])


def table_width(setup: Setup) -> int:
    """Pages of a slot's table, of all cache groups together."""
    return len(setup.resolved.windows) * setup.resolved.max_pages_per_request


def programs_folder() -> Path | None:
    """Where programs are kept, beside XLA's own cache; None where that is no local directory."""
    cache = jax.config.jax_compilation_cache_dir
    return Path(cache) / FOLDER if cache and "://" not in cache else None


def _exports(setup: Setup) -> Exports | None:
    if (folder := programs_folder()) is None:
        return None
    device = setup.mesh.devices.flat[0]
    resolved = {
        name: value for name, value in asdict(setup.resolved).items() if name not in _DECIDED_LATER
    }
    facts: dict[str, Any] = {
        "model": setup.spec.to_dict(),
        "engine": resolved,
        "length": setup.need.max_model_len,
        "buckets": setup.buckets.to_dict(),
        "stage": setup.stage.index,
        "devices": [
            device.platform,
            device.device_kind,
            device.client.platform_version,
            dict(setup.mesh.shape),
        ],
    }
    return Exports.open(folder, fingerprint(facts))


def fit_pool(
    setup: Setup,
    programs: Programs,
    config: EngineConfig,
    progress: Progress | None = None,
    decided: Callable[[Setup], None] = lambda setup: None,
) -> tuple[Setup, Programs]:
    """The pool that the largest step leaves memory for, and the programs for it.

    XLA knows the need of a compiled step only. A step reuses the memory of one layer for the next,
    so a step of a few layers tells the need of all, in a fraction of the time;
    `check_largest_step` looks again when all programs are compiled. The need does not depend on the
    pool, and is kept for later starts. Where the expected need is probably right, all programs are
    compiled meanwhile, with `progress`; `decided` is given the decisions as soon as they are final.
    """
    if not is_measured(config, setup.memory.budget):
        decided(setup)
        return setup, programs
    with _workspace(setup, programs, progress) as own:
        workspace = max(setup.hosts.agree(own))
        fitted = with_workspace(setup, config, workspace)
        decided(fitted)
        if is_other := fitted.resolved != setup.resolved:
            programs.stop()
    if not is_other:
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


@contextmanager
def _workspace(setup: Setup, programs: Programs, progress: Progress | None) -> Iterator[int]:
    """Bytes to keep for the largest step, as an earlier start or this one has measured them.
    Programs that are compiled meanwhile go on until they are stopped; the block ends with them."""
    if (known := known_workspace(programs)) is not None:
        yield known
        return
    budget = setup.memory.budget
    few = make_programs(
        shallow(setup), Executables(options_of(setup), platform=setup.mesh.devices.flat[0].platform)
    )
    keys = programs.early_keys(likely=True) if budget.expected else programs.largest_others
    with ThreadPoolExecutor(1, thread_name_prefix="lattice") as pool:
        lattice = pool.submit(programs.compile, keys, progress)
        try:
            few.compile([few.largest])
            programs.compile(programs.largest_others)  # once more where memory is short
            need = max(
                (needed_bytes(programs.get(key)) for key in programs.largest_others),
                default=0,
            )
            workspace = workspace_to_reserve(budget, max(need, few.peak_bytes))
            if exports := _exports_of(programs):
                exports.keep_figures({"workspace": workspace})
            yield workspace
            lattice.result()
        except BaseException:
            programs.stop()
            raise


def shallow(setup: Setup, layers: int = SIZING_LAYERS) -> Setup:
    """The same model cut off after a few layers, in one stage, with the pools of their cache
    groups."""
    spec = setup.spec.first_layers(layers)
    outline = weights.outline(spec, setup.mesh, setup.dtype)
    few = replace(setup, spec=spec, outline=outline, stage=WHOLE)
    pages = {
        group.spec: count
        for group, count in zip(setup.groups, setup.resolved.group_pages, strict=False)
    }
    own = [group for group in few.groups if group.spec.has_pages]
    resolved = replace(
        setup.resolved,
        windows=tuple(group.window for group in own),
        group_pages=tuple(pages.get(group.spec, setup.resolved.num_pages) for group in own),
    )
    return replace(few, resolved=resolved)


def check_largest_step(setup: Setup, programs: Programs) -> None:
    """Raises ConfigError when a compiled step needs more than weights, logits and pages leave of a
    device's own memory."""
    memory, resolved, longest = setup.memory, setup.resolved, setup.longest
    budget = memory.budget
    left = budget.usable - budget.weights - budget.resident - budget.staged - memory.kv_bytes
    if budget.shared or programs.peak_bytes <= left:
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
