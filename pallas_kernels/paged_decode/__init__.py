"""Paged decode attention: one query token a row against the row's pages."""

from __future__ import annotations

from typing import Unpack

from jax import Array

from pallas_kernels.backends import AttentionOptions, Backends
from pallas_kernels.target import ANYWHERE, HOPPER, TPU

BACKENDS = Backends(
    __name__,
    "decode_attention",
    {"reference": ANYWHERE, "xla": ANYWHERE, "mosaic_gpu": HOPPER, "mosaic_tpu": TPU},
)


def decode_attention(
    q_BNH: Array,
    k_pages: Array,
    v_pages: Array,
    page_table_BM: Array,
    lengths_B: Array,
    *,
    backend: str,
    **options: Unpack[AttentionOptions],
) -> Array:
    """Attention of each row's newest token over the tokens in its pages; returns `o_BNH` in q's
    dtype.

    `k_pages` and `v_pages` are `[P, K, C, H]`. Token j of row b lies in page `page_table_BM[b, j //
    C]`, plus `first_page`, at offset `j % C`. `lengths_B` counts the newest token; its key and
    value are already written and its position is `length - 1`. Length 0 is a row that is not in
    use; its output is zeros. Query head n uses key head `n // (N / K)`. `reference` and `xla` also
    take values of another width than keys, `[P, K, C, V]`; the output then has theirs.

    With `window` w a query at position p sees keys p - w < j <= p. `softcap` s maps scores x to
    s·tanh(x / s). `sinks` adds one logit per query head to the denominator. Pages of 8-bit floats
    come with `scales` `[P, K, 2, C]`: the factors of each token's key (0) and value (1).

    Places beyond a row's length may hold anything, NaN included, and so may places before its
    window. One exception: back ends with `TILE_TOKENS` read full tiles, so what shares a tile of so
    many tokens with a visible token must be finite. Raises `UnknownBackend` for a name not in
    `BACKENDS`.
    """
    return BACKENDS[backend](q_BNH, k_pages, v_pages, page_table_BM, lengths_B, **options)
