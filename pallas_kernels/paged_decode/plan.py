"""Split plan of one decode step: which KV tiles of which rows each split of the grid reads.

The plan is computed on the device from the true lengths. A tile is `tile` tokens of one row's KV.
The tiles of all rows form one line, rows in order, which is cut into equal shares, one per split.
One split x one KV head is one thread block, so every block reads the same number of bytes, however
ragged the batch.

A row belongs to the split with its first tile, its owner. Later splits that read some of the row
are its followers: they hand their partial results to the owner, which waits for them. That takes as
long as some tiles do. So if the longest share grows by no more than these (`merge`), every cut
moves on to the next row's first tile. With `no_split` they always do. Then no row has partial
results, whose sum would round differently in another batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

ROW_FIELDS = 4
SPLIT_FIELDS = 10


class DecodePlan(NamedTuple):
    """Int32 arrays that the kernel reads as scalars. One plan serves every layer of a step with the
    same window.

    Attributes:
        rows_B4: per row its first tile in the line, end tile in the line, KV length in tokens, and
            the place in the line of its tile 0. A row that is not in use has first = end.
        splits_SF: per split its share (first tile in the line, end tile, first row, end row), the
            four fields of its first row, the owner of that row, and the number of followers of its
            last row if the split owns it. Then one flag per thread block of the split, which is
            zero between two calls. A call writes the flags: see `backends.open_plan`.
    """

    rows_B4: jax.Array
    splits_SF: jax.Array


def make_plan(
    lengths_B: jax.Array,
    *,
    tile: int,
    splits: int,
    min_tiles: int,
    window: int | None,
    flags: int,
    merge: int = 0,
    no_split: bool = False,
) -> DecodePlan:
    """Cut the tiles of all rows into at most `splits` equal shares of at least `min_tiles` tiles;
    the last share may be shorter. Shares of whole rows may be longer by `merge` tiles.

    `lengths_B` counts the current token; 0 is a row that is not in use. There are no sorts, scans
    or gathers: sums over [B, B] and [splits, B] masks fuse into a few kernels, and into one kernel
    for a batch of one row.
    """
    B = lengths_B.shape[0]
    row_B = jnp.arange(B, dtype=jnp.int32)
    lengths_B = lengths_B.astype(jnp.int32)
    if window is None:
        skipped_B = jnp.zeros_like(lengths_B)
    else:
        skipped_B = jnp.maximum(lengths_B - window, 0) // tile
    tiles_B = (lengths_B + (tile - 1)) // tile - skipped_B
    start_B = jnp.sum(jnp.where(row_B[None, :] < row_B[:, None], tiles_B[None, :], 0), axis=1)
    end_B = start_B + tiles_B
    rows_B4 = jnp.stack([start_B, end_B, lengths_B, start_B - skipped_B], axis=1)

    total = jnp.sum(tiles_B)
    used = jnp.clip((total + (min_tiles - 1)) // min_tiles, 1, splits)
    split_S = jnp.arange(splits, dtype=jnp.int32)
    cuts = jnp.minimum(jnp.arange(splits + 1, dtype=jnp.int32), used) * total // used
    whole = no_split or (merge > 0 and B > 1)
    if whole:
        ahead = (tiles_B > 0) & (start_B >= cuts[:, None])
        edges = jnp.min(jnp.where(ahead, start_B, total), axis=1)
        longest = (total + used - 1) // used + merge
        if no_split:
            cuts = edges
        else:
            cuts = jnp.where(jnp.max(jnp.diff(edges)) <= longest, edges, cuts)
    low_S = cuts[:-1]
    high_S = cuts[1:]

    def row_field(tile_S: jax.Array, field_B: jax.Array) -> jax.Array:
        """Per split the field of the row that this tile of the line belongs to; 0 past the end of
        the line."""
        return jnp.sum(
            jnp.where((start_B <= tile_S[:, None]) & (tile_S[:, None] < end_B), field_B, 0), axis=1
        )

    def split_at(tile_S: jax.Array) -> jax.Array:
        """The split that reads a tile of the line: the last whose low bound is not beyond it."""
        if whole:
            return jnp.sum(low_S <= tile_S[:, None], axis=1, dtype=jnp.int32) - 1
        return ((tile_S + 1) * used - 1) // jnp.maximum(total, 1)

    begin_S = row_field(low_S, start_B)
    end_S = jnp.where(high_S > low_S, row_field(high_S - 1, row_B) + 1, 0)
    first_S = jnp.where(high_S > low_S, row_field(low_S, row_B), 0)
    first_row = (
        begin_S,
        row_field(low_S, end_B),
        row_field(low_S, lengths_B),
        begin_S - row_field(low_S, skipped_B),
    )
    owns_S = (high_S > low_S) & (row_field(high_S - 1, start_B) >= low_S)
    followers_S = jnp.where(owns_S, split_at(row_field(high_S - 1, end_B) - 1) - split_S, 0)
    fields = (
        low_S,
        high_S,
        first_S,
        end_S,
        *first_row,
        split_at(begin_S),
        followers_S,
        *[jnp.zeros_like(split_S)] * flags,
    )
    return DecodePlan(rows_B4, jnp.stack(fields, axis=1))
