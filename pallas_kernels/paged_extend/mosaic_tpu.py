"""Paged attention for ragged prompt chunks on TPU: one grid step a tile of queries and a KV head;
see `pallas_kernels.mosaic_tpu`."""

from __future__ import annotations

from typing import Any, Unpack

import jax.numpy as jnp
from jax import Array

from pallas_kernels import items, mosaic_tpu
from pallas_kernels.backends import AttentionOptions, shifted
from pallas_kernels.mosaic_tpu import check as check

MOST_QUERIES = 256  # of a tile; with their heads at most about PLACES
PLACES = 1024
SCORES = 1 << 18  # of a tile of queries by a tile of keys


def extend_attention(
    q_TNH: Array,
    k_pages: Array,
    v_pages: Array,
    page_table_RM: Array,
    starts_R: Array,
    lengths_R: Array,
    kv_lengths_R: Array,
    *,
    interpret: Any = False,
    **options: Unpack[AttentionOptions],
) -> Array:
    """See `pallas_kernels.paged_extend`. `interpret` is a `pltpu.InterpretParams` for machines
    without a TPU.

    bfloat16 or float32; head_dim a multiple of 128; pages of a multiple of 16 tokens (8 in
    float32). Raises ValueError otherwise.
    """
    check(q_TNH, k_pages, v_pages)
    page_table_RM = shifted(page_table_RM, options)
    T, N, _ = q_TNH.shape
    K = k_pages.shape[1]
    queries = queries_per_tile(T, N // K)
    pages = mosaic_tpu.pages_per_tile(k_pages, 1, SCORES * K // (queries * N))
    spec = mosaic_tpu.Spec.of(queries, options, heads=1, pages=pages, interpret=interpret)
    out = jnp.zeros_like(q_TNH)
    for group in mosaic_tpu.row_groups(page_table_RM):
        chunks = items.chunk_items(
            starts_R[group], lengths_R[group], kv_lengths_R[group], T, queries
        )
        q_WKPH = items.pack_chunks(q_TNH, chunks, K)
        o_WKPH = mosaic_tpu.attend(
            spec, q_WKPH, k_pages, v_pages, page_table_RM[group], chunks.items, options.get("sinks")
        )
        out += items.unpack_chunks(o_WKPH, chunks)
    return out


def queries_per_tile(tokens: int, group: int) -> int:
    """A power of two: 16 at least, no more than the step has, and few enough for a group's heads to
    share a tile."""
    queries = 16
    while queries < min(tokens, MOST_QUERIES) and 2 * queries * group <= PLACES:
        queries *= 2
    return queries
