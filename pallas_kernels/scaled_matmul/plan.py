"""Sizes of the Hopper kernel for a product."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.grouped_matmul.groups import LARGEST_TILE
from pallas_kernels.grouped_matmul.plan import Tuning as ExpertTuning
from pallas_kernels.int4_matmul.plan import TILES, best_of
from pallas_kernels.int4_matmul.plan import Tuning as ConvertedTuning
from pallas_kernels.mosaic_units import ROWS, STAGED, shares_of

SHARED_BYTES = 220 * 1024
K = 128  # columns of a slot of the ring: a row of the 128-byte swizzle
TOKENS = (8, 16, 32, 64, 128, 256)  # widths of a product
MOST_STAGES = 8
GROUPS = (16, 32, 64)  # columns that share a scale, with plain inputs; and multiples of 128
SCALES = 32  # of tokens in a slot, at least: copies begin at multiples of 128 bytes
PROMOTED = 128  # tokens up to which registers hold two sums
MOST_EXPERT_TOKENS = 64
MOST_EXPERT_STAGES = 12  # 200 KiB of weights under way on each processor
TWO_FROM = LARGEST_TILE  # rows of experts' tiles from which two warpgroups multiply
DENSE_ROWS = 4096  # from here on a weight that is converted is so as a whole, by XLA
FEW_ROWS = 64  # up to here cuBLASLt reads the weight at 2.2 to 2.4 TB/s of 4.3, measured


def is_faster(rows: int, grouped: bool) -> bool:
    """Whether the kernel is expected to be faster than what XLA makes of the reference's product.

    With a scale for each row that is a product of cuBLASLt's in 8 bits, as fast as the card for
    many rows. With groups of columns XLA multiplies in 16 bits.
    """
    return grouped or rows <= FEW_ROWS


def takes_group(group: int | None) -> bool:
    """Whether kernels take scales of so many columns, None of all, with plain inputs."""
    return group is None or group in GROUPS or group % K == 0


def room_of(tokens: int) -> int:
    """Rows that a product of so many tokens reads, where rows of the weight have one scale."""
    if not is_faster(tokens, grouped=False):
        return tokens
    return next(width for width in TOKENS if width >= tokens)


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


def tuning_of(T: int, O: int, I: int, grouped: bool) -> Tuning:
    """Sizes for x `[T, I]` and a weight `[O, I]`, `grouped` if columns have scales of their own."""
    if grouped:
        most = PROMOTED
    else:
        most = TOKENS[-1]
    tokens = next((width for width in TOKENS if width >= min(T, most)), most)
    warpgroups = 2
    if tokens <= 64:
        warpgroups = 4
    blocks = -(-O // (warpgroups * ROWS))
    bands = -(-T // tokens)
    # A step of 8 bits moves twice the bytes of one of 4, for which shares are counted; to end a
    # unit takes about a step
    shares = shares_of(blocks, bands, -(-I // K), tokens * warpgroups // 2 + 64)
    return Tuning(tokens, warpgroups, stages_of(tokens, warpgroups), shares)


def stages_of(tokens: int, warpgroups: int) -> int:
    """Slots that fit beside the staged result."""
    slot = (tokens + warpgroups * ROWS) * K + 4 * max(tokens, SCALES)
    staged = 2 * min(tokens, STAGED) * ROWS * warpgroups
    return min(MOST_STAGES, (SHARED_BYTES - staged) // slot)


def converted_tuning(T: int, O: int, I: int) -> ConvertedTuning:
    """Sizes for x `[T, I]` in 16 bits and a weight `[O, I]` of 8 that is converted in registers. Of
    slots with 256 tokens two alone would fit."""
    shape = (T, O, I)
    tiles = {tile: time for tile, time in TILES.items() if tile[0] < TOKENS[-1]}
    return best_of(shape, lambda *tile: converted_with(shape, tile, 0), tiles)


def converted_with(
    shape: tuple[int, int, int], tile: tuple[int, int], kept: int
) -> ConvertedTuning:
    """The same for T, O and I with a given tile, where a kernel keeps so many bytes of shared
    memory for itself."""
    T, O, I = shape
    tokens, warpgroups = tile
    slot = (2 * tokens + warpgroups * ROWS) * K
    room = SHARED_BYTES - kept - 2 * min(tokens, STAGED) * ROWS * warpgroups
    blocks = -(-O // (warpgroups * ROWS))
    bands = -(-T // tokens)
    shares = shares_of(blocks, bands, -(-I // K), tokens * warpgroups // 2 + 64)
    return ConvertedTuning(tokens, warpgroups, K, min(MOST_STAGES, room // slot), shares)


def expert_tile(tile: int, promoted: bool) -> int:
    """Tokens of a unit of experts' products in tiles of so many: registers hold four sums of 64."""
    if promoted:
        return min(tile, MOST_EXPERT_TOKENS)
    return tile


def expert_tuning(
    tokens: int, tile: int, grouped: bool, warpgroups: int | None = None
) -> ExpertTuning:
    """Sizes for units of so many tokens in such tiles. Full tiles are bound by what the L2 cache
    gives, so two warpgroups share the tokens; others by the weights' bytes, which small units
    divide best."""
    warpgroups = warpgroups or (2 if tile >= TWO_FROM else 1)
    slot = (tokens + 2 * warpgroups * ROWS) * K + grouped * 4 * max(tokens, SCALES)
    staged = 2 * warpgroups * tokens * ROWS
    return ExpertTuning(warpgroups, min(MOST_EXPERT_STAGES, (SHARED_BYTES - staged) // slot), K)
