"""Attention over one tile of keys and values at a time in plain JAX, for the reference back ends.

A tile is a fixed number of tokens, counted from position 0 of the sequence. A query therefore meets
the same tiles however its prompt was chunked, batched or padded. A tile in which a query sees no
key leaves its result unchanged to the last bit.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

TILE_TOKENS = 128

# Running maximum [..., Q], running sum [..., Q], weighted values [..., Q, H]; all float32
type Carry = tuple[Array, Array, Array]


def pages_per_tile(page_size: int) -> int:
    """Pages in one tile: `TILE_TOKENS` tokens, or one page if pages are larger."""
    return max(1, TILE_TOKENS // page_size)


def padded_table(table: Array, pages: int) -> Array:
    """The page table with its last axis padded to a multiple of `pages`. Padding names page 0, and
    its keys are always masked."""
    width = -(-table.shape[-1] // pages) * pages
    return jnp.pad(table, [(0, 0)] * (table.ndim - 1) + [(0, width - table.shape[-1])])


def load_tile(pages_PKCH: Array, table: Array, tile: Array, pages: int) -> Array:
    """Tile number `tile` of each sequence, `[..., K, tokens, H]` float32. Table entries outside the
    pool read an arbitrary page, so the caller masks them."""
    ids = lax.dynamic_slice_in_dim(table, tile * pages, pages, axis=-1)
    paged_tile = jnp.moveaxis(pages_PKCH.at[ids].get(mode="clip"), -4, -3)  # [..., K, pages, C, H]
    *lead, K, S, C, H = paged_tile.shape
    return paged_tile.reshape(*lead, K, S * C, H).astype(jnp.float32)


def load_tiles(
    pools: tuple[Array, Array], scales_PK2C: Array | None, table: Array, tile: Array, pages: int
) -> tuple[Array, Array]:
    """Keys and values of tile number `tile` as from `load_tile`, times their scales if they have
    some."""
    k, v = (load_tile(pool, table, tile, pages) for pool in pools)
    if scales_PK2C is None:
        return k, v
    scale_tile = load_tile(scales_PK2C, table, tile, pages)  # [..., K, pages * 2, C]
    *lead, rows, C = scale_tile.shape
    scales = jnp.moveaxis(scale_tile.reshape(*lead, rows // 2, 2, C), -2, 0).reshape(
        2, *lead, rows // 2 * C, 1
    )
    return k * scales[0], v * scales[1]


def start(lead: tuple[int, ...], head_dim: int, zero: Array | float = 0.0) -> Carry:
    """The carry before the first tile; `lead` is the queries' shape without the head dimension.
    `zero` is a scalar that may come late, see `pallas_kernels.ordering`."""
    zeros = jnp.full(lead, zero, jnp.float32)
    return zeros - jnp.inf, zeros, jnp.full((*lead, head_dim), zero, jnp.float32)


def fold(carry: Carry, q: Array, k: Array, v: Array, mask: Array, softcap: float | None) -> Carry:
    """Fold one tile into the carry (online softmax).

    q `[..., Q, H]` is scaled already; k, v are `[..., tokens, H]`; mask broadcasts to
    `[..., Q, tokens]`. Values that no query sees are replaced by 0 first: a page may hold NaN, and
    0 · NaN is NaN.
    """
    top, total, mixed = carry
    scores = jnp.einsum("...qh,...th->...qt", q, k, precision=lax.Precision.HIGHEST)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask, scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(axis=-1))
    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # a query that has seen no key yet
    weights = jnp.exp(scores - base[..., None])
    decay = jnp.exp(top - base)
    seen = mask.any(axis=-2)[..., None]
    values = jnp.einsum(
        "...qt,...th->...qh", weights, jnp.where(seen, v, 0.0), precision=lax.Precision.HIGHEST
    )
    return new_top, total * decay + _sum(weights), mixed * decay[..., None] + values


def _sum(x: Array) -> Array:
    """The sum over the last axis as a fixed tree of additions. XLA's order of additions depends on
    the sizes of the other axes."""
    while (size := x.shape[-1]) > 1:
        half = size // 2
        x = jnp.concatenate([x[..., :half] + x[..., half : 2 * half], x[..., 2 * half :]], axis=-1)
    return x[..., 0]


def finish(carry: Carry, sinks: Array | None = None) -> Array:
    """The attention output `[..., Q, H]` in float32; queries that saw no key give zeros.

    `sinks` adds one logit a query to the sum, with no value; it broadcasts to `[..., Q]`.
    """
    top, total, mixed = carry
    if sinks is not None:
        new_top = jnp.maximum(top, sinks)
        decay = jnp.exp(top - new_top)
        total = total * decay + jnp.exp(sinks - new_top)
        mixed = mixed * decay[..., None]
    return mixed / jnp.where(total == 0, 1.0, total)[..., None]
