"""Attention of prompt chunks over latents: ragged rows of queries against their pages, causal after
a cached prefix."""

from __future__ import annotations

from typing import Unpack

from jax import Array

from pallas_kernels.backends import AttentionOptions, Backends
from pallas_kernels.latent_decode.rows import UpProjections
from pallas_kernels.target import ANYWHERE, HOPPER

BACKENDS = Backends(
    __name__, "latent_extend", {"reference": ANYWHERE, "xla": ANYWHERE, "mosaic_gpu": HOPPER}
)


def latent_extend(
    q_TNH: Array,
    up: UpProjections,
    pages_PCW: Array,
    page_table_RM: Array,
    starts_R: Array,
    lengths_R: Array,
    kv_lengths_R: Array,
    *,
    backend: str,
    **options: Unpack[AttentionOptions],
) -> Array:
    """Attention of ragged rows of queries over the latents in their pages; returns `o_TNF` in q's
    dtype, F being the width of a head's value.

    Rows, their tables and unused places are those of `paged_extend.extend_attention`, pages and
    options those of `latent_decode.latent_decode`. Queries are not absorbed: a back end decides
    whether it absorbs them or expands latents to keys and values. Tokens of no row give zeros.
    """
    run = BACKENDS[backend]
    rows = (page_table_RM, starts_R, lengths_R, kv_lengths_R)
    return run(q_TNH, up, pages_PCW, *rows, **options)
