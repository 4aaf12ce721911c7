"""Bias, norm and rotation in plain JAX, and one XLA scatter each for keys and values; in place when the pages are donated."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.rope_write.rows import HeadRows, rotated


def rope_write(rows: HeadRows, k_pages: Array, v_pages: Array, page_T: Array, offset_T: Array) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.rope_write`."""
    num_pages = k_pages.shape[0]
    # Dropped tokens get a page each, so that "unique_indices" holds and no back end needs to order or guard the writes.
    page_T = jnp.where(page_T < num_pages, page_T, num_pages + jnp.arange(page_T.shape[0], dtype=page_T.dtype))

    def put(pages: Array, new_TKH: Array) -> Array:
        # One row a key head: over whole tokens, XLA for TPU brings the pool into another layout and back.
        P, K, C, H = pages.shape
        row_TK = (page_T[:, None] * K + jnp.arange(K, dtype=page_T.dtype)) * C + offset_T[:, None]
        flat = pages.reshape(P * K * C, H).at[row_TK].set(new_TKH.astype(pages.dtype), mode="drop", unique_indices=True)
        return flat.reshape(pages.shape)

    q_TNH, k_TKH, v_TKH = rotated(rows)
    return q_TNH, put(k_pages, k_TKH), put(v_pages, v_TKH)
