"""Split plan of one decode step: which tiles of which rows every lane of the grid reads. Computed
on device from true lengths.

All rows' tiles (a tile is `tile` tokens of one row's KV) stand in one line, rows in order. The line
is cut into equal shares, one a lane; lane x KV head is one thread block. So every block reads the
same number of bytes, however ragged the batch. A row belongs to the lane with its first tile; lanes
further on that read some of it, its followers, hand it their parts. In a whole plan cuts move on to
the next row's first tile: no row has parts, whose sum would be rounded differently in another
batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

ROW_FIELDS = 4
LANE_FIELDS = 10


class DecodePlan(NamedTuple):
    """Arrays that the kernel reads as scalars; int32 all. One plan serves every layer of a step
    that has the same window.

    rows_B4: per row (first tile in the line, end tile in the line, KV length, where in the line its
    tile 0 would be). Dead: first = end. lanes_LF: per lane its share (first tile in the line, end
    tile, first row, end row), the four fields of its first row, the lane that this row belongs to,
    and how many followers its last row has if that belongs to it; then one flag a block, zero
    between two calls.
    """

    rows_B4: jax.Array
    lanes_LF: jax.Array


def make_plan(
    lengths_B: jax.Array,
    *,
    tile: int,
    lanes: int,
    min_tiles: int,
    window: int | None,
    flags: int,
    whole: bool = False,
) -> DecodePlan:
    """Cuts the tiles of all rows into at most `lanes` equal shares of at least `min_tiles` tiles
    (the last may be shorter).

    lengths_B counts the current token; 0 is a dead row. No sorts, scans or gathers: sums over [B,
    B] and [lanes, B] masks fuse into a few kernels, and into one for a batch of one row.
    """
    B = lengths_B.shape[0]
    row_B = jnp.arange(B, dtype=jnp.int32)
    lengths_B = lengths_B.astype(jnp.int32)
    skipped_B = (
        jnp.zeros_like(lengths_B) if window is None else jnp.maximum(lengths_B - window, 0) // tile
    )
    tiles_B = (lengths_B + (tile - 1)) // tile - skipped_B
    start_B = jnp.sum(jnp.where(row_B[None, :] < row_B[:, None], tiles_B[None, :], 0), axis=1)
    end_B = start_B + tiles_B
    rows_B4 = jnp.stack([start_B, end_B, lengths_B, start_B - skipped_B], axis=1)

    total = jnp.sum(tiles_B)
    used = jnp.clip((total + (min_tiles - 1)) // min_tiles, 1, lanes)
    lane_L = jnp.arange(lanes, dtype=jnp.int32)
    cut_L = jnp.minimum(jnp.arange(lanes + 1, dtype=jnp.int32), used) * total // used
    if whole:
        ahead_LB = (tiles_B > 0) & (start_B >= cut_L[:, None])
        cut_L = jnp.min(jnp.where(ahead_LB, start_B, total), axis=1)
    low_L, high_L = cut_L[:-1], cut_L[1:]

    def of_the_row_at(tile_L: jax.Array, field_B: jax.Array) -> jax.Array:
        """Per lane the field of the row that this tile of the line belongs to; 0 past the line's
        end."""
        return jnp.sum(
            jnp.where((start_B <= tile_L[:, None]) & (tile_L[:, None] < end_B), field_B, 0), axis=1
        )

    def lane_at(tile_L: jax.Array) -> jax.Array:
        """The lane that reads a tile of the line: the last one whose low bound is not beyond it."""
        if whole:
            return jnp.sum(low_L <= tile_L[:, None], axis=1, dtype=jnp.int32) - 1
        return ((tile_L + 1) * used - 1) // jnp.maximum(total, 1)

    begin_L = of_the_row_at(low_L, start_B)
    end_L = jnp.where(high_L > low_L, of_the_row_at(high_L - 1, row_B) + 1, 0)
    first_L = jnp.where(high_L > low_L, of_the_row_at(low_L, row_B), 0)
    first_row = (
        begin_L,
        of_the_row_at(low_L, end_B),
        of_the_row_at(low_L, lengths_B),
        begin_L - of_the_row_at(low_L, skipped_B),
    )
    owns_L = (high_L > low_L) & (of_the_row_at(high_L - 1, start_B) >= low_L)
    followers_L = jnp.where(owns_L, lane_at(of_the_row_at(high_L - 1, end_B) - 1) - lane_L, 0)
    fields = (
        low_L,
        high_L,
        first_L,
        end_L,
        *first_row,
        lane_at(begin_L),
        followers_L,
        *[jnp.zeros_like(lane_L)] * flags,
    )
    return DecodePlan(rows_B4, jnp.stack(fields, axis=1))
