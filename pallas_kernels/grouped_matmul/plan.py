"""Sizes of the Hopper kernel for one product, from the height of a tile of tokens."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.grouped_matmul.groups import LARGEST_TILE

PROCESSORS = 132
SHARED_BYTES = 226 * 1024
K = 64  # columns of a row of the 128-byte swizzle
ROWS = 64  # rows of the weight in one tensor core product
MOST_STAGES = 12  # 200 KiB of weights under way on each processor
ONE_LAUNCH = range(17, 65)  # tokens whose two products are faster in one launch, measured at 64


class Tuning(NamedTuple):
    """Sizes that change only speed.

    Attributes:
        warpgroups: warpgroups that multiply; each has `2 * ROWS` rows of the weight.
        stages: slots of the ring of copies.
        columns: of a slot, a multiple of `K` that divides those of x.
    """

    warpgroups: int
    stages: int
    columns: int = K


def tuning_of(tile: int, columns: int = K, warpgroups: int | None = None) -> Tuning:
    """The sizes for tiles of so many tokens, with slots of so many columns.

    Few tokens are bound by the weights' bytes: one warpgroup, small units that divide well over
    the processors, and a deep ring. Full tiles are bound by the tensor cores, where two
    warpgroups share each token tile that is read from the L2 cache.
    """
    groups = warpgroups or (2 if tile == LARGEST_TILE else 1)
    staged = groups * tile * ROWS * 2
    slot = (groups * 2 * ROWS + tile) * columns * 2
    most = MOST_STAGES * K // columns
    return Tuning(groups, min(most, (SHARED_BYTES - staged) // slot), columns)


def widths_of(tile: int) -> tuple[int, ...]:
    """Widths of products that a tile's rows may take, ascending: a tile with few rows does not
    compute the others."""
    return tuple(width for width in (8, 16, 32, 64, 128) if tile // 4 <= width <= tile)
