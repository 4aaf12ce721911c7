"""Sizes of the Hopper kernel for a product: measured (`tuned/`), else from a model of the card."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
from typing import NamedTuple

PROCESSORS = 132
SHARED_BYTES = 226 * 1024
STAGING_BYTES = 16 * 1024  # shared memory for outputs before they are written
# Rows of x in a block → warpgroups that share them
WARPGROUPS = {64: 1, 128: 2, 192: 3, 256: 2}
K = 64  # columns of one slot of the ring: a row of the 128-byte swizzle
# Rows of x in a block → most weight rows that its warpgroups' registers allow
MAX_N = {64: 256, 128: 256, 192: 192, 256: 160}

# Rows below 1,024 for which the kernel is faster with a large weight
FASTER = range(64, 257), range(353, 385), range(449, 513), range(545, 577), range(705, 769)

# The model of an H200
MEMORY_RATE = 4.3e12  # bytes a second
L2_RATE = 57e9  # bytes a second from the L2 cache, of one streaming multiprocessor
FLOP_RATE = 5.6e12  # operations a second, of one streaming multiprocessor
UNIT_SECONDS = 2e-6  # activation and writing of a tile, which nothing overlaps


def is_faster(rows: int, weight_bytes: int) -> bool:
    """Whether the kernel is faster than XLA's product and activation, as measured on an H200.

    With fewer rows XLA streams the weight as fast, and small products launch sooner. In between the
    tiles of `matmul` fill the card better, or XLA's.
    """
    if rows >= 1024:
        return weight_bytes >= 8 << 20
    return weight_bytes >= 64 << 20 and any(rows in measured for measured in FASTER)


class Tuning(NamedTuple):
    """Sizes that change only speed.

    Attributes:
      rows: rows of x in a block.
      n: weight rows in a block, half gate and half up.
      stages: slots of the ring of copies.
      cluster: blocks that share their rows of x.
    """

    rows: int
    n: int
    stages: int = 4
    cluster: int = 2

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply; they share the rows of x."""
        return WARPGROUPS[self.rows]


def bands(M: int, rows: int) -> int:
    """Blocks that cover M rows of x."""
    return -(-M // rows)


def chunk_of(height: int, width: int, groups: int, F: int) -> int:
    """Columns of a staged piece of a warpgroup's `[height, width]` output: the largest divisor of
    `width` that fits.

    Mosaic copies it in boxes as wide as the largest power of two up to 64 that divides it. The box
    width must divide F, the columns of the full output.
    """
    fitting = (
        c
        for c in range(8, width + 1, 8)
        if width % c == 0 and groups * height * c * 2 <= STAGING_BYTES
    )
    return max(c for c in fitting if F % min(64, c & -c) == 0)


def stages_of(rows: int, n: int, F: int) -> int:
    """Slots of the ring that fit shared memory beside the staged outputs."""
    groups = WARPGROUPS[rows]
    staged = rows * chunk_of(rows // groups, n // 2, groups, F) * 2
    return (SHARED_BYTES - staged) // ((rows + n) * K * 2)


@functools.cache
def _measured() -> dict[str, dict[str, int]]:
    tuned = json.loads((pathlib.Path(__file__).parent / "tuned" / "nvidia_h200.json").read_text())
    return tuned["sizes"]


@functools.cache
def tuning_of(M: int, O: int, I: int) -> Tuning:
    """The sizes for M rows of x and a weight `[O, I]`."""
    entry = _measured().get(f"{O}x{I}x{M}")
    if entry:
        return Tuning(**entry)
    return _modelled(M, O, I)


def _modelled(M: int, O: int, I: int) -> Tuning:
    """The candidate with the least modelled time, among those with at least four slots: with fewer,
    loads wait for products."""
    if M <= 256:
        heights = [min(rows for rows in WARPGROUPS if rows >= M)]
    else:
        heights = [128, 192, 256]
    candidates = []
    for rows, cluster in itertools.product(heights, (1, 2)):
        for n in range(16, min(MAX_N[rows], O) + 1, 16):
            stages = min(8, stages_of(rows, n, O // 2))
            if stages >= 4:
                tuning = Tuning(rows, n, stages, cluster)
                candidates.append((_seconds(M, O, I, tuning), -n, tuning))
    return min(candidates)[2]


def _seconds(M: int, O: int, I: int, tuning: Tuning) -> float:
    """The longer of memory's and the busiest block's time, with a small penalty for block time and
    for clusters."""
    rows = tuning.rows
    n = tuning.n
    cluster = tuning.cluster
    waves = -(-(-(-O // (n * cluster)) * bands(M, rows)) // (PROCESSORS // cluster))
    moved = 2 * I * (n + rows / cluster)
    multiplied = 2 * I * n * rows
    busiest = waves * (max(moved / L2_RATE, multiplied / FLOP_RATE) + UNIT_SECONDS)
    return (
        max(2 * O * I / MEMORY_RATE, busiest)
        + 0.1 * busiest
        + (0.01 * busiest if cluster > 1 else 0.0)
    )
