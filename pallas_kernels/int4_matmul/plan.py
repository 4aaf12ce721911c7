"""Sizes of the Hopper kernel for a product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from pallas_kernels.mosaic_units import (
    LAUNCH_STEPS,
    PROCESSORS,
    ROWS,
    STAGED,
    joined_shares,
    shares_of,
    time_of,
)

SHARED_BYTES = 220 * 1024
LARGE_STEPS = 7  # wide slots of a processor; with fewer, the last ones leave others idle
COLUMNS = (64, 128, 256)  # of a slot of the ring
TOKENS = (8, 16, 32, 64)  # widths of a product of few
FEW_TOKENS = 64  # up to here memory is what bounds, and one tile holds all tokens
# Most tokens and warpgroups of the tiles that share out more. The time of a step, by products on a
# card: what 64 rows take to convert, in tokens, and what each token takes
TILES = MappingProxyType({(128, 3): (60, 0.53), (128, 2): (68, 0.61), (256, 2): (60, 0.75)})
DENSE_ROWS = 16384  # from here on the whole weight is converted once, not once for each tile


def is_dense(rows: int) -> bool:
    """Whether a product with so many rows is XLA's, of the whole weight in x's type.

    To write that takes as long whatever the rows, 4.5 ms for all of 7B. The kernel converts for
    each tile of tokens, and what cuBLAS and `gated_matmul` do beside the product is not in it. For
    2,048 rows of a layer of 7B it took 94 % of the time of their products with plain weights.
    """
    return rows >= DENSE_ROWS


class Tuning(NamedTuple):
    """Sizes that change only speed.

    Attributes:
      tokens: tokens of a product.
      warpgroups: warpgroups that multiply, each 64 rows of the weight.
      columns: columns of a slot of the ring.
      stages: slots of the ring of copies.
      shares: parts of the columns whose products are added afterwards.
      joined: two tiles of tokens share columns out together, see `joined_shares`.
    """

    tokens: int
    warpgroups: int
    columns: int
    stages: int
    shares: int
    joined: bool = False


def tuning_of(T: int, O: int, I: int, group: int) -> Tuning:
    """Sizes for x `[T, I]` and a weight `[O, I]` in groups of columns."""
    shape = T, O, I

    def with_tile(tokens: int, warpgroups: int) -> Tuning:
        return tuning_with(T, O, I, group, tokens, warpgroups)

    if T <= FEW_TOKENS:
        return best_of(shape, with_tile)
    candidates = [*_timed(shape, with_tile, TILES), *_joined(shape, with_tile)]
    return min(candidates, key=lambda timed: timed[0])[1]


def best_of(
    shape: tuple[int, int, int],
    with_tile: Callable[[int, int], Tuning],
    tiles: Mapping[tuple[int, int], tuple[float, float]] = TILES,
) -> Tuning:
    """Sizes for T, O and I whose busiest processor ends first, with the tiles that so many tokens
    may have: one of all tokens, or of `tiles` beyond that."""
    if shape[0] <= FEW_TOKENS:
        return with_tile(next(width for width in TOKENS if width >= shape[0]), 4)
    return min(_timed(shape, with_tile, tiles), key=lambda timed: timed[0])[1]


def _timed(
    shape: tuple[int, int, int],
    with_tile: Callable[[int, int], Tuning],
    tiles: Mapping[tuple[int, int], tuple[float, float]],
) -> Iterator[tuple[float, Tuning]]:
    """Sizes with these tiles, and the time of the busiest processor."""
    for tile, costs in tiles.items():
        for width in _narrow(shape[0], tile[0]):
            sizes = with_tile(width, tile[1])
            steps = time_of(*counts(*shape, sizes), sizes.shares)
            yield _step_time(costs, sizes) * steps, sizes


def _joined(
    shape: tuple[int, int, int], with_tile: Callable[[int, int], Tuning]
) -> Iterator[tuple[float, Tuning]]:
    """The same of two tiles of tokens that share columns out together."""
    for tile, costs in TILES.items():
        for width in _narrow(shape[0], tile[0]):
            sizes = with_tile(width, tile[1])
            blocks, bands, steps, size = counts(*shape, sizes)
            idle = blocks * sizes.warpgroups - -(-shape[1] // ROWS)
            shares = joined_shares.most_shares(blocks, idle, steps, PROCESSORS)
            if bands == 2 and shares > 1:
                busiest = joined_shares.longest(steps, shares)
                taken = busiest + size / 64 + LAUNCH_STEPS + shares / 8
                joined_sizes = sizes._replace(shares=shares, joined=True)
                yield _step_time(costs, sizes) * taken, joined_sizes


def _step_time(costs: tuple[float, float], sizes: Tuning) -> float:
    fixed, token_cost = costs
    return (fixed + token_cost * sizes.tokens) * sizes.warpgroups * sizes.columns


def _narrow(T: int, most: int) -> list[int]:
    """Tokens of tiles, as few as cover all with the least number of tiles, and with one more."""
    least = -(-T // most)
    widths = (-(-T // (8 * tiles)) * 8 for tiles in (least, least + 1))
    return [width for width in widths if width > FEW_TOKENS]


def tuning_with(
    T: int,
    O: int,
    I: int,
    group: int,
    tokens: int,
    warpgroups: int,
) -> Tuning:
    """The same with a given tile. A slot's columns are whole groups, or a part of one."""
    wide = tokens <= 32 and -(-O // (warpgroups * ROWS)) * I >= LARGE_STEPS * PROCESSORS * 256
    if wide:
        most = 256
    elif tokens <= 128:
        most = 128
    else:
        most = 64
    columns = max(c for c in COLUMNS if c <= most and (c % group == 0 or group % c == 0))
    return with_columns(T, O, I, group, tokens, warpgroups, columns)


def with_columns(
    T: int,
    O: int,
    I: int,
    group: int,
    tokens: int,
    warpgroups: int,
    columns: int,
) -> Tuning:
    """The same with given slots: as many as fit, and the best shares."""
    stages = stages_of(tokens, warpgroups, columns, group)
    sizes = Tuning(tokens, warpgroups, columns, stages, 1)
    return sizes._replace(shares=shares_of(*counts(T, O, I, sizes)))


def counts(T: int, O: int, I: int, sizes: Tuning) -> tuple[int, int, int, int]:
    """What `time_of` counts: blocks of rows, tiles of tokens, slots, and the size of a tile."""
    blocks = -(-O // (sizes.warpgroups * ROWS))
    bands = -(-T // sizes.tokens)
    tile = sizes.tokens * sizes.warpgroups * 128 // sizes.columns
    return blocks, bands, -(-I // sizes.columns), tile


def widths_of(tile: int) -> tuple[int, ...]:
    """Widths of products that the rows of an expert's tile may take, ascending: a tile with few
    rows neither copies nor multiplies the others."""
    return tuple(sorted({-(-tile * quarters // 32) * 8 for quarters in (1, 2, 3, 4)}))


def with_room(sizes: Tuning, group: int, kept: int) -> Tuning:
    """The same sizes where a kernel keeps so many bytes of shared memory for itself."""
    tokens, warpgroups, columns, *_ = sizes
    return sizes._replace(stages=stages_of(tokens, warpgroups, columns, group, kept))


def stages_of(tokens: int, warpgroups: int, columns: int, group: int, kept: int = 0) -> int:
    """Slots that fit beside the staged result and what else is kept."""
    row = columns // 2 + 4 * max(1, columns // group)  # numbers, a scale and a zero point
    slot = 2 * tokens * columns + warpgroups * ROWS * row
    return min(12, (SHARED_BYTES - kept - 2 * min(tokens, STAGED) * ROWS * warpgroups) // slot)
