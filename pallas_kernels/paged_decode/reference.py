"""Paged decode attention in pure JAX: the definition of the op, and its CPU back end."""

from __future__ import annotations

from typing import Unpack

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import tiles
from pallas_kernels.backends import AttentionOptions, shifted


def decode_attention(
    q_BNH: Array,
    k_pages: Array,
    v_pages: Array,
    page_table_BM: Array,
    lengths_B: Array,
    **options: Unpack[AttentionOptions],
) -> Array:
    """See `pallas_kernels.paged_decode`. All rows walk their tiles together, from the first that
    any row sees to the longest row's last."""
    page_table_BM = shifted(page_table_BM, options)
    window = options.get("window")
    sinks = options.get("sinks")
    B, N, H = q_BNH.shape
    _, K, C, _ = k_pages.shape
    pages = tiles.pages_per_tile(C)
    tokens = pages * C
    table = tiles.padded_table(page_table_BM, pages)
    q_BKGH = (q_BNH.astype(jnp.float32) * options["scale"]).reshape(B, K, N // K, H)
    if window is None:
        first_B = jnp.zeros_like(lengths_B)
    else:
        first_B = jnp.maximum(lengths_B - window, 0)

    def step(tile: Array, carry: tiles.Carry) -> tiles.Carry:
        position = tile * tokens + jnp.arange(tokens)
        mask = (position >= first_B[:, None]) & (position < lengths_B[:, None])
        k, v = tiles.load_tiles((k_pages, v_pages), options.get("scales"), table, tile, pages)
        return tiles.fold(carry, q_BKGH, k, v, mask[:, None, None, :], options.get("softcap"))

    live = lengths_B > 0
    low = jnp.min(
        jnp.where(live, first_B // tokens, jnp.iinfo(jnp.int32).max),
        initial=jnp.iinfo(jnp.int32).max,
    )
    high = jnp.max(-(-lengths_B // tokens), initial=0)
    carry = lax.fori_loop(low, high, step, tiles.start((B, K, N // K), v_pages.shape[-1]))
    out = tiles.finish(
        carry, None if sinks is None else sinks.astype(jnp.float32).reshape(K, N // K)
    )
    return out.reshape(B, N, -1).astype(q_BNH.dtype)
