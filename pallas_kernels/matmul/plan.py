"""Sizes of the Hopper kernel for one product: measured ones from `tuned/`, else chosen by a model of the card."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import NamedTuple

PROCESSORS = 132
SHARED_BYTES = 227 * 1024
STAGING_BYTES = 25 * 1024  # of shared memory for outputs on their way out
ROW_CLASSES = (8, 16, 32, 64, 128, 256)  # rows of x are padded up to one of these
MAX_WIDTH = 256  # weight rows of one warpgroup's product

# The model of an H200: bytes a second of its memory, and of one streaming multiprocessor from the L2 cache; products a second of one.
MEMORY_RATE = 4.3e12
L2_RATE = 43e9
FLOP_RATE = 5.3e12


class Tuning(NamedTuple):
    """Sizes that change speed alone. One block multiplies x with `n` weight rows over one of `split` parts of K."""

    n: int  # weight rows of a block
    k: int = 64  # columns of one slot of the ring
    stages: int = 4
    split: int = 1
    groups: int = 1  # warpgroups that multiply; they share the weight rows up to 64 rows of x, else the rows of x
    cluster: int = 1  # blocks that share x; from 16 rows on


def row_class(M: int) -> int:
    """The padded number of rows. Raises ValueError beyond the largest class."""
    if M > ROW_CLASSES[-1] or M < 1:
        raise ValueError(f"mosaic_gpu matmul takes 1 to {ROW_CLASSES[-1]} rows, got {M}")
    return next(rows for rows in ROW_CLASSES if rows >= M)


def chunk_of(rows: int, width: int, itemsize: int, groups: int) -> int:
    """Columns of one staged piece of a `[rows, width]` output a warpgroup: the widest divisor of `width` that fits."""
    fitting = [c for c in range(8, width + 1, 8) if width % c == 0 and groups * rows * c * itemsize <= STAGING_BYTES]
    return max(fitting)


def stages_of(rows: int, n: int, k: int) -> int:
    """Slots of the ring that fit into shared memory beside the staged outputs."""
    return (SHARED_BYTES - STAGING_BYTES - 1024) // ((max(rows, 64) + n) * k * 2)


@functools.cache
def _measured() -> dict[str, dict[str, int]]:
    found = json.loads((pathlib.Path(__file__).parent / "tuned" / "nvidia_h200.json").read_text())
    return found["sizes"]


@functools.cache
def tuning_of(rows: int, O: int, K: int, halves: int = 1) -> Tuning:  # noqa: E741
    """The sizes for `rows` (a row class) times `[O, K]`; `halves` is 2 for a gated product."""
    entry = _measured().get(f"{'gated ' if halves == 2 else ''}{O}x{K}x{rows}")
    return Tuning(**entry) if entry else _modelled(rows, O, K, halves)


def _modelled(rows: int, O: int, K: int, halves: int) -> Tuning:  # noqa: E741
    """The candidate of least modelled time. At least four slots, so that loads of the next step never wait for a product."""
    widest = {64: 2 * MAX_WIDTH, 128: MAX_WIDTH, 256: 160}[max(rows, 64)]
    found = []
    for n in range(8 * halves, min(widest, O) + 1, 8 * halves):
        groups = 2 if rows > 64 or n > MAX_WIDTH else 1
        k = 128 if K % 128 == 0 and stages_of(rows, n, 128) >= 4 else 64
        stages = stages_of(rows, n, k)
        if stages >= 4 and (rows > 64 or n % (8 * halves * groups) == 0):
            splits = range(1, min(8, K // k) + 1) if halves == 1 else (1,)
            clusters = (1, 2) if rows > 8 else (1,)  # one row tile of x cannot be shared
            sizes = (Tuning(n, k, stages, split, groups, cluster) for split in splits for cluster in clusters)
            found += [(_seconds(rows, O, K, tuning), tuning) for tuning in sizes]
    return min(found)[1]


def _seconds(rows: int, O: int, K: int, tuning: Tuning) -> float:  # noqa: E741
    """Time of the busiest block, or of memory if that is longer, and of what the parts' sum adds; a little for uneven or tied blocks."""
    n, split, cluster = tuning.n, tuning.split, tuning.cluster
    waves = -(-(-(-O // (n * cluster)) * split) // (PROCESSORS // cluster))
    depth = -(-K // split)
    parts = 4 * rows * O * split if split > 1 else 0
    moved = waves * depth * 2 * (n + rows / cluster) + parts / PROCESSORS
    multiplied = waves * depth * 2 * n * max(rows, 64)
    busiest = max(moved / L2_RATE, multiplied / FLOP_RATE)
    tied = 0.02 * busiest if cluster > 1 else 0.0
    return max(2 * O * K / MEMORY_RATE, busiest) + 0.1 * busiest + tied + parts / MEMORY_RATE + (5e-7 if split > 1 else 0)
