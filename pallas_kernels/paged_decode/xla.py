"""Paged decode attention in plain JAX for accelerators without a kernel: large tiles of all rows at
once; see `pallas_kernels.xla`."""

from __future__ import annotations

from typing import Unpack

from jax import Array

from pallas_kernels import items, xla
from pallas_kernels.backends import AttentionOptions, pools_of, shifted
from pallas_kernels.xla import check as check
from pallas_kernels.xla import prefers as prefers


def decode_attention(
    q_BNH: Array,
    k_pages: Array,
    v_pages: Array,
    page_table_BM: Array,
    lengths_B: Array,
    **options: Unpack[AttentionOptions],
) -> Array:
    """See `pallas_kernels.paged_decode`. Takes what the reference takes."""
    check(q_BNH, k_pages, v_pages)
    page_table_BM = shifted(page_table_BM, options)
    N = q_BNH.shape[1]
    K = k_pages.shape[1]
    q_BKRH = items.pack_decode(q_BNH, K, 1)
    pools = pools_of(k_pages, v_pages, options)
    rows = items.decode_items(lengths_B)
    spec = items.Spec.of(1, options)
    sinks = options.get("sinks")
    out = xla.attend(spec, q_BKRH, pools, page_table_BM, rows, sinks)
    return items.unpack_decode(out, N)
