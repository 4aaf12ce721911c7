"""Work items of one shape, cut from the queries of a ragged step, for back ends with static shapes.

An item is up to `queries` consecutive tokens of one row with all their heads: `[W, K, R, H]`.
Place r of KV head k holds query head k·G + r // queries of token r % queries. Places beyond the
row's tokens hold arbitrary values, and nothing reads their results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from pallas_kernels.backends import AttentionOptions


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Static parameters of attention over items.

    Attributes:
      queries: tokens of an item; its places hold them for each query head.
      scale, window, softcap: as in `AttentionOptions`.
    """

    queries: int
    scale: float
    window: int | None = None
    softcap: float | None = None

    @classmethod
    def of(cls, queries: int, options: AttentionOptions, **sizes: Any) -> Self:
        """The parameters of one call; `sizes` are those that a back end adds."""
        window = options.get("window")
        softcap = options.get("softcap")
        return cls(queries=queries, scale=options["scale"], window=window, softcap=softcap, **sizes)


class Items(NamedTuple):
    """What each item attends to, int32 `[W]`.

    Attributes:
      row_W: row of the page table.
      position_W: position of the item's first query.
      keys_W: keys of the row that the item's last query sees; 0 = unused item, whose result is 0.
    """

    row_W: Array
    position_W: Array
    keys_W: Array


def decode_items(lengths_B: Array) -> Items:
    """One item a row: its newest token, which sees every key."""
    lengths_B = lengths_B.astype(jnp.int32)
    return Items(
        jnp.arange(lengths_B.shape[0], dtype=jnp.int32), jnp.maximum(lengths_B - 1, 0), lengths_B
    )


def sinks_of_places(sinks: Array | None, kv_heads: int, queries: int, places: int) -> Array | None:
    """The sink logit of each place, float32 `[K, R]`, from the sinks of the query heads `[N]`."""
    if sinks is None:
        return None
    sinks_KR = jnp.repeat(sinks.astype(jnp.float32).reshape(kv_heads, -1), queries, axis=1)
    return jnp.pad(sinks_KR, ((0, 0), (0, places - sinks_KR.shape[1])))


def pack_decode(q_BNH: Array, kv_heads: int, multiple: int) -> Array:
    """Queries as items `[B, K, R, H]`; R is the group size rounded up to `multiple`."""
    B, N, H = q_BNH.shape
    G = N // kv_heads
    return jnp.pad(q_BNH.reshape(B, kv_heads, G, H), ((0, 0), (0, 0), (0, -G % multiple), (0, 0)))


def unpack_decode(o_BKRH: Array, heads: int) -> Array:
    """The inverse of `pack_decode`."""
    B, K, _, H = o_BKRH.shape
    return o_BKRH[:, :, : heads // K].reshape(B, heads, H)


class Chunks(NamedTuple):
    """Items of ragged chunks, and where each token's result lies.

    Attributes:
      items: the items.
      token_WQ: token of each query of each item.
      place_T: number of each token's query among the queries of all items; -1 = token of no row.
    """

    items: Items
    token_WQ: Array
    place_T: Array


def chunk_items(
    starts_R: Array, lengths_R: Array, kv_lengths_R: Array, tokens: int, queries: int
) -> Chunks:
    """Cut every row's chunk into items of `queries` tokens.

    The number of items is `tokens // queries + R`, an upper bound of what R rows need.
    """
    starts_R, lengths_R, kv_lengths_R = (
        x.astype(jnp.int32) for x in (starts_R, lengths_R, kv_lengths_R)
    )
    rows = starts_R.shape[0]
    count_R = -(-lengths_R // queries)
    ends_R = jnp.cumsum(count_R)
    before_R = ends_R - count_R
    item_W = jnp.arange(tokens // queries + rows, dtype=jnp.int32)
    row_W = jnp.minimum(jnp.sum(item_W[:, None] >= ends_R, axis=1, dtype=jnp.int32), rows - 1)
    first_W = (item_W - before_R[row_W]) * queries  # of the row's chunk
    live_W = item_W < ends_R[-1]
    prefix_W = kv_lengths_R[row_W] - lengths_R[row_W]
    keys_W = jnp.where(live_W, prefix_W + jnp.minimum(first_W + queries, lengths_R[row_W]), 0)
    items = Items(row_W, jnp.where(live_W, prefix_W + first_W, 0), keys_W)
    token_WQ = jnp.clip((starts_R[row_W] + first_W)[:, None] + jnp.arange(queries), 0, tokens - 1)
    token_T = jnp.arange(tokens, dtype=jnp.int32)
    mine_TR = (token_T[:, None] >= starts_R) & (token_T[:, None] < starts_R + lengths_R)
    place_T = jnp.sum(
        jnp.where(mine_TR, before_R * queries + token_T[:, None] - starts_R, 0), axis=1
    )
    return Chunks(items, token_WQ, jnp.where(mine_TR.any(axis=1), place_T, -1))


def pack_chunks(q_TNH: Array, chunks: Chunks, kv_heads: int) -> Array:
    """Queries as items `[W, K, G · queries, H]`."""
    _, N, H = q_TNH.shape
    W, Q = chunks.token_WQ.shape
    q_WQKGH = q_TNH[chunks.token_WQ].reshape(W, Q, kv_heads, N // kv_heads, H)
    return q_WQKGH.transpose(0, 2, 3, 1, 4).reshape(W, kv_heads, N // kv_heads * Q, H)


def unpack_chunks(o_WKRH: Array, chunks: Chunks) -> Array:
    """The inverse of `pack_chunks`; tokens of no row give zeros."""
    W, K, R, H = o_WKRH.shape
    Q = chunks.token_WQ.shape[1]
    o_SNH = (
        o_WKRH.reshape(W, K, R // Q, Q, H).transpose(0, 3, 1, 2, 4).reshape(W * Q, K * R // Q, H)
    )
    outputs = o_SNH[jnp.maximum(chunks.place_T, 0)]
    return jnp.where((chunks.place_T >= 0)[:, None, None], outputs, 0)
