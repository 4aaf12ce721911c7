"""Bias, norm and rotation in plain JAX, and one XLA scatter each for keys and values; in place when
the pages are donated."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.quantised import quantise
from pallas_kernels.rope_write.rows import HeadRows, exactly_rotated, rotated


def rope_write(
    rows: HeadRows,
    k_pages: Array,
    v_pages: Array,
    page_T: Array,
    offset_T: Array,
    first_page: Array | None = None,
    *,
    scales: Array | None = None,
) -> tuple[Array, ...]:
    """See `pallas_kernels.rope_write`."""
    if scales is None:
        q_TNH, k_TKH, v_TKH = rotated(rows)
        row_TK = _rows(k_pages, _places(k_pages, page_T, first_page), offset_T)
        return q_TNH, _put(k_pages, row_TK, k_TKH), _put(v_pages, row_TK, v_TKH)
    q_TNH, k_TKH, v_TKH = exactly_rotated(rows)
    if rows.kv_scales is None:
        fixed_scales = (None, None)
    else:
        fixed_scales = tuple(rows.kv_scales.T)
    (k8, k_scale_TK), (v8, v_scale_TK) = (
        quantise(x, k_pages.dtype, scale)
        for x, scale in zip((k_TKH, v_TKH), fixed_scales, strict=True)
    )
    page_T = _places(k_pages, page_T, first_page)
    row_TK = _rows(k_pages, page_T, offset_T)
    # Not into scales seen as one line, of which int32 could not number the elements of the largest
    # pools.
    elements = scales.at[
        page_T[:, None, None],
        jnp.arange(scales.shape[1])[:, None],
        jnp.arange(2),
        offset_T[:, None, None],
    ]
    scales = elements.set(
        jnp.stack([k_scale_TK, v_scale_TK], axis=-1), mode="drop", unique_indices=True
    )
    q_TNH = q_TNH.astype(rows.qkv.dtype)
    return q_TNH, _put(k_pages, row_TK, k8), _put(v_pages, row_TK, v8), scales


def _places(pages: Array, page_T: Array, first_page: Array | None) -> Array:
    """Where each token's page lies. Dropped tokens get a page each, so that "unique_indices" holds
    and no back end needs to order or guard the writes."""
    P = pages.shape[0]
    if first_page is not None:
        page_T = page_T + first_page
    return jnp.where(page_T < P, page_T, P + jnp.arange(page_T.shape[0], dtype=page_T.dtype))


def _rows(pages: Array, page_T: Array, offset_T: Array) -> Array:
    """Of each token and key head its row in the pages seen as `[P * K * C, H]`: over whole tokens,
    XLA for TPU brings the pool into another layout and back."""
    _, K, C, _ = pages.shape
    return (page_T[:, None] * K + jnp.arange(K, dtype=page_T.dtype)) * C + offset_T[:, None]


def _put(pages: Array, row_TK: Array, new_TKH: Array) -> Array:
    flat = (
        pages.reshape(-1, pages.shape[-1])
        .at[row_TK]
        .set(new_TKH.astype(pages.dtype), mode="drop", unique_indices=True)
    )
    return flat.reshape(pages.shape)
