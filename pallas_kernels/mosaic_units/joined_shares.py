"""How thread blocks share out the columns of two tiles of tokens together, where shares of each
alone would leave some of the card's processors idle.

With S shares, 2 S - 1 thread blocks have a block of rows: the middle one has the last share of both
tiles, which has fewer columns. The last block of rows may have one thread block less, if some of
its warpgroups have no rows and leave the tensor cores to the others: the first and the last thread
block then write two shares each. Both tiles are cut alike, so that a token's sums do not depend on
its row: a batch-invariant engine has it in any.
"""

from __future__ import annotations

import math
from typing import NamedTuple

WRITE_STEPS = 3  # that a thread block with a second share has less, which it writes meanwhile


class Segment(NamedTuple):
    """A share of a tile of tokens: slots of the ring that it multiplies, and the first of them."""

    band: int
    share: int
    first: int
    steps: int


def segments_of(steps: int, shares: int) -> list[list[Segment]]:
    """The segments of each thread block that shares a block of rows, whose columns are `steps`
    slots of the ring."""
    block_steps = longest(steps, shares)
    first_band, second_band = _both([*(i * block_steps for i in range(shares)), steps])
    return [*_alone(first_band[:-1]), [first_band[-1], second_band[-1]], *_alone(second_band[:-1])]


def fewer_segments_of(steps: int, shares: int) -> list[list[Segment]]:
    """The same with one thread block less."""
    first, *cuts = (steps * i // (shares - 1) for i in range(shares))
    first_band, second_band = _both([first, cuts[0] // 2, *cuts])
    return [first_band[:2], *_alone([*first_band[2:], *second_band[2:]]), second_band[:2]]


def _both(cuts: list[int]) -> list[list[Segment]]:
    """The shares of both tiles of tokens. A share goes from one of the `cuts` to the next."""
    return [
        [Segment(band, i, cut, cuts[i + 1] - cut) for i, cut in enumerate(cuts[:-1])]
        for band in range(2)
    ]


def _alone(segments: list[Segment]) -> list[list[Segment]]:
    return [[segment] for segment in segments]


def longest(steps: int, shares: int) -> int:
    """Slots of every thread block but the middle one."""
    return -(-(2 * steps + WRITE_STEPS) // (2 * shares - 1))


def most_shares(blocks: int, idle: int, steps: int, processors: int) -> int:
    """The most shares whose thread blocks, of so many blocks of rows, the last of which leaves some
    warpgroups `idle`, are no more than processors; less than two where there are none."""
    fitting = ((processors + (idle > 0)) // blocks + 1) // 2
    return min(fitting, math.isqrt(steps // 2))  # so many steps leave the middle one some
