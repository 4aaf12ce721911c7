"""Paged attention for prompt chunks: ragged rows of queries against their pages, causal after a
cached prefix."""

from __future__ import annotations

from typing import Unpack

from jax import Array

from pallas_kernels.backends import AttentionOptions, Backends
from pallas_kernels.target import ANYWHERE, HOPPER, TPU

BACKENDS = Backends(
    __name__,
    "extend_attention",
    {"reference": ANYWHERE, "xla": ANYWHERE, "mosaic_gpu": HOPPER, "mosaic_tpu": TPU},
)


def extend_attention(
    q_TNH: Array,
    k_pages: Array,
    v_pages: Array,
    page_table_RM: Array,
    starts_R: Array,
    lengths_R: Array,
    kv_lengths_R: Array,
    *,
    backend: str,
    **options: Unpack[AttentionOptions],
) -> Array:
    """Attention of ragged rows of queries over the tokens in their pages; returns `o_TNH` in q's
    dtype.

    Row r's queries are `q_TNH[starts[r] : starts[r] + lengths[r]]`. Their positions in the sequence
    are `kv_lengths[r] - lengths[r]` to `kv_lengths[r] - 1`. Their keys and values, and those of the
    prefix before them, are already in the row's pages. Each query sees the keys up to its own
    position (bottom-right causal). Rows do not overlap. Length 0 is a row that is not in use.
    Tokens of no row give zeros.

    Pages, `first_page`, `scales`, heads, `window`, `softcap`, `sinks`, unused places and errors as
    in `paged_decode.decode_attention`.
    """
    rows = (page_table_RM, starts_R, lengths_R, kv_lengths_R)
    return BACKENDS[backend](q_TNH, k_pages, v_pages, *rows, **options)
