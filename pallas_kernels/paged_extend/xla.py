"""Paged attention for prompt chunks in plain JAX for accelerators without a kernel: all query tiles
at once; see `pallas_kernels.xla`."""

from __future__ import annotations

from typing import Unpack

from jax import Array

from pallas_kernels import items, xla
from pallas_kernels.backends import AttentionOptions, pools_of, shifted
from pallas_kernels.xla import check as check
from pallas_kernels.xla import prefers as prefers

QUERIES = 128  # of an item


def extend_attention(
    q_TNH: Array,
    k_pages: Array,
    v_pages: Array,
    page_table_RM: Array,
    starts_R: Array,
    lengths_R: Array,
    kv_lengths_R: Array,
    **options: Unpack[AttentionOptions],
) -> Array:
    """See `pallas_kernels.paged_extend`. Takes what the reference takes."""
    check(q_TNH, k_pages, v_pages)
    page_table_RM = shifted(page_table_RM, options)
    T = q_TNH.shape[0]
    K = k_pages.shape[1]
    queries = min(QUERIES, T)
    chunks = items.chunk_items(starts_R, lengths_R, kv_lengths_R, T, queries)
    packed_q = items.pack_chunks(q_TNH, chunks, K)
    pools = pools_of(k_pages, v_pages, options)
    spec = items.Spec.of(queries, options)
    sinks = options.get("sinks")
    packed_out = xla.attend(spec, packed_q, pools, page_table_RM, chunks.items, sinks)
    return items.unpack_chunks(packed_out, chunks)
