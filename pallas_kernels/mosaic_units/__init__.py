"""Products of tokens with a weight whose rows are the 64-row operand of Hopper's tensor cores: how
many shares its columns are cut into, and the time of that. `split.py` has what thread blocks do;
plans need only the numbers, and Pallas' GPU back end takes long to import.
"""

from __future__ import annotations

PROCESSORS = 132
ROWS = 64  # of a warpgroup
STAGED = 64  # tokens whose results are staged at once
BAND_GROUP = 9  # tiles of tokens that pass over the weight side by side, about 2,048
LAUNCH_STEPS = 4  # of a processor, while a program that adds shares up begins


def shares_of(blocks: int, bands: int, steps: int, tile: int) -> int:
    """The number of shares that takes the least time."""
    counts = range(1, max(1, steps // 2) + 1)
    return min(counts, key=lambda shares: time_of(blocks, bands, steps, tile, shares))


def time_of(blocks: int, bands: int, steps: int, tile: int, shares: int) -> float:
    """The time of a product, counted in steps of the busiest processor.

    A share writes and reads back its sums, which takes `tile / 64` steps, tile being its tokens
    times its warpgroups in slots of 128 columns; to add them up is a program of its own, in which
    one processor may read a token's sums of all shares.
    """
    if shares == 1:
        return -(-blocks * bands // PROCESSORS) * steps
    whole = 0
    if bands == 1:
        whole = blocks * bands // PROCESSORS
    rest = blocks * bands - whole * PROCESSORS
    rounds = -(-rest * shares // PROCESSORS)
    return whole * steps + rounds * (-(-steps // shares) + tile / 64) + LAUNCH_STEPS + shares / 8
