"""Types of tensors: blocks of numbers and what they stand for, computed in float32 as ggml does.

Layouts are those of https://github.com/ggml-org/ggml, `ggml-common.h`; numbers in a block follow
each other along a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import ml_dtypes
import numpy as np

F16 = "<f2"
U8 = "u1"
I8 = "I8"
I4 = "I4"
U4 = "U4"
U5 = "U5"
F4 = "F4"
N4 = "N4"
NIBBLES = np.array(  # of IQ4
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8
)
HALVES = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)  # of MXFP4
BIAS = 128  # of the exponent of such a half
# What numbers stand for where they are no integers
TABLES: Mapping[str, np.ndarray] = MappingProxyType({F4: HALVES, N4: NIBBLES})
OFFSETS = (U4, U5)  # beside which groups have offsets


class Groups(NamedTuple):
    """Blocks [...] as groups of numbers that share a scale.

    Attributes:
        numbers: integers of 8 bits, or places in a table, [..., G, numbers of a group].
        scale: float32, [..., G].
        offset: what is added to the products, float32, [..., G]; None: nothing.
    """

    numbers: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None = None


@dataclass(frozen=True)
class BlockType:
    """How a tensor is stored.

    Attributes:
        name: that ggml gives it.
        size: numbers of a block.
        group: those that share a scale.
        layout: of a block.
        groups: of blocks; None: they are plain numbers.
        integers: what the numbers of groups are: I8, I4 (-8 to 7), U4 (0 to 15) or U5 (0 to 31)
            in groups with offsets, F4 or N4 (places in `TABLES`); None where they are plain.
    """

    name: str
    size: int
    group: int
    layout: np.dtype
    groups: Callable[[np.ndarray], Groups] | None = None
    integers: str | None = None

    @property
    def plain(self) -> bool:
        """Whether it is a type of numbers rather than of blocks."""
        return self.groups is None

    def values(self, blocks: np.ndarray) -> np.ndarray:
        """The numbers of blocks [..., B], [..., B · size]."""
        if self.groups is None:
            return blocks
        numbers, scale, offset = self.groups(blocks)
        if (table := TABLES.get(self.integers or "")) is not None:
            numbers = table[numbers]
        values = numbers.astype(np.float32)
        values *= scale[..., None]
        if offset is not None:
            values += offset[..., None]
        return values.reshape(*blocks.shape[:-1], -1)


def fields(data: np.ndarray, width: int, bits: int) -> np.ndarray:
    """Fields of so many bits: the lowest of `width` bytes [..., n], then the next of the same
    bytes; [..., n / width, 8 / bits, width]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = data.reshape(*data.shape[:-1], -1, 1, width)
    return (runs >> shifts) & np.uint8(2**bits - 1)


def _joined(data: np.ndarray, groups: int) -> np.ndarray:
    """The last three axes as so many groups."""
    return data.reshape(*data.shape[:-3], groups, -1)


def _centred(numbers: np.ndarray, middle: int) -> np.ndarray:
    return numbers.view(np.int8) - np.int8(middle)


def _float(blocks: np.ndarray, name: str) -> np.ndarray:
    """One number of each block in float32, [..., 1]."""
    numbers = blocks[name].astype(np.float32)
    return numbers.reshape(*numbers.shape, 1)


def _q4(blocks: np.ndarray) -> np.ndarray:
    return _joined(fields(blocks["q"], 16, 4), 1)


def _q5(blocks: np.ndarray) -> np.ndarray:
    return _q4(blocks) | (_joined(fields(blocks["high"], 1, 1), 1) << np.uint8(4))


def _q4_0(blocks: np.ndarray) -> Groups:
    return Groups(_centred(_q4(blocks), 8), _float(blocks, "d"))


def _q4_1(blocks: np.ndarray) -> Groups:
    return Groups(_q4(blocks), _float(blocks, "d"), _float(blocks, "m"))


def _q5_0(blocks: np.ndarray) -> Groups:
    return Groups(_centred(_q5(blocks), 16), _float(blocks, "d"))


def _q5_1(blocks: np.ndarray) -> Groups:
    return Groups(_q5(blocks), _float(blocks, "d"), _float(blocks, "m"))


def _q8_0(blocks: np.ndarray) -> Groups:
    return Groups(blocks["q"][..., None, :], _float(blocks, "d"))


def _iq4_nl(blocks: np.ndarray) -> Groups:
    return Groups(_q4(blocks), _float(blocks, "d"))


def _mxfp4(blocks: np.ndarray) -> Groups:
    exponents = blocks["e"].astype(np.int32)[..., None] - BIAS
    return Groups(_q4(blocks), np.ldexp(np.float32(1), exponents))


def _q2_k(blocks: np.ndarray) -> Groups:
    scales = blocks["scales"] & np.uint8(15)
    offsets = blocks["scales"] >> np.uint8(4)
    numbers = _joined(fields(blocks["q"], 32, 2), 16)
    scale = _float(blocks, "d") * scales.astype(np.float32)
    return Groups(numbers, scale, -(_float(blocks, "m") * offsets.astype(np.float32)))


def _q3_k(blocks: np.ndarray) -> Groups:
    low = _joined(fields(blocks["scales"][..., :8], 8, 4), 1)
    high = _joined(fields(blocks["scales"][..., 8:], 4, 2), 1)
    scales = ((low | (high << np.uint8(4))).astype(np.float32) - 32)[..., 0, :]
    top = _joined(fields(blocks["high"], 32, 1), 16)  # unset: four less
    numbers = _joined(fields(blocks["q"], 32, 2), 16) | (top << np.uint8(2))
    return Groups(_centred(numbers, 4), _float(blocks, "d") * scales)


def _k(blocks: np.ndarray, numbers: np.ndarray) -> Groups:
    """Scales and offsets of the eight groups of a block, 6 bits each in 12 bytes."""
    first, second, third = (blocks["scales"][..., start : start + 4] for start in (0, 4, 8))
    four = np.uint8(4)
    six = np.uint8(63)
    top = np.uint8(0x30)
    scales = [first & six, (third & np.uint8(15)) | ((first >> np.uint8(2)) & top)]
    offsets = [second & six, (third >> four) | ((second >> np.uint8(2)) & top)]
    scale, offset = (
        np.concatenate(halves, axis=-1).astype(np.float32) for halves in (scales, offsets)
    )
    return Groups(numbers, _float(blocks, "d") * scale, -(_float(blocks, "m") * offset))


def _q4_k(blocks: np.ndarray) -> Groups:
    return _k(blocks, _joined(fields(blocks["q"], 32, 4), 8))


def _q5_k(blocks: np.ndarray) -> Groups:
    top = _joined(fields(blocks["high"], 32, 1), 8) << np.uint8(4)
    return _k(blocks, _joined(fields(blocks["q"], 32, 4), 8) | top)


def _q6_k(blocks: np.ndarray) -> Groups:
    low = _joined(fields(blocks["q"], 64, 4), 16)
    high = _joined(fields(blocks["high"], 32, 2), 16) << np.uint8(4)
    scale = _float(blocks, "d") * blocks["scales"].astype(np.float32)
    return Groups(_centred(low | high, 32), scale)


def _iq4_xs(blocks: np.ndarray) -> Groups:
    low = _joined(fields(blocks["low"], 1, 4), 1)
    high = _joined(fields(blocks["high"], 1, 2), 1) << np.uint8(4)
    scales = ((low | high).astype(np.float32) - 32)[..., 0, :]
    numbers = _joined(fields(blocks["q"], 16, 4), 8)
    return Groups(numbers, _float(blocks, "d") * scales)


def _blocks(*parts: tuple[str, str] | tuple[str, str, int]) -> np.dtype:
    return np.dtype([*parts])


_D = ("d", F16)
_M = ("m", F16)
_Q = ("q", U8, 16)
_Q_K = ("q", U8, 128)
_SCALES_K = ("scales", U8, 12)
_SCALES_6 = ("scales", "i1", 16)
# By the number in the file
TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 1, np.dtype("<f4")),
    1: BlockType("F16", 1, 1, np.dtype(F16)),
    2: BlockType("Q4_0", 32, 32, _blocks(_D, _Q), _q4_0, I4),
    3: BlockType("Q4_1", 32, 32, _blocks(_D, _M, _Q), _q4_1, U4),
    6: BlockType("Q5_0", 32, 32, _blocks(_D, ("high", U8, 4), _Q), _q5_0, I8),
    7: BlockType("Q5_1", 32, 32, _blocks(_D, _M, ("high", U8, 4), _Q), _q5_1, U5),
    8: BlockType("Q8_0", 32, 32, _blocks(_D, ("q", "i1", 32)), _q8_0, I8),
    10: BlockType("Q2_K", 256, 16, _blocks(("scales", U8, 16), ("q", U8, 64), _D, _M), _q2_k, U4),
    11: BlockType(
        "Q3_K", 256, 16, _blocks(("high", U8, 32), ("q", U8, 64), _SCALES_K, _D), _q3_k, I4
    ),
    12: BlockType("Q4_K", 256, 32, _blocks(_D, _M, _SCALES_K, _Q_K), _q4_k, U4),
    13: BlockType("Q5_K", 256, 32, _blocks(_D, _M, _SCALES_K, ("high", U8, 32), _Q_K), _q5_k, U5),
    14: BlockType("Q6_K", 256, 16, _blocks(_Q_K, ("high", U8, 64), _SCALES_6, _D), _q6_k, I8),
    20: BlockType("IQ4_NL", 32, 32, _blocks(_D, _Q), _iq4_nl, N4),
    23: BlockType(
        "IQ4_XS", 256, 32, _blocks(_D, ("high", U8, 2), ("low", U8, 4), _Q_K), _iq4_xs, N4
    ),
    28: BlockType("F64", 1, 1, np.dtype("<f8")),
    30: BlockType("BF16", 1, 1, np.dtype(ml_dtypes.bfloat16)),
    39: BlockType("MXFP4", 32, 32, _blocks(("e", U8), _Q), _mxfp4, F4),
}
# Named in errors
UNREAD = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
