"""Online softmax with keys for rows: scores are K·qᵀ, `[TILE, group]`, so that nothing is computed
for queries that are not there.

The carry is transposed too: weighted values `[H, group]`, the running maximum `[group]`, and the
weights' sums by token, `[TILE, group]`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_flash import LOG2E, NEVER, Carry, add_product, product
from pallas_kernels.paged_decode.mosaic_flash import TILE, Spec, visible, zero_tail

WGMMA = plgpu.Layout.WGMMA


def start_swapped(spec: Spec, sinks: list[Array] | None, own: Array, begins: Array) -> Carry:
    """The carry before any tile; as `mosaic_flash.start`."""
    acc = plgpu.layout_cast(jnp.full((spec.H, spec.group), 0.0, jnp.float32), WGMMA)
    top = plgpu.layout_cast(jnp.full((spec.group,), NEVER, jnp.float32), WGMMA.reduce(0))
    sums = plgpu.layout_cast(jnp.full((TILE, spec.group), 0.0, jnp.float32), WGMMA)
    if sinks is None:
        return acc, top, sums
    query = plgpu.broadcasted_iota(jnp.int32, (TILE, spec.group), 1, layout=WGMMA) - own
    token = plgpu.broadcasted_iota(jnp.int32, (TILE, spec.group), 0, layout=WGMMA)
    tops = plgpu.layout_cast(jnp.full((TILE, spec.group), NEVER, jnp.float32), WGMMA)
    for i, sink in enumerate(sinks):
        here = jnp.logical_and(query == i, begins)
        tops = jnp.where(here, jnp.maximum(sink * LOG2E, NEVER), tops)
        sums = jnp.where(jnp.logical_and(here, token == 0), 1.0, sums)
    return acc, tops.max(axis=0), sums


def scores_swapped(spec: Spec, q: Any, k: Any, first: Array, length: Array) -> Array:
    """K·qᵀ in the log2 domain, soft-capped, -inf where unseen; float32 `[TILE, group]`. The tile's
    first token is at position `first`."""
    queries = q.at[pl.ds(0, spec.group)].T
    scores = product(k, queries, (TILE, spec.group), lambda: None)
    return visible(spec, scores, 0, first, length)


def fold_swapped(spec: Spec, carry: Carry, scores: Array, v: Any, count: Array, p_sm: Any) -> Carry:
    """One step over a tile of which the first `count` tokens are there; the weights go to the
    tensor cores by `p_sm` `[group, TILE]`."""
    acc, top, sums = carry
    new_top = jnp.maximum(top, scores.max(axis=0))
    decay = jnp.exp2(top - new_top)
    p = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [1]))
    p_sm.T[...] = p.astype(spec.dtype)
    sums = sums * lax.broadcast_in_dim(decay, sums.shape, [1]) + p
    acc = acc * lax.broadcast_in_dim(decay, acc.shape, [1])
    zero_tail(v, spec.H, count)
    plgpu.commit_smem()
    return add_product(acc, v.T, p_sm.T, spec.interpret), new_top, sums
