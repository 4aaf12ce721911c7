"""The pool fitted to what the largest step needs, by XLA's own account."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm import weights
from jaxllm.cache.kv import KVCache
from jaxllm.config import EngineConfig
from jaxllm.engine.runtime.compilation.executables import Executables
from jaxllm.engine.runtime.compilation.exports import Exports, fingerprint
from jaxllm.engine.runtime.compilation.xla_options import XlaOptions
from jaxllm.engine.runtime.lattice import Programs, Progress, needed_bytes, weight_leaves
from jaxllm.engine.runtime.shapes import Model, StepShapes
from jaxllm.engine.startup.memory import MemoryBudget, is_fitted, states_shape
from jaxllm.engine.startup.resolve import Setup, resized
from jaxllm.sampling.processor_arguments import Processor

FOLDER = "programs"  # in the compilation cache's directory
SURPLUS = 100  # of what pages may have may go unused, one part
SIZING_LAYERS = 4  # enough for layers of two kinds in turn
_OF_THE_HOST = ("preemption_mode", "host_pages", "host_cached_pages", "moved_pages")
_OF_THE_POOL = ("num_pages", "max_model_len", "windows", "more_pages")
_DECIDED_LATER = (
    "model_dir",
    "enable_prefix_caching",
    "scheduling_policy",
    *_OF_THE_POOL,
    *_OF_THE_HOST,
)


def options_of(setup: Setup) -> XlaOptions:
    """XLA's options for this model on this device."""
    return XlaOptions.of(
        setup.mesh.devices.flat[0].device_kind,
        setup.memory.room.weights if setup.mesh.size == 1 else 0,
    )


def make_programs(
    setup: Setup, executables: Executables | None = None, processors: tuple[Processor, ...] = ()
) -> Programs:
    """The lattice of a setup, by default with what earlier starts have kept of it. Nothing is
    compiled yet."""
    resolved, device = setup.resolved, setup.mesh.devices.flat[0]
    leaves, treedef = weight_leaves(setup.abstract_weights)
    model = Model(
        setup.graphdef,
        treedef,
        setup.mesh,
        resolved.attention_backend,
        resolved.page_size,
        processors,
        resolved.batch_invariant,
    )
    if executables is None:
        executables = Executables(options_of(setup), _exports(setup), device.platform)
    shapes = StepShapes(
        model=model,
        weights=leaves,
        kv=abstract_pages(setup),
        slots=resolved.max_num_seqs,
        table_width=_table_width(setup),
        hidden_states=jax.ShapeDtypeStruct(
            states_shape(setup.spec, setup.buckets),
            setup.dtype,
            sharding=NamedSharding(setup.mesh, PartitionSpec()),
        ),
        vocab_size=resolved.vocab_size,
        buckets=setup.buckets,
        max_logprobs=resolved.max_logprobs,
        logprobs_mode=resolved.logprobs_mode,
        moved_pages=resolved.moved_pages,
        platform=executables.platform,
    )
    return Programs(shapes, executables)


def fitted(
    setup: Setup, programs: Programs, config: EngineConfig, progress: Progress | None = None
) -> tuple[Setup, Programs]:
    """The pool that is left beside what the largest step needs, and the programs for it.

    XLA knows the need of a compiled step only. A step reuses the memory of one layer for the next,
    so one of a few layers tells the need of all, in a fraction of the time; `start.check_peak`
    looks again when all programs are compiled. The need does not depend on the pool, and is kept
    for later starts. Where it is likely what it was taken for, all programs are compiled meanwhile
    (`progress` is told).
    """
    if not is_fitted(config, setup.memory.room):
        return setup, programs
    if (workspace := known_workspace(programs)) is None:
        workspace = _found(setup, programs, config, progress)
        if exports := _figures_of(programs):
            exports.keep_figures({"workspace": workspace})
    found = resized(setup, config, workspace)
    if found.resolved == setup.resolved:
        return found, programs
    return found, programs.for_pool(abstract_pages(found), _table_width(found))


def known_workspace(programs: Programs) -> int | None:
    """What an earlier start has found that the largest step needs, in bytes."""
    exports = _figures_of(programs)
    return exports.figures().get("workspace") if exports else None


def _figures_of(programs: Programs) -> Exports | None:
    # What is kept knows nothing of research code
    return None if programs.shapes.model.processors else programs.executables.exports


def reserve(room: MemoryBudget, need: int) -> int:
    """Bytes to keep for a largest step of this `need`: what was likely if that is enough and wastes
    little, so that programs for that pool need not be made again."""
    return (
        room.workspace
        if room.likely and need <= room.workspace <= need + room.left // SURPLUS
        else need
    )


def _found(
    setup: Setup, programs: Programs, config: EngineConfig, progress: Progress | None
) -> int:
    """Bytes to keep for the largest step. While that is found, the programs are compiled for as
    long as the pool may be the right one."""
    few = make_programs(
        shallow(setup), Executables(options_of(setup), platform=setup.mesh.devices.flat[0].platform)
    )
    keys = programs.early_keys(likely=True) if setup.memory.room.likely else programs.largest_others
    with ThreadPoolExecutor(1, thread_name_prefix="lattice") as pool:
        lattice = pool.submit(programs.compile, keys, progress)
        try:
            few.compile([few.largest])
            need = max(
                few.peak_bytes,
                *(needed_bytes(programs.get(key)) for key in programs.largest_others),
            )
            workspace = reserve(setup.memory.room, need)
            if resized(setup, config, workspace).resolved != setup.resolved:
                programs.stop()
            lattice.result()
        except BaseException:
            programs.stop()
            raise
    return workspace


def shallow(setup: Setup, layers: int = SIZING_LAYERS) -> Setup:
    """The same model with fewer layers: the first ones."""
    spec = setup.spec.first_layers(layers)
    graphdef, abstract = weights.abstract(spec, setup.mesh, setup.dtype)
    few = replace(setup, spec=spec, graphdef=graphdef, abstract_weights=abstract)
    there = sorted(set(few.kinds))
    first, *more = ((setup.resolved.num_pages, *setup.resolved.more_pages)[kind] for kind in there)
    windows = tuple(setup.resolved.windows[kind] for kind in there)
    return replace(
        few,
        resolved=replace(setup.resolved, windows=windows, num_pages=first, more_pages=tuple(more)),
    )


def abstract_pages(setup: Setup) -> KVCache:
    """The pools of all kinds of layers, as shapes with shardings."""
    heads, resolved, kinds = setup.heads, setup.resolved, setup.kinds
    rest = heads.kv_stored, resolved.page_size, heads.dim, jnp.dtype(resolved.kv_dtype), setup.mesh
    if len(resolved.windows) == 1:
        return KVCache.abstract(len(setup.spec.layers), resolved.num_pages, *rest)
    pages = resolved.num_pages, *resolved.more_pages
    return KVCache.of_kinds(
        [KVCache.abstract(kinds.count(kind), count, *rest) for kind, count in enumerate(pages)],
        kinds,
    )


def _table_width(setup: Setup) -> int:
    """Pages of a slot's table, of all kinds of layers together."""
    return len(setup.resolved.windows) * setup.resolved.max_pages_per_request


def programs_folder() -> Path | None:
    """Kept programs lie beside XLA's own cache; where that is not a local directory, none are
    kept."""
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
        "devices": [
            device.platform,
            device.device_kind,
            device.client.platform_version,
            dict(setup.mesh.shape),
        ],
    }
    return Exports.open(folder, fingerprint(facts))
