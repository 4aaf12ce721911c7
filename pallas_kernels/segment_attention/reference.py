"""The definition in plain JAX, block by block of queries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.ordering import zeros_after
from pallas_kernels.segment_attention.segments import Segments

BLOCK = 128  # queries


def segment_attention(
    q_TNH: Array,
    k_TKH: Array,
    v_TKH: Array,
    segments: Segments,
    *,
    scale: float,
    window: int | None = None,
) -> Array:
    """See `segment_attention.segment_attention`.

    A block of queries meets the keys within `reach` of it: no segment is longer. So the scores in
    memory are those of one block.
    """
    tokens, heads, dim = q_TNH.shape
    reach = min(segments.longest - 1, tokens - 1)
    if window is not None:
        reach = min(reach, window)
    rest = -tokens % BLOCK
    width = BLOCK + 2 * reach

    def beside(x: Array) -> Array:
        return jnp.pad(x, ((reach, reach + rest), (0, 0), (0, 0)))

    k_SKH = beside(k_TKH)
    v_SKH = beside(v_TKH)
    precision = lax.Precision.HIGHEST if q_TNH.dtype == jnp.float32 else None

    def attend(start: Array, q_QNH: Array, first_Q: Array, end_Q: Array) -> Array:
        k_WKH, v_WKH = (lax.dynamic_slice_in_dim(x, start, width) for x in (k_SKH, v_SKH))
        q_QKGH = q_QNH.reshape(BLOCK, k_WKH.shape[1], -1, dim)
        score_KGQW = scale * jnp.einsum(
            "qkgh,wkh->kgqw", q_QKGH, k_WKH, precision=precision, preferred_element_type=jnp.float32
        )
        place_W = jnp.arange(width)[None, :] - reach
        seen_QW = (jnp.abs(place_W - jnp.arange(BLOCK)[:, None]) <= reach) & (
            (place_W + start >= first_Q[:, None]) & (place_W + start < end_Q[:, None])
        )
        score_KGQW = jnp.where(seen_QW, score_KGQW, jnp.finfo(jnp.float32).min)
        weight_KGQW = jnp.where(seen_QW, jax.nn.softmax(score_KGQW, axis=-1), 0)
        weight_KGQW = weight_KGQW.astype(v_WKH.dtype)
        o_QKGH = jnp.einsum("kgqw,wkh->qkgh", weight_KGQW, v_WKH, precision=precision)
        return o_QKGH.reshape(BLOCK, heads, dim)

    q_SNH = jnp.pad(q_TNH, ((0, rest), (0, 0), (0, 0)))
    first_S, end_S = (jnp.pad(x, (0, rest)) for x in (segments.first_T, segments.end_T))
    q_SNH, zeros_SNH = zeros_after(q_SNH, q_SNH.shape, q_SNH.dtype)

    def step(block: Array, o_SNH: Array) -> Array:
        start = block * BLOCK
        slices = (lax.dynamic_slice_in_dim(x, start, BLOCK) for x in (q_SNH, first_S, end_S))
        return lax.dynamic_update_slice_in_dim(o_SNH, attend(start, *slices), start, axis=0)

    o_SNH = lax.fori_loop(0, (tokens + rest) // BLOCK, step, zeros_SNH)
    return o_SNH[:tokens]
