"""Paged decode attention over latents: all query heads of a row meet one key a token, whose first
part is the value, too."""

from __future__ import annotations

from typing import Unpack

from jax import Array

from pallas_kernels.backends import AttentionOptions, Backends
from pallas_kernels.latent_decode.rows import LatentRows as LatentRows
from pallas_kernels.latent_decode.rows import UpProjections as UpProjections
from pallas_kernels.latent_decode.rows import absorbed as absorbed
from pallas_kernels.latent_decode.rows import projected as projected
from pallas_kernels.target import ANYWHERE, HOPPER

BACKENDS = Backends(
    __name__, "latent_decode", {"reference": ANYWHERE, "xla": ANYWHERE, "mosaic_gpu": HOPPER}
)


def latent_decode(
    q_BNW: Array,
    pages_PCW: Array,
    page_table_BM: Array,
    lengths_B: Array,
    *,
    backend: str,
    value_dim: int,
    **options: Unpack[AttentionOptions],
) -> Array:
    """Attention of each row's newest token over the latents in its pages; returns `o_BNV` in q's
    dtype, V being `value_dim`.

    A token's entry of W numbers is its key for every head, and its first V numbers are its value: a
    compressed latent, then the rotated part of the key. Queries are absorbed: multiplied by the
    up-projection of keys. Pages, the table, lengths, unused places and rows are as in
    `paged_decode.decode_attention`; of its options there are `scale`, `first_page`, `no_split` and
    `plan`. Raises `UnknownBackend` for a name not in `BACKENDS`, and ValueError for what a back end
    does not take.
    """
    run = BACKENDS[backend]
    return run(q_BNW, pages_PCW, page_table_BM, lengths_B, value_dim=value_dim, **options)
