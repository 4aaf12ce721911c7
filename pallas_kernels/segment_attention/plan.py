"""Which keys each token sees, and which tiles of keys each tile of queries meets."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.segment_attention.segments import Segments

SIZE = 128  # queries of a tile, and keys of a tile


class SegmentPlan(NamedTuple):
    """Int32 arrays, one plan for all layers of a step with the same window.

    Attributes:
        begin_T, end_T: first key that a token sees, and the end of those; in whole tiles. Both are
            0 for a token that sees none.
        tiles_I4: per tile of queries its first tile of keys, the first tile that every query of it
            sees in full, the end of those, and its end tile. Tiles in full may be none, and so may
            all.
    """

    begin_T: Array
    end_T: Array
    tiles_I4: Array


def plan(segments: Segments, *, window: int | None) -> SegmentPlan:
    """The plan of these segments; see `pallas_kernels.segment_attention`."""
    sides = segments.first_T, segments.end_T
    rest = -len(sides[0]) % SIZE
    begin, end = (jnp.pad(x.astype(jnp.int32), (0, rest)) for x in sides)
    place = jnp.arange(begin.shape[0], dtype=jnp.int32)
    if window is not None:
        begin = jnp.maximum(begin, place - window)
        end = jnp.minimum(end, place + window + 1)
    live = end > begin
    begin = jnp.where(live, begin, 0)
    end = jnp.where(live, end, 0)
    begin_IQ = begin.reshape(-1, SIZE)
    end_IQ = end.reshape(-1, SIZE)
    least = jnp.where(live, begin, len(place)).reshape(-1, SIZE).min(axis=1)
    high = (end_IQ.max(axis=1) + (SIZE - 1)) // SIZE
    low = jnp.minimum(least // SIZE, high)
    full_low = (begin_IQ.max(axis=1) + (SIZE - 1)) // SIZE
    full_high = end_IQ.min(axis=1) // SIZE
    has_full = full_high > full_low
    full_low = jnp.where(has_full, full_low, low)
    full_high = jnp.where(has_full, full_high, low)
    return SegmentPlan(begin, end, jnp.stack([low, full_low, full_high, high], axis=1))
