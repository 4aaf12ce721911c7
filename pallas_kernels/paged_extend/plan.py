"""Split plan of one extend step: which key tiles of which query tiles every lane of the grid works
on. Computed on device.

Tokens of the step are cut into spans: every row's chunk, and every gap that no row uses (its tokens
get zeros). Each span is cut into items of `queries` tokens. An item makes one unit per share of a
KV head's query heads. The key tiles of all units stand in one line, and the line is cut into equal
shares, one a lane; lane x KV head is one thread block. So every block does the same work, be it one
chunk after a long prefix or many short ones. A unit belongs to the lane with its first tile; lanes
further on that work on it, its followers, hand it their parts. In a whole plan cuts move on to the
next unit's first tile: no unit has parts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

ITEM_FIELDS = 8
LANE_FIELDS = 6 + ITEM_FIELDS


class Cut(NamedTuple):
    """How a step is cut: tokens in all and of an item, keys of a tile, units of an item, lanes,
    fewest tiles of a share, KV heads, and whether units are left whole."""

    tokens: int
    queries: int
    keys: int
    units: int
    lanes: int
    min_tiles: int
    kv_heads: int
    whole: bool = False


class ExtendPlan(NamedTuple):
    """Arrays that the kernel reads as scalars; int32 all. One plan serves every layer of a step
    that has the same window.

    items_I8: (first token, first own token, end of own tokens, row, sequence position of the first
    token, number of keys the last own query sees, first key tile, where in the line its first tile
    is). No keys: the tokens get zeros. An item at the end of the array is moved back so that it
    lies inside. lanes_LF: per lane its share (first tile in the line, end tile, first unit, end
    unit), the lane that its first unit belongs to, how many followers its last unit has if that
    belongs to it, and the fields of its first item; then one flag a KV head, zero between two
    calls.
    """

    items_I8: jax.Array
    lanes_LF: jax.Array


def make_plan(
    starts_R: jax.Array,
    lengths_R: jax.Array,
    kv_lengths_R: jax.Array,
    *,
    cut: Cut,
    window: int | None,
) -> ExtendPlan:
    """Plans R rows that do not overlap; lengths 0 are rows not in use. No sorts, scans or gathers:
    sums over small masks fuse."""
    starts_R, lengths_R, kv_lengths_R = (
        a.astype(jnp.int32) for a in (starts_R, lengths_R, kv_lengths_R)
    )
    items_8I, tiles_I = _items(starts_R, lengths_R, kv_lengths_R, cut, window)
    line_I = items_8I[-1]
    item_I = jnp.arange(len(tiles_I), dtype=jnp.int32)
    total = cut.units * jnp.sum(tiles_I)
    used = jnp.clip((total + (cut.min_tiles - 1)) // cut.min_tiles, 1, cut.lanes)
    lane_L = jnp.arange(cut.lanes, dtype=jnp.int32)

    def unit_at(tile_L: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
        """The unit that a tile of the line belongs to: its number, its first and end tile in the
        line, and its item's fields."""
        own_LI = (line_I <= tile_L[:, None]) & (tile_L[:, None] < line_I + cut.units * tiles_I)
        item_L, tiles_L, *fields = (
            jnp.sum(jnp.where(own_LI, a, 0), axis=1) for a in (item_I, tiles_I, *items_8I)
        )
        tiles_L = jnp.maximum(tiles_L, 1)
        within_L = (tile_L - fields[-1]) // tiles_L
        begin_L = fields[-1] + within_L * tiles_L
        return item_L * cut.units + within_L, begin_L, begin_L + tiles_L, fields

    cut_L = jnp.minimum(jnp.arange(cut.lanes + 1, dtype=jnp.int32), used) * total // used
    if cut.whole:
        _, begin_L, end_L, _ = unit_at(cut_L)
        cut_L = jnp.where((begin_L == cut_L) | (cut_L == total), cut_L, end_L)
    low_L, high_L = cut_L[:-1], cut_L[1:]
    some_L = high_L > low_L

    def lane_at(tile_L: jax.Array) -> jax.Array:
        """The lane that works on a tile of the line: the last one whose low bound is not beyond
        it."""
        if cut.whole:
            return jnp.sum(low_L <= tile_L[:, None], axis=1, dtype=jnp.int32) - 1
        return ((tile_L + 1) * used - 1) // jnp.maximum(total, 1)

    first_L, begin_L, _, fields = unit_at(low_L)
    last_L, last_begin_L, last_end_L, _ = unit_at(high_L - 1)
    end_L = jnp.where(some_L, last_L + 1, 0)
    followers_L = jnp.where(some_L & (last_begin_L >= low_L), lane_at(last_end_L - 1) - lane_L, 0)
    flags = [jnp.zeros_like(lane_L)] * cut.kv_heads
    lanes = (
        low_L,
        high_L,
        jnp.where(some_L, first_L, 0),
        end_L,
        lane_at(begin_L),
        followers_L,
        *fields,
        *flags,
    )
    return ExtendPlan(jnp.stack(items_8I, axis=1), jnp.stack(lanes, axis=1))


def _items(
    starts_R: jax.Array, lengths_R: jax.Array, kv_lengths_R: jax.Array, cut: Cut, window: int | None
) -> tuple[list[jax.Array], jax.Array]:
    """The fields of all items, and how many key tiles each has: one at least, if it has tokens."""
    R, tokens, queries = starts_R.shape[0], cut.tokens, cut.queries
    live_R = lengths_R > 0
    row_R = jnp.arange(R, dtype=jnp.int32)

    def next_start(token: jax.Array) -> jax.Array:
        """Start of the first live row at or after each token, or the end of the array."""
        after = live_R & (starts_R >= token[:, None])
        return jnp.min(jnp.where(after, starts_R, tokens), axis=1, initial=tokens)

    ends_R = starts_R + lengths_R
    gap_starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.where(live_R, ends_R, tokens)])
    gap_ends = next_start(gap_starts)
    none = jnp.zeros((R + 1,), jnp.int32)
    # Spans: (first token, end, row, position of the first token, keys).
    begin_S = jnp.concatenate([starts_R, gap_starts])
    end_S = jnp.concatenate([ends_R, gap_ends])
    row_S = jnp.concatenate([row_R, none])
    position_S = jnp.concatenate([kv_lengths_R - lengths_R, none])
    live_S = jnp.concatenate([live_R, jnp.zeros((R + 1,), bool)])
    items_S = (end_S - begin_S + (queries - 1)) // queries
    span_S = jnp.arange(2 * R + 1)
    before_S = jnp.sum(jnp.where(span_S[None, :] < span_S[:, None], items_S[None, :], 0), axis=1)

    item_I = jnp.arange(-(-tokens // queries) + 2 * R + 1, dtype=jnp.int32)
    mine_IS = (item_I[:, None] >= before_S) & (item_I[:, None] < before_S + items_S)
    used_I = mine_IS.any(axis=1)

    def pick(values_S: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mine_IS, values_S, 0), axis=1)

    begin, end, live = pick(begin_S), pick(end_S), pick(live_S.astype(jnp.int32)) > 0
    low = begin + (item_I - pick(before_S)) * queries
    high = jnp.minimum(low + queries, end)
    at = jnp.clip(low, 0, max(tokens - queries, 0))
    position = pick(position_S) + at - begin
    keys = jnp.where(live, position + high - at, 0)
    first = jnp.zeros_like(keys)
    if window is not None:
        first = jnp.where(live, jnp.maximum(position + low - at - (window - 1), 0) // cut.keys, 0)
    tiles = jnp.where(used_I, jnp.maximum((keys + (cut.keys - 1)) // cut.keys - first, 1), 0)
    line = cut.units * jnp.sum(
        jnp.where(item_I[None, :] < item_I[:, None], tiles[None, :], 0), axis=1
    )
    return [
        jnp.where(used_I, a, 0) for a in (at, low, high, pick(row_S), position, keys, first)
    ] + [line], tiles
