"""Sizes of the Hopper kernel for one product: measured ones from `tuned/`, else chosen by a model
of the card."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
from typing import NamedTuple

PROCESSORS = 132
SHARED_BYTES = 226 * 1024
STAGING_BYTES = 16 * 1024  # of shared memory for outputs on their way out
# Rows of x that a block takes: warpgroups that share them
CLASSES = {64: 1, 128: 2, 192: 3, 256: 2}
K = 64  # columns of one slot of the ring: a row of the 128-byte swizzle
# Weight rows of a block, by the registers of its warpgroups
WIDEST = {64: 256, 128: 256, 192: 192, 256: 160}

# The model of an H200: bytes a second of its memory, and of one streaming multiprocessor from the
# L2 cache; operations a second of one.
MEMORY_RATE = 4.3e12
L2_RATE = 57e9
FLOP_RATE = 5.6e12
UNIT_SECONDS = 2e-6  # of a tile's activation and writing, which nothing overlaps


class Tuning(NamedTuple):
    """Sizes that change speed alone. One block multiplies `rows` rows of x with `n` rows of the
    weight: half gate, half up."""

    rows: int
    n: int
    stages: int = 4
    cluster: int = 2  # blocks that share x

    @property
    def warpgroups(self) -> int:
        """Those that multiply; they share the rows of x."""
        return CLASSES[self.rows]


def bands(M: int, rows: int) -> int:
    """Blocks that take the rows of x."""
    return -(-M // rows)


def chunk_of(height: int, width: int, groups: int, F: int) -> int:
    """Columns of one staged piece of a `[height, width]` output a warpgroup: the widest divisor of
    `width` that fits. Mosaic copies it in boxes as wide as the largest power of two up to 64 that
    divides it, and these must divide the F columns of the whole."""
    fitting = (
        c
        for c in range(8, width + 1, 8)
        if width % c == 0 and groups * height * c * 2 <= STAGING_BYTES
    )
    return max(c for c in fitting if F % min(64, c & -c) == 0)


def stages_of(rows: int, n: int, F: int) -> int:
    """Slots of the ring that fit into shared memory beside the staged outputs."""
    groups = CLASSES[rows]
    staged = rows * chunk_of(rows // groups, n // 2, groups, F) * 2
    return (SHARED_BYTES - staged) // ((rows + n) * K * 2)


@functools.cache
def _measured() -> dict[str, dict[str, int]]:
    found = json.loads((pathlib.Path(__file__).parent / "tuned" / "nvidia_h200.json").read_text())
    return found["sizes"]


@functools.cache
def tuning_of(M: int, O: int, I: int) -> Tuning:  # noqa: E741
    """The sizes for M rows of x times `[O, I]`."""
    entry = _measured().get(f"{O}x{I}x{M}")
    return Tuning(**entry) if entry else _modelled(M, O, I)


def _modelled(M: int, O: int, I: int) -> Tuning:  # noqa: E741
    """The candidate of least modelled time. At least four slots, so that loads of the next step
    never wait for a product."""
    classes = (
        [min((rows for rows in CLASSES if rows >= M), default=256)] if M <= 256 else [128, 192, 256]
    )
    found = []
    for rows, cluster in itertools.product(classes, (1, 2)):
        for n in range(16, min(WIDEST[rows], O) + 1, 16):
            stages = min(8, stages_of(rows, n, O // 2))
            if stages >= 4:
                tuning = Tuning(rows, n, stages, cluster)
                found.append((_seconds(M, O, I, tuning), -n, tuning))
    return min(found)[2]


def _seconds(M: int, O: int, I: int, tuning: Tuning) -> float:  # noqa: E741
    """Time of the busiest block, or of memory if that is longer; a little for blocks that are
    tied."""
    rows, n, cluster = tuning.rows, tuning.n, tuning.cluster
    waves = -(-(-(-O // (n * cluster)) * bands(M, rows)) // (PROCESSORS // cluster))
    moved, multiplied = 2 * I * (n + rows / cluster), 2 * I * n * rows
    busiest = waves * (max(moved / L2_RATE, multiplied / FLOP_RATE) + UNIT_SECONDS)
    return (
        max(2 * O * I / MEMORY_RATE, busiest)
        + 0.1 * busiest
        + (0.01 * busiest if cluster > 1 else 0.0)
    )
