"""Sizes of the Hopper kernel for a product."""

from __future__ import annotations

from typing import NamedTuple

PROCESSORS = 132
SHARED_BYTES = 220 * 1024
ROWS = 64  # of a warpgroup
LAUNCH_STEPS = 4  # of a processor, while a program that adds shares up begins
STAGED = 64  # tokens whose results are staged at once
TOKENS = (8, 16, 32, 64, 128, 256)  # widths of a product


class Tuning(NamedTuple):
    """Sizes that change only speed.

    Attributes:
      tokens: tokens of a product.
      warpgroups: warpgroups that multiply, each 64 rows of the weight.
      columns: columns of a slot of the ring, 64 or 128.
      stages: slots of the ring of copies.
      shares: parts of the columns whose products are added afterwards.
    """

    tokens: int
    warpgroups: int
    columns: int
    stages: int
    shares: int


def tuning_of(T: int, O: int, I: int) -> Tuning:  # noqa: E741
    """Sizes for x `[T, I]` and a weight `[O, I]`."""
    tokens = next((width for width in TOKENS if width >= T), TOKENS[-1])
    warpgroups = 4 if tokens <= 64 else 2
    return tuning_with(T, O, I, tokens, warpgroups)


def tuning_with(T: int, O: int, I: int, tokens: int, warpgroups: int) -> Tuning:  # noqa: E741
    """Sizes for x `[T, I]` and a weight `[O, I]`, with the given tile."""
    columns = 64 if tokens > 128 else 128
    stages = stages_of(tokens, warpgroups, columns)
    bands = -(-T // tokens)
    shares = shares_of(-(-O // (warpgroups * ROWS)), bands, -(-I // columns), tokens * warpgroups)
    return Tuning(tokens, warpgroups, columns, stages, shares)


def stages_of(tokens: int, warpgroups: int, columns: int) -> int:
    """Slots that fit beside the staged result."""
    slot = tokens * columns * 2 + warpgroups * ROWS * (columns // 2 + 2 * 2 * columns // 16)
    return min(12, (SHARED_BYTES - 2 * min(tokens, STAGED) * ROWS * warpgroups) // slot)


def shares_of(blocks: int, bands: int, steps: int, tile: int) -> int:
    """The number of shares that takes the least time, counted in steps of the busiest processor.

    A share writes and reads back its sums, which takes `tile / 64` steps, tile being its tokens
    times its warpgroups; to add them up is a program of its own.
    """
    whole = blocks * bands // PROCESSORS if bands == 1 else 0
    rest = blocks * bands - whole * PROCESSORS

    def slowest(shares: int) -> float:
        if shares == 1:
            return -(-blocks * bands // PROCESSORS) * steps
        rounds = -(-rest * shares // PROCESSORS)
        return whole * steps + rounds * (-(-steps // shares) + tile / 64) + LAUNCH_STEPS

    return min(range(1, max(2, steps // 2)), key=slowest)
