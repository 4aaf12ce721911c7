"""Sizes of the Hopper kernel for a product."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.mosaic_units import PROCESSORS, ROWS, STAGED, shares_of

SHARED_BYTES = 220 * 1024
LARGE_STEPS = 8  # wide slots of a processor; with fewer, the last ones leave others idle
COLUMNS = (64, 128, 256)  # of a slot of the ring
TOKENS = (8, 16, 32, 64, 128, 256)  # widths of a product


class Tuning(NamedTuple):
    """Sizes that change only speed.

    Attributes:
      tokens: tokens of a product.
      warpgroups: warpgroups that multiply, each 64 rows of the weight.
      columns: columns of a slot of the ring.
      stages: slots of the ring of copies.
      shares: parts of the columns whose products are added afterwards.
    """

    tokens: int
    warpgroups: int
    columns: int
    stages: int
    shares: int


def tuning_of(T: int, O: int, I: int, group: int) -> Tuning:  # noqa: E741
    """Sizes for x `[T, I]` and a weight `[O, I]` in groups of columns."""
    tokens = next((width for width in TOKENS if width >= T), TOKENS[-1])
    return tuning_with(T, O, I, group, tokens, 4 if tokens <= 64 else 2)


def tuning_with(
    T: int,
    O: int,  # noqa: E741
    I: int,  # noqa: E741
    group: int,
    tokens: int,
    warpgroups: int,
) -> Tuning:
    """The same with a given tile. A slot's columns are whole groups, or a part of one."""
    blocks, bands = -(-O // (warpgroups * ROWS)), -(-T // tokens)
    wide = tokens <= 32 and blocks * I >= LARGE_STEPS * PROCESSORS * 256
    most = 256 if wide else 128 if tokens <= 128 else 64
    columns = max(c for c in COLUMNS if c <= most and (c % group == 0 or group % c == 0))
    stages, tile = stages_of(tokens, warpgroups, columns, group), tokens * warpgroups
    shares = shares_of(blocks, bands, -(-I // columns), tile * 128 // columns)
    return Tuning(tokens, warpgroups, columns, stages, shares)


def with_room(sizes: Tuning, group: int, kept: int) -> Tuning:
    """The same sizes where a kernel keeps so many bytes of shared memory for itself."""
    tokens, warpgroups, columns, _, shares = sizes
    stages = stages_of(tokens, warpgroups, columns, group, kept)
    return Tuning(tokens, warpgroups, columns, stages, shares)


def stages_of(tokens: int, warpgroups: int, columns: int, group: int, kept: int = 0) -> int:
    """Slots that fit beside the staged result and what else is kept."""
    row = columns // 2 + 4 * max(1, columns // group)  # numbers, a scale and a zero point
    slot = 2 * tokens * columns + warpgroups * ROWS * row
    return min(12, (SHARED_BYTES - kept - 2 * min(tokens, STAGED) * ROWS * warpgroups) // slot)
