"""Attention of items over pages in plain JAX: the `xla` back ends, for devices without a kernel.

All items of `pallas_kernels.items` walk over their keys together, a large tile at a time, each from
the first page that it sees. A tile is a gather and two batched products in the pool's type, summed
in float32. The longest item decides the number of tiles.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.items import Items, Spec, sinks_of_places
from pallas_kernels.ordering import zeros_after
from pallas_kernels.target import PORTABLE, Target

TILE_BYTES = 128 << 20  # gathered keys and values of a tile, with their scores and weights
MIN_TILE_TOKENS = 128
MAX_TILE_TOKENS = 1024


def check(q: Array, k_pages: Array, v_pages: Array) -> None:
    """Raise ValueError for shapes that no back end supports."""
    if (
        q.shape[1] % k_pages.shape[1]
        or k_pages.shape[3] != q.shape[2]
        or v_pages.shape[:3] != k_pages.shape[:3]
    ):
        raise ValueError(
            "xla takes K and V pools of equal pages whose heads divide the query heads, "
            f"got q {q.shape}, k {k_pages.shape}"
        )


def prefers(target: Target, *shapes: Any) -> bool:
    """On accelerators: on a CPU the reference is as fast."""
    return target.platform != PORTABLE.platform


def pages_per_tile(q_WKRH: Array, k_pages: Array) -> int:
    """Pages in one tile of every item."""
    W, K, R, H = q_WKRH.shape
    C = k_pages.shape[2]
    token = W * K * 2 * (H * q_WKRH.dtype.itemsize + R * 4)  # values are at most as wide as keys
    tokens = min(MAX_TILE_TOKENS, max(MIN_TILE_TOKENS, TILE_BYTES // token))
    return max(1, tokens // C)


def attend(
    spec: Spec,
    q_WKRH: Array,
    pools: tuple[Array, ...],
    table: Array,
    items: Items,
    sinks: Array | None,
) -> Array:
    """Attention of every item, `[W, K, R, V]`, where V is the width of a value.

    `pools` are as from `backends.pools_of`, `sinks` as in `AttentionOptions`.
    """
    W, K, R, _ = q_WKRH.shape
    C = pools[0].shape[2]
    row_W, position_W, keys_W = items
    pages = pages_per_tile(q_WKRH, pools[0])
    if spec.window is None:
        first_W = jnp.zeros_like(keys_W)
    else:
        first_W = jnp.maximum(position_W - spec.window + 1, 0)
    page_W = jnp.where(keys_W > 0, first_W // C, 0)
    tiles = jnp.max(-(-(-(-keys_W // C) - page_W) // pages), initial=0)
    query_WR = position_W[:, None] + jnp.arange(R) % spec.queries
    precision = lax.Precision.HIGHEST if q_WKRH.dtype == jnp.float32 else None
    multiply = functools.partial(
        jnp.einsum, precision=precision, preferred_element_type=jnp.float32
    )

    def step(tile: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        old, total, mixed = carry
        entry_WS = page_W[:, None] + tile * pages + jnp.arange(pages)
        id_WS = table[row_W[:, None], jnp.minimum(entry_WS, table.shape[1] - 1)]
        key_WT = (entry_WS[:, :, None] * C + jnp.arange(C)).reshape(W, pages * C)
        # A page may hold NaN, and 0 · NaN is NaN
        valid = (key_WT < keys_W[:, None])[:, None, :, None]
        k, v = _tile(pools, id_WS, q_WKRH.dtype)
        scores = multiply("ikrh,ikth->ikrt", q_WKRH, k) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * jnp.tanh(scores / spec.softcap)
        seen = (key_WT[:, None] <= query_WR[:, :, None]) & (key_WT < keys_W[:, None])[:, None]
        if spec.window is not None:
            seen &= key_WT[:, None] > query_WR[:, :, None] - spec.window
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        top = jnp.maximum(old, scores.max(axis=-1))
        base = jnp.where(top == -jnp.inf, 0.0, top)  # a query that has seen no key yet
        weights = jnp.exp(scores - base[..., None])
        decay = jnp.exp(old - base)
        mixed = mixed * decay[..., None] + multiply(
            "ikrt,ikth->ikrh", weights.astype(v.dtype), jnp.where(valid, v, 0)
        )
        return top, total * decay + weights.sum(axis=-1), mixed

    q_WKRH, zeros_WKRV = zeros_after(q_WKRH, (W, K, R, pools[1].shape[-1]), jnp.float32)
    sinks_KR = sinks_of_places(sinks, K, spec.queries, R)
    top = zeros_WKRV[..., 0] + (-jnp.inf if sinks_KR is None else sinks_KR)
    total = zeros_WKRV[..., 0] + (0.0 if sinks_KR is None else 1.0)
    _, total, mixed = lax.fori_loop(0, tiles, step, (top, total, zeros_WKRV))
    return (mixed / jnp.where(total == 0, 1.0, total)[..., None]).astype(q_WKRH.dtype)


def _tile(pools: tuple[Array, ...], id_WS: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """Keys and values `[W, K, S · C, H]` of these pages, in `dtype`."""
    planes = [jnp.moveaxis(pool.at[id_WS].get(mode="clip"), 1, 2).astype(dtype) for pool in pools]
    if len(planes) > 2:
        planes[:2] = (
            x * scale[..., None]
            for x, scale in zip(planes, jnp.moveaxis(planes[2], -2, 0), strict=False)
        )
    k, v = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in planes[:2])
    return k, v
