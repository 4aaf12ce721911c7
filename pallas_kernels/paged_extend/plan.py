"""Split plan of one extend step: which key tiles of which query tiles each split of the grid
computes.

The plan is computed on the device. The tokens of the step are cut into spans: every row's chunk,
and every gap that no row uses, whose tokens get zeros. Each span is cut into items of `queries`
tokens. An item makes one unit per share of a KV head's query heads. The key tiles of all units form
one line, which is cut into equal shares, one per split. One split x one KV head is one thread
block, so every block does the same work, be it one chunk after a long prefix or many short ones.

A unit belongs to the split with its first tile, its owner. Later splits that work on the unit are
its followers: they hand their partial results to the owner. With `no_split` every cut moves on to
the next unit's first tile, so no unit has partial results.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

ITEM_FIELDS = 8
SPLIT_FIELDS = 6 + ITEM_FIELDS


class Cut(NamedTuple):
    """How a step is cut.

    Attributes:
        tokens: tokens of the step; queries: tokens of an item; keys: tokens of a key tile.
        units: units of an item.
        splits: splits of the grid; min_tiles: fewest key tiles of a share.
        kv_heads: KV heads of the device.
        no_split: no unit is split between thread blocks.
    """

    tokens: int
    queries: int
    keys: int
    units: int
    splits: int
    min_tiles: int
    kv_heads: int
    no_split: bool = False


class ExtendPlan(NamedTuple):
    """Int32 arrays that the kernel reads as scalars. One plan serves every layer of a step with the
    same window.

    Attributes:
        items_I8: per item its first token, first own token, end of own tokens, row, sequence
            position of the first token, number of keys that the last own query sees, first key
            tile, and the place of its first tile in the line. No keys: the tokens get zeros. An
            item at the end of the array is moved back so that it lies inside.
        splits_SF: per split its share (first tile in the line, end tile, first unit, end unit), the
            owner of its first unit, the number of followers of its last unit if the split owns it,
            and the fields of its first item. Then one flag per KV head, which is zero between two
            calls. A call writes the flags: see `backends.open_plan`.
    """

    items_I8: jax.Array
    splits_SF: jax.Array


def make_plan(
    starts_R: jax.Array,
    lengths_R: jax.Array,
    kv_lengths_R: jax.Array,
    *,
    cut: Cut,
    window: int | None,
) -> ExtendPlan:
    """Plan R rows that do not overlap; length 0 is a row that is not in use. There are no sorts,
    scans or gathers: sums over small masks fuse."""
    starts_R, lengths_R, kv_lengths_R = (
        a.astype(jnp.int32) for a in (starts_R, lengths_R, kv_lengths_R)
    )
    items_8I, tiles_I = _items(starts_R, lengths_R, kv_lengths_R, cut, window)
    line_I = items_8I[-1]
    item_I = jnp.arange(len(tiles_I), dtype=jnp.int32)
    total = cut.units * jnp.sum(tiles_I)
    used = jnp.clip((total + (cut.min_tiles - 1)) // cut.min_tiles, 1, cut.splits)
    split_S = jnp.arange(cut.splits, dtype=jnp.int32)

    def unit_at(tile_S: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
        """The unit that a tile of the line belongs to: its number, its first and end tile in the
        line, and its item's fields."""
        own_SI = (line_I <= tile_S[:, None]) & (tile_S[:, None] < line_I + cut.units * tiles_I)
        item_S, tiles_S, *fields = (
            jnp.sum(jnp.where(own_SI, a, 0), axis=1) for a in (item_I, tiles_I, *items_8I)
        )
        tiles_S = jnp.maximum(tiles_S, 1)
        within_S = (tile_S - fields[-1]) // tiles_S
        begin_S = fields[-1] + within_S * tiles_S
        return item_S * cut.units + within_S, begin_S, begin_S + tiles_S, fields

    cuts = jnp.minimum(jnp.arange(cut.splits + 1, dtype=jnp.int32), used) * total // used
    if cut.no_split:
        _, begin_S, end_S, _ = unit_at(cuts)
        cuts = jnp.where((begin_S == cuts) | (cuts == total), cuts, end_S)
    low_S = cuts[:-1]
    high_S = cuts[1:]
    some_S = high_S > low_S

    def split_at(tile_S: jax.Array) -> jax.Array:
        """The split that works on a tile of the line: the last one whose low bound is not beyond
        it."""
        if cut.no_split:
            return jnp.sum(low_S <= tile_S[:, None], axis=1, dtype=jnp.int32) - 1
        return ((tile_S + 1) * used - 1) // jnp.maximum(total, 1)

    first_S, begin_S, _, fields = unit_at(low_S)
    last_S, last_begin_S, last_end_S, _ = unit_at(high_S - 1)
    end_S = jnp.where(some_S, last_S + 1, 0)
    followers_S = jnp.where(some_S & (last_begin_S >= low_S), split_at(last_end_S - 1) - split_S, 0)
    flags = [jnp.zeros_like(split_S)] * cut.kv_heads
    splits = (
        low_S,
        high_S,
        jnp.where(some_S, first_S, 0),
        end_S,
        split_at(begin_S),
        followers_S,
        *fields,
        *flags,
    )
    return ExtendPlan(jnp.stack(items_8I, axis=1), jnp.stack(splits, axis=1))


def _items(
    starts_R: jax.Array, lengths_R: jax.Array, kv_lengths_R: jax.Array, cut: Cut, window: int | None
) -> tuple[list[jax.Array], jax.Array]:
    """The fields of all items, and how many key tiles each has: one at least, if it has tokens."""
    R = starts_R.shape[0]
    tokens = cut.tokens
    queries = cut.queries
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
    begin_X = jnp.concatenate([starts_R, gap_starts])
    end_X = jnp.concatenate([ends_R, gap_ends])
    row_X = jnp.concatenate([row_R, none])
    position_X = jnp.concatenate([kv_lengths_R - lengths_R, none])
    live_X = jnp.concatenate([live_R, jnp.zeros((R + 1,), bool)])
    items_X = (end_X - begin_X + (queries - 1)) // queries
    span_X = jnp.arange(2 * R + 1)
    before_X = jnp.sum(jnp.where(span_X[None, :] < span_X[:, None], items_X[None, :], 0), axis=1)

    item_I = jnp.arange(-(-tokens // queries) + 2 * R + 1, dtype=jnp.int32)
    mine_IX = (item_I[:, None] >= before_X) & (item_I[:, None] < before_X + items_X)
    used_I = mine_IX.any(axis=1)

    def pick(values_X: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mine_IX, values_X, 0), axis=1)

    begin = pick(begin_X)
    end = pick(end_X)
    live = pick(live_X.astype(jnp.int32)) > 0
    low = begin + (item_I - pick(before_X)) * queries
    high = jnp.minimum(low + queries, end)
    first_token = jnp.clip(low, 0, max(tokens - queries, 0))
    position = pick(position_X) + first_token - begin
    keys = jnp.where(live, position + high - first_token, 0)
    first = jnp.zeros_like(keys)
    if window is not None:
        first = jnp.where(
            live, jnp.maximum(position + low - first_token - (window - 1), 0) // cut.keys, 0
        )
    tiles = jnp.where(used_I, jnp.maximum((keys + (cut.keys - 1)) // cut.keys - first, 1), 0)
    line = cut.units * jnp.sum(
        jnp.where(item_I[None, :] < item_I[:, None], tiles[None, :], 0), axis=1
    )
    return [
        jnp.where(used_I, a, 0)
        for a in (first_token, low, high, pick(row_X), position, keys, first)
    ] + [line], tiles
