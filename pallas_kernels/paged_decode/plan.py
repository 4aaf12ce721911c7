"""Split plan of one decode step: which tiles of which rows every lane of the grid reads. Computed on device from true lengths.

All rows' tiles (a tile is `tile` tokens of one row's KV) stand in one line, live rows in order. The line is cut into equal
shares, one a lane; lane x KV head is one thread block. So every block reads the same number of bytes, however ragged the batch. A row that
crosses a cut is finished by the combine kernel. Part number = lane + ordinal of the live row: unique, and consecutive for one row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class DecodePlan(NamedTuple):
    """Arrays that the kernels read as scalars; int32 all. One plan serves every layer of a step that has the same window.

    rows_B5: per live ordinal (row, first tile in the line, end tile in the line, KV length, first tile within the row).
    lanes_L4: per lane (first tile in the line, end tile, first ordinal, end ordinal).
    parts_B2: per row (number of its first part, count of parts); count 0 is a dead row.
    """

    rows_B5: jax.Array
    lanes_L4: jax.Array
    parts_B2: jax.Array


def make_plan(lengths_B: jax.Array, *, tile: int, lanes: int, min_tiles: int, window: int | None) -> DecodePlan:
    """Cuts the tiles of all rows into at most `lanes` equal shares of at least `min_tiles` tiles (the last may be shorter).

    lengths_B counts the current token; 0 is a dead row. No sorts and no scans: [B, B] comparisons fuse into a few kernels.
    """
    B = lengths_B.shape[0]
    index_B = jnp.arange(B, dtype=jnp.int32)
    lengths_B = lengths_B.astype(jnp.int32)
    skipped_B = jnp.zeros_like(lengths_B) if window is None else jnp.maximum(lengths_B - window, 0) // tile
    tiles_B = (lengths_B + (tile - 1)) // tile - skipped_B
    before_BB = index_B[None, :] < index_B[:, None]
    start_B = jnp.sum(jnp.where(before_BB, tiles_B[None, :], 0), axis=1)
    live_B = lengths_B > 0
    ordinal_B = jnp.sum((before_BB & live_B[None, :]).astype(jnp.int32), axis=1)
    total = jnp.sum(tiles_B)

    fields_B5 = jnp.stack([index_B, start_B, start_B + tiles_B, lengths_B, skipped_B], axis=1)
    chosen_BB = (ordinal_B[None, :] == index_B[:, None]) & live_B[None, :]
    rows_B5 = jnp.sum(jnp.where(chosen_BB[:, :, None], fields_B5[None], 0), axis=1)

    used = jnp.clip((total + (min_tiles - 1)) // min_tiles, 1, lanes)
    lane_L = jnp.arange(lanes, dtype=jnp.int32)
    low_L = jnp.minimum(lane_L, used) * total // used
    high_L = jnp.minimum(lane_L + 1, used) * total // used
    # Ordinals whose tiles end at or before the cut come earlier; those that start before the end belong to the lane.
    first_L = jnp.sum((live_B & (start_B + tiles_B <= low_L[:, None])).astype(jnp.int32), axis=1)
    end_L = jnp.sum((live_B & (start_B < high_L[:, None])).astype(jnp.int32), axis=1)
    lanes_L4 = jnp.stack([low_L, high_L, first_L, jnp.where(high_L > low_L, end_L, first_L)], axis=1)

    first_lane_B = jnp.sum((high_L[None, :] <= start_B[:, None]).astype(jnp.int32), axis=1)
    last_lane_B = jnp.sum((high_L[None, :] < (start_B + tiles_B)[:, None]).astype(jnp.int32), axis=1)
    count_B = jnp.where(live_B, last_lane_B - first_lane_B + 1, 0)
    parts_B2 = jnp.stack([first_lane_B + ordinal_B, count_B], axis=1)
    return DecodePlan(rows_B5, lanes_L4, parts_B2)
