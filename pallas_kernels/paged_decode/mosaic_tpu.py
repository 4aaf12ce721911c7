"""Paged decode attention for TPU: one grid step a row, all KV heads of a device together; see
`pallas_kernels.mosaic_tpu`."""

from __future__ import annotations

from typing import Any, Unpack

import jax.numpy as jnp
from jax import Array

from pallas_kernels import items, mosaic_tpu
from pallas_kernels.backends import AttentionOptions, shifted
from pallas_kernels.mosaic_tpu import check as check

MOST_TOKENS = 512  # of a tile


def decode_attention(
    q_BNH: Array,
    k_pages: Array,
    v_pages: Array,
    page_table_BM: Array,
    lengths_B: Array,
    *,
    interpret: Any = False,
    **options: Unpack[AttentionOptions],
) -> Array:
    """See `pallas_kernels.paged_decode`. `interpret` is a `pltpu.InterpretParams` for machines
    without a TPU.

    bfloat16 or float32; head_dim a multiple of 128; pages of a multiple of 16 tokens (8 in
    float32). Raises ValueError otherwise.
    """
    check(q_BNH, k_pages, v_pages)
    page_table_BM = shifted(page_table_BM, options)
    N = q_BNH.shape[1]
    K = k_pages.shape[1]
    pages = mosaic_tpu.pages_per_tile(k_pages, K, MOST_TOKENS)
    spec = mosaic_tpu.Spec.of(1, options, heads=K, pages=pages, interpret=interpret)
    q_BKRH = items.pack_decode(q_BNH, K, mosaic_tpu.sublanes(q_BNH.dtype))
    out = []
    for group in mosaic_tpu.row_groups(page_table_BM):
        part = items.decode_items(lengths_B[group])
        out.append(
            mosaic_tpu.attend(
                spec,
                q_BKRH[group],
                k_pages,
                v_pages,
                page_table_BM[group],
                part,
                options.get("sinks"),
            )
        )
    return items.unpack_decode(out[0] if len(out) == 1 else jnp.concatenate(out), N)
