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
# registers of three warpgroups. Each width is tried with as few tiles as cover all tokens and with
# one more, so that 480 may take four tiles of 120
TILES = MappingProxyType({(200, 3): (29, 0.86), (256, 2): (21, 1.0), (144, 2): (21, 1.0)})
MIB = 2**20
# Bytes of a weight and rows for which the kernel is faster in a step. Elsewhere it is as fast or
# slower, as at 481 to 512 rows, or was not measured, as with smaller weights; one tile of 128 is
# faster alone, but not in a step
FASTER = (
    (range(64 * MIB, 160 * MIB), range(1, 17)),  # in shares, of which others have too few
    (range(16 * MIB, 64 * MIB), range(129, 481)),  # four tiles of 128 are XLA's
    (range(16 * MIB, 64 * MIB), range(513, 577)),
    (range(64 * MIB, 160 * MIB), range(129, 225)),
    (range(64 * MIB, 2**40), range(513, 545)),  # XLA's fifth tile of 128 is nearly empty
)


def is_faster(rows: int, weight_bytes: int) -> bool:
    """Whether the kernel is faster than XLA's product, as measured on an H200.

    cuBLAS takes tiles of 128 tokens, and of few outputs as many as there are: for 544 tokens and
    4,608 outputs 48 µs, where tiles that fill the card take 32. Large weights fill the card anyway.
    """
    return any(weight_bytes in size and rows in count for size, count in FASTER)


def tuning_of(T: int, O: int, I: int) -> Tuning:
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
