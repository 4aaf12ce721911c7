"""Sizes of the Hopper kernel for a product."""

from __future__ import annotations

from typing import NamedTuple

PROCESSORS = 132
SHARED_BYTES = 220 * 1024
ROWS, K = 64, 128  # rows of a warpgroup, columns of a slot of the ring
TOKENS = (8, 16, 32, 64, 128, 256)  # widths of a product
SLOWEST_SHARE = 6  # steps that a share of the columns takes at least


class Tuning(NamedTuple):
    """Sizes that change only speed.

    Attributes:
      tokens: tokens of a product.
      warpgroups: warpgroups that multiply, each 64 rows of the weight.
      stages: slots of the ring of copies.
      shares: parts of the columns whose products are added afterwards.
    """

    tokens: int
    warpgroups: int
    stages: int
    shares: int


def tuning_of(T: int, O: int, I: int) -> Tuning:  # noqa: E741
    """Sizes for x `[T, I]` and a weight `[O, I]`."""
    tokens = next((width for width in TOKENS if width >= T), TOKENS[-1])
    warpgroups = 4 if tokens <= 64 else 2
    return Tuning(tokens, warpgroups, stages_of(tokens, warpgroups), shares_of(T, O, I, tokens, warpgroups))


def stages_of(tokens: int, warpgroups: int) -> int:
    """Slots that fit beside the staged result."""
    slot = tokens * K * 2 + warpgroups * ROWS * (K // 2 + 2 * 16)
    return min(12, (SHARED_BYTES - 2 * tokens * ROWS * warpgroups) // slot)


def shares_of(T: int, O: int, I: int, tokens: int, warpgroups: int) -> int:  # noqa: E741
    """The number of shares that leaves the fewest steps to the busiest processor."""
    blocks, steps = -(-O // (warpgroups * ROWS)) * -(-T // tokens), -(-I // K)

    def slowest(shares: int) -> int:
        return -(-blocks * shares // PROCESSORS) * -(-steps // shares)

    if slowest(1) * PROCESSORS <= 1.15 * blocks * steps:
        return 1
    return min(range(1, max(2, steps // 4)), key=lambda shares: (slowest(shares) + shares / 2))
