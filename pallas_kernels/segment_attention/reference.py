"""The definition in plain JAX, block by block of queries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

BLOCK = 128  # queries


def segment_attention(
    q_TNH: Array,
    k_TKH: Array,
    v_TKH: Array,
    segment_T: Array,
    *,
    longest: int,
    scale: float,
    window: int | None = None,
) -> Array:
    """See `segment_attention.segment_attention`.

    A block of queries meets the keys within `reach` of it: no segment is longer. So the scores in
    memory are those of one block.
    """
    tokens, heads, dim = q_TNH.shape
    reach = min(longest - 1, tokens - 1) if window is None else min(longest - 1, window, tokens - 1)
    rest = -tokens % BLOCK
    width = BLOCK + 2 * reach

    def beside(x: Array, value: int) -> Array:
        sides = ((reach, reach + rest), *((0, 0) for _ in x.shape[1:]))
        return jnp.pad(x, sides, constant_values=value)

    k_SKH, v_SKH, segment_S = beside(k_TKH, 0), beside(v_TKH, 0), beside(segment_T, -1)
    precision = lax.Precision.HIGHEST if q_TNH.dtype == jnp.float32 else None

    def attend(given: tuple[Array, Array, Array]) -> Array:
        first, q_QNH, segment_Q = given
        k_WKH, v_WKH, segment_W = (
            lax.dynamic_slice_in_dim(x, first, width) for x in (k_SKH, v_SKH, segment_S)
        )
        q_QKGH = q_QNH.reshape(BLOCK, k_WKH.shape[1], -1, dim)
        score_KGQW = scale * jnp.einsum(
            "qkgh,wkh->kgqw", q_QKGH, k_WKH, precision=precision, preferred_element_type=jnp.float32
        )
        distance_QW = jnp.arange(width)[None, :] - reach - jnp.arange(BLOCK)[:, None]
        seen_QW = (segment_Q[:, None] == segment_W[None, :]) & (jnp.abs(distance_QW) <= reach)
        score_KGQW = jnp.where(seen_QW, score_KGQW, jnp.finfo(jnp.float32).min)
        weight_KGQW = jax.nn.softmax(score_KGQW, axis=-1).astype(v_WKH.dtype)
        o_QKGH = jnp.einsum("kgqw,wkh->qkgh", weight_KGQW, v_WKH, precision=precision)
        return o_QKGH.reshape(BLOCK, heads, dim)

    q_BQNH = jnp.pad(q_TNH, ((0, rest), (0, 0), (0, 0))).reshape(-1, BLOCK, heads, dim)
    segment_BQ = jnp.pad(segment_T, (0, rest), constant_values=-2).reshape(-1, BLOCK)
    o_BQNH = lax.map(attend, (jnp.arange(q_BQNH.shape[0]) * BLOCK, q_BQNH, segment_BQ))
    return o_BQNH.reshape(-1, heads, dim)[:tokens]
