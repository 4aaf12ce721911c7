"""The lattice of a model that is not loaded, for tests that lower or compile its programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm import models, weights
from jaxllm.cache.kv import KVCache
from jaxllm.engine.runtime import step
from jaxllm.engine.runtime.executables import Executables
from jaxllm.engine.runtime.programs import Abstract, Programs, Scoring, weight_leaves
from jaxllm.engine.runtime.state import SlotState
from jaxllm.engine.scheduling.buckets import Buckets


def lattice(
    config: dict[str, Any],
    mesh: Mesh,
    backend: str,
    buckets: Buckets,
    *,
    page_size: int,
    pages: int,
    kv_dtype: str = "bfloat16",
    pages_per_request: int = 16,
    scoring: Scoring = Scoring(0),  # noqa: B008, frozen
    executables: Executables | None = None,
    moved: int = 0,
) -> Programs:
    """Programs of a model in bfloat16 from its config.json, over one pool of `pages`."""
    spec = models.make_spec(config)
    heads = spec.heads(mesh.shape["tensor"])
    graphdef, state = weights.abstract(spec, mesh, jnp.bfloat16)
    leaves, treedef = weight_leaves(state)
    shape = len(spec.layers), pages, heads.kv_stored, page_size, heads.dim
    pool = KVCache.abstract(*shape, jnp.dtype(kv_dtype), mesh)
    slots = SlotState.shapes(buckets.decode[-1], pages_per_request)
    states = jax.ShapeDtypeStruct((buckets.max_tokens, spec.width), jnp.bfloat16)
    return Programs(
        step.Model(graphdef, treedef, mesh, backend, page_size),
        Abstract(leaves, pool, slots, spec.vocab_size, states),
        buckets,
        scoring,
        executables,
        moved,
    )
