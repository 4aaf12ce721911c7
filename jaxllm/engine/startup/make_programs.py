"""The step programs of what was decided, with what earlier starts have kept of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.cache.kv import KVCache
from jaxllm.engine.runtime.compilation.executables import Executables
from jaxllm.engine.runtime.compilation.exports import Exports, fingerprint
from jaxllm.engine.runtime.compilation.xla_options import XlaOptions
from jaxllm.engine.runtime.lattice import Programs, weight_leaves
from jaxllm.engine.runtime.shapes import Model, StepShapes
from jaxllm.engine.startup.memory import states_shape
from jaxllm.engine.startup.resolve import Setup
from jaxllm.sampling.processor_arguments import Processor

FOLDER = "programs"  # in the compilation cache's directory
# Decisions that change no program, or a program's name already
_DECIDED_LATER = (
    *("model_dir", "enable_prefix_caching", "scheduling_policy"),
    *("num_pages", "max_model_len", "windows", "more_pages"),
    *("preemption_mode", "host_pages", "host_cached_pages", "moved_pages"),
)


def options_of(setup: Setup) -> XlaOptions:
    """XLA's options for this model on this device."""
    return XlaOptions.of(
        setup.mesh.devices.flat[0].device_kind,
        setup.memory.budget.weights if setup.mesh.size == 1 else 0,
    )


def make_programs(
    setup: Setup, executables: Executables | None = None, processors: tuple[Processor, ...] = ()
) -> Programs:
    """The programs of a setup, uncompiled. By default they use what earlier starts have kept."""
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
        table_width=table_width(setup),
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


def abstract_pages(setup: Setup) -> KVCache:
    """The pools of all cache groups, as shapes with shardings."""
    heads, resolved, groups = setup.heads, setup.resolved, setup.layer_groups
    rest = heads.kv_stored, resolved.page_size, heads.dim, jnp.dtype(resolved.kv_dtype), setup.mesh
    pages = resolved.num_pages, *resolved.more_pages
    return KVCache.join(
        [KVCache.abstract(groups.count(group), count, *rest) for group, count in enumerate(pages)],
        groups,
    )


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
        "devices": [
            device.platform,
            device.device_kind,
            device.client.platform_version,
            dict(setup.mesh.shape),
        ],
    }
    return Exports.open(folder, fingerprint(facts))
