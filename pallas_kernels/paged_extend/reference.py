"""Paged attention for ragged prompt chunks in pure JAX: the definition of the op, and its CPU back
end."""

from __future__ import annotations

from typing import Unpack

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import tiles
from pallas_kernels.backends import AttentionOptions, shifted

QUERY_TILE = 32


def query_tiles(first_R: Array, end_R: Array) -> Array:
    """How many query tiles the positions [first, end) of each row touch."""
    return jnp.where(end_R > first_R, (end_R - 1) // QUERY_TILE - first_R // QUERY_TILE + 1, 0)


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
    """See `pallas_kernels.paged_extend`. Works through a list of (row, query tile); a row has as
    many as its chunk touches.

    Query tiles, like key tiles, are cut at multiples of their size counted from position 0 of the
    sequence, so a token always sits at the same place of the same tile. T tokens in R rows make at
    most T / QUERY_TILE + 2R tiles, and only those in use run.
    """
    page_table_RM = shifted(page_table_RM, options)
    window = options.get("window")
    sinks = options.get("sinks")
    scale = options["scale"]
    softcap = options.get("softcap")
    T, N, H = q_TNH.shape
    _, K, C, _ = k_pages.shape
    G = N // K
    Q = QUERY_TILE
    V = v_pages.shape[-1]
    pages = tiles.pages_per_tile(C)
    tokens = pages * C
    table = tiles.padded_table(page_table_RM, pages)
    q = jnp.pad(
        (q_TNH.astype(jnp.float32) * scale).reshape(T, K, G, H),
        ((Q, Q), (0, 0), (0, 0), (0, 0)),
    )
    first_R = kv_lengths_R - lengths_R  # position of each row's first query
    tiles_R = query_tiles(first_R, kv_lengths_R)
    ends_R = jnp.cumsum(tiles_R)

    sinks_KP = None
    if sinks is not None:
        sinks_KP = jnp.tile(sinks.astype(jnp.float32).reshape(K, G), (1, Q))

    def query_tile(item: Array, out: Array) -> Array:
        row = jnp.sum(ends_R <= item)
        first = first_R[row]
        end = kv_lengths_R[row]
        tile_start = (first // Q + item - (ends_R[row] - tiles_R[row])) * Q
        place = Q + starts_R[row] + tile_start - first  # where the tile lies in the padded tokens
        query = tile_start + jnp.arange(Q)
        live = (query >= first) & (query < end)
        if window is None:
            low = jnp.zeros_like(first)
        else:
            low = jnp.maximum(jnp.maximum(tile_start, first) - window + 1, 0)
        high = jnp.minimum(tile_start + Q, end)
        q_KQH = lax.dynamic_slice_in_dim(q, place, Q).transpose(1, 0, 2, 3).reshape(K, Q * G, H)

        def key_tile(tile: Array, carry: tiles.Carry) -> tiles.Carry:
            key = tile * tokens + jnp.arange(tokens)
            mask = live[:, None] & (key <= query[:, None])
            if window is not None:
                mask &= key > query[:, None] - window
            k, v = tiles.load_tiles(
                (k_pages, v_pages), options.get("scales"), table[row], tile, pages
            )
            return tiles.fold(carry, q_KQH, k, v, jnp.repeat(mask, G, axis=0), softcap)

        carry = lax.fori_loop(
            low // tokens, -(-high // tokens), key_tile, tiles.start((K, Q * G), V)
        )
        mixed = tiles.finish(carry, sinks_KP).reshape(K, Q, G, V).transpose(1, 0, 2, 3)
        kept = lax.dynamic_slice_in_dim(out, place, Q)  # neighbours' tokens share this window
        return lax.dynamic_update_slice_in_dim(
            out, jnp.where(live[:, None, None, None], mixed, kept), place, axis=0
        )

    out = lax.fori_loop(0, jnp.sum(tiles_R), query_tile, jnp.zeros((*q.shape[:-1], V)))
    return out[Q : Q + T].reshape(T, N, V).astype(q_TNH.dtype)
