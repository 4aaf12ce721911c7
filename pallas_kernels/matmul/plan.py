"""Sizes of the Hopper kernel for a product, and where it is faster than XLA's."""

from __future__ import annotations

from types import MappingProxyType

from pallas_kernels.int4_matmul.plan import Tuning, best_of, counts
from pallas_kernels.mosaic_units import PROCESSORS, ROWS, STAGED, time_of

SHARED_BYTES = 222 * 1024
K = 64  # columns of a slot of the ring: with 128 there are too few slots
MOST_STAGES = 8
# Most tokens and warpgroups of a tile, and the time of a step, by products on an H200: what 64 rows
# take besides, in tokens, and what each token takes. Sums of more tokens than 200 do not fit the
# registers of three warpgroups
TILES = MappingProxyType({(200, 3): (29, 0.86), (256, 2): (21, 1.0)})
FEWEST_ROWS, MOST_ROWS = 129, 576  # beyond these XLA's tiles are as good
XLA_TILE = 128
# Up to so many rows the kernel is faster whatever the last tile of XLA's holds; with more, where it
# lacks so many
ALWAYS_ROWS, LEAST_LACKING = 384, 32
FEWEST_BYTES = 16 << 20  # of a weight; smaller ones were not measured
# From so many bytes on XLA's own tiles fill the card, and are slower from so many rows on
MANY_BYTES, ROWS_OF_MANY = 160 << 20, 257


def is_faster(rows: int, weight_bytes: int) -> bool:
    """Whether the kernel is faster than XLA's product, as measured on an H200.

    cuBLAS takes tiles of 128 tokens, and of few outputs as many as there are: for 544 tokens and
    4,608 outputs 48 µs, where tiles that fill the card take 32. Full tiles of 512 tokens are as
    fast.
    """
    fewest = ROWS_OF_MANY if weight_bytes >= MANY_BYTES else FEWEST_ROWS
    if not fewest <= rows <= MOST_ROWS or weight_bytes < FEWEST_BYTES:
        return False
    return rows <= ALWAYS_ROWS or -rows % XLA_TILE >= LEAST_LACKING


def tuning_of(T: int, O: int, I: int) -> Tuning:  # noqa: E741
    """Sizes for x `[T, I]` and a weight `[O, I]`."""
    shape = T, O, I
    return best_of(shape, lambda *tile: tuning_with(shape, *tile), TILES)


def tuning_with(shape: tuple[int, int, int], tokens: int, warpgroups: int) -> Tuning:
    """The same for T, O and I with a given tile."""
    sizes = Tuning(tokens, warpgroups, K, stages_of(tokens, warpgroups), 1)
    blocks, bands, steps, tile = counts(*shape, sizes)
    # No share begins after another one on its processor: measured, that takes longer than counted
    filling = min(max(1, PROCESSORS // (blocks * bands)), steps)
    shares = min((1, filling), key=lambda count: time_of(blocks, bands, steps, tile, count))
    return sizes._replace(shares=shares)


def stages_of(tokens: int, warpgroups: int) -> int:
    """Slots that fit beside the staged result."""
    slot = 2 * K * (tokens + warpgroups * ROWS)
    staged = 2 * min(tokens, STAGED) * ROWS * warpgroups
    return min(MOST_STAGES, (SHARED_BYTES - staged) // slot)
