"""How thread blocks share out the columns of two tiles of tokens together, where shares of each
alone would leave some of the card's processors idle.

With S shares, 2 S - 1 thread blocks have a block of rows: the middle one has the last share of the
first tile and the first of the second, and so fewer columns of both. The last block of rows may
have one thread block less, if some of its warpgroups have no rows and leave the tensor cores to the
others: the first and the last thread block then write two shares each.
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
    """Of each thread block of a block of rows, whose columns are `steps` slots."""
    each = longest(steps, shares)
    first = [Segment(0, i, i * each, each) for i in range(shares - 1)]
    rest = steps - (shares - 1) * each
    middle = [Segment(0, shares - 1, steps - rest, rest), Segment(1, 0, 0, rest)]
    last = [Segment(1, i, rest + (i - 1) * each, each) for i in range(1, shares)]
    return [*([one] for one in first), middle, *([one] for one in last)]


def fewer_segments_of(steps: int, shares: int) -> list[list[Segment]]:
    """The same with one thread block less."""
    cuts = [steps * i // (shares - 1) for i in range(shares)]
    first = [0, cuts[1] // 2, *cuts[1:]]
    last = [*cuts[:-1], (cuts[-2] + steps) // 2, steps]
    bands = [
        [Segment(band, i, cut, own[i + 1] - cut) for i, cut in enumerate(own[:-1])]
        for band, own in enumerate((first, last))
    ]
    alone = [[one] for one in [*bands[0][2:], *bands[1][:-2]]]
    return [bands[0][:2], *alone, bands[1][-2:]]


def longest(steps: int, shares: int) -> int:
    """Slots of every thread block but the middle one."""
    return -(-(2 * steps + WRITE_STEPS) // (2 * shares - 1))


def most_shares(blocks: int, idle: int, steps: int, processors: int) -> int:
    """The most shares whose thread blocks, of so many blocks of rows, the last of which leaves some
    warpgroups `idle`, are no more than processors; less than two where there are none."""
    fitting = ((processors + (idle > 0)) // blocks + 1) // 2
    return min(fitting, math.isqrt(steps // 2))  # so many steps leave the middle one some
