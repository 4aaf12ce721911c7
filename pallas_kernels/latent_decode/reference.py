"""Latent decode attention in pure JAX: the definition of the op, and its CPU back end."""

from __future__ import annotations

from typing import Unpack

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import tiles
from pallas_kernels.backends import AttentionOptions, shifted
from pallas_kernels.ordering import together


def latent_decode(
    q_BNW: Array,
    pages_PCW: Array,
    page_table_BM: Array,
    lengths_B: Array,
    *,
    value_dim: int,
    **options: Unpack[AttentionOptions],
) -> Array:
    """See `pallas_kernels.latent_decode`. All rows walk their tiles together."""
    B, N, _ = q_BNW.shape
    C = pages_PCW.shape[1]
    pages = tiles.pages_per_tile(C)
    tokens = pages * C
    table = tiles.padded_table(shifted(page_table_BM, options), pages)
    q_B1NW = (q_BNW.astype(jnp.float32) * options["scale"])[:, None]

    def step(tile: Array, carry: tiles.Carry) -> tiles.Carry:
        position = tile * tokens + jnp.arange(tokens)
        mask = (position < lengths_B[:, None])[:, None, None, :]
        k_B1TW = tiles.load_tile(pages_PCW[:, None], table, tile, pages)
        return tiles.fold(carry, q_B1NW, k_B1TW, k_B1TW[..., :value_dim], mask, None)

    high = jnp.max(-(-lengths_B // tokens), initial=0)
    # XLA runs this on accelerators, too
    q_B1NW, zero = together(q_B1NW, jnp.float32(0))
    carry = lax.fori_loop(0, high, step, tiles.start((B, 1, N), value_dim, zero))
    return tiles.finish(carry)[:, 0].astype(q_BNW.dtype)
