"""Types of tensors: blocks of numbers and what they stand for, computed in float32 as ggml does.

Layouts are those of https://github.com/ggml-org/ggml, `ggml-common.h`; numbers in a block follow
each other along a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

F16, U8 = "<f2", "u1"
NIBBLES = np.array(  # of IQ4
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32
)
FLOATS_OF_4_BITS = np.array((0, 0.5, 1, 1.5, 2, 3, 4, 6), np.float32)
FLOATS_OF_4_BITS = np.concatenate([FLOATS_OF_4_BITS, -FLOATS_OF_4_BITS])
BIAS = 127  # of the exponent of MXFP4


@dataclass(frozen=True)
class BlockType:
    """How a tensor is stored.

    Attributes:
        name: that ggml gives it.
        size: numbers of a block.
        layout: of a block.
        values: from blocks [...] to their numbers [..., size], or axes that join to that.
    """

    name: str
    size: int
    layout: np.dtype
    values: Callable[[np.ndarray], np.ndarray]

    @property
    def bits(self) -> float:
        """Bits of a number."""
        return 8 * self.layout.itemsize / self.size

    @property
    def plain(self) -> bool:
        """Whether it is a type of numbers rather than of blocks."""
        return self.size == 1


def fields(data: np.ndarray, width: int, bits: int) -> np.ndarray:
    """Fields of so many bits: the lowest of `width` bytes [..., n], then the next of the same
    bytes; [..., n / width, 8 / bits, width]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = data.reshape(*data.shape[:-1], -1, 1, width)
    return (runs >> shifts) & np.uint8(2**bits - 1)


def _joined(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The last three axes in another shape."""
    return data.reshape(*data.shape[:-3], *shape)


def _number(blocks: np.ndarray, name: str, axes: int = 1) -> np.ndarray:
    """One number of each block in float32, with so many axes of length one behind."""
    found = blocks[name].astype(np.float32)
    return found.reshape(*found.shape, *[1] * axes)


def _q4(blocks: np.ndarray) -> np.ndarray:
    return _joined(fields(blocks["q"], 16, 4), (32,))


def _q5(blocks: np.ndarray) -> np.ndarray:
    return _q4(blocks) | (_joined(fields(blocks["high"], 1, 1), (32,)) << np.uint8(4))


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _number(blocks, "d") * (_q4(blocks).astype(np.float32) - 8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _number(blocks, "d") * _q4(blocks).astype(np.float32) + _number(blocks, "m")


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    return _number(blocks, "d") * (_q5(blocks).astype(np.float32) - 16)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    return _number(blocks, "d") * _q5(blocks).astype(np.float32) + _number(blocks, "m")


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _number(blocks, "d") * blocks["q"].astype(np.float32)


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    return _number(blocks, "d") * NIBBLES[_q4(blocks)]


def _mxfp4(blocks: np.ndarray) -> np.ndarray:
    exponents = blocks["e"].astype(np.int32)[..., None] - BIAS
    return np.ldexp(FLOATS_OF_4_BITS[_q4(blocks)], exponents)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    scales, offsets = blocks["scales"] & np.uint8(15), blocks["scales"] >> np.uint8(4)
    numbers = _joined(fields(blocks["q"], 32, 2), (16, 16)).astype(np.float32)
    scale = (_number(blocks, "d") * scales.astype(np.float32))[..., None]
    return scale * numbers - (_number(blocks, "m") * offsets.astype(np.float32))[..., None]


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    low = _joined(fields(blocks["scales"][..., :8], 8, 4), (16,))
    high = _joined(fields(blocks["scales"][..., 8:], 4, 2), (16,))
    scales = (low | (high << np.uint8(4))).astype(np.float32) - 32
    numbers = _joined(fields(blocks["q"], 32, 2), (16, 16))
    top = _joined(fields(blocks["high"], 32, 1), (16, 16))  # unset: four less
    values = (numbers | (top << np.uint8(2))).astype(np.float32) - 4
    return (_number(blocks, "d") * scales)[..., None] * values


def _scales_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets of the eight groups of a block, 6 bits each in 12 bytes."""
    one, two, three = (blocks["scales"][..., at : at + 4] for at in (0, 4, 8))
    four, six = np.uint8(4), np.uint8(63)
    top = np.uint8(0x30)
    scales = [one & six, (three & np.uint8(15)) | ((one >> np.uint8(2)) & top)]
    offsets = [two & six, (three >> four) | ((two >> np.uint8(2)) & top)]
    scale, offset = (np.concatenate(each, axis=-1).astype(np.float32) for each in (scales, offsets))
    return _number(blocks, "d") * scale, _number(blocks, "m") * offset


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    scale, offset = _scales_k(blocks)
    numbers = _joined(fields(blocks["q"], 32, 4), (8, 32)).astype(np.float32)
    return scale[..., None] * numbers - offset[..., None]


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    scale, offset = _scales_k(blocks)
    top = _joined(fields(blocks["high"], 32, 1), (8, 32)) << np.uint8(4)
    numbers = (_joined(fields(blocks["q"], 32, 4), (8, 32)) | top).astype(np.float32)
    return scale[..., None] * numbers - offset[..., None]


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = _joined(fields(blocks["q"], 64, 4), (16, 16))
    high = _joined(fields(blocks["high"], 32, 2), (16, 16)) << np.uint8(4)
    scale = _number(blocks, "d") * blocks["scales"].astype(np.float32)
    return scale[..., None] * ((low | high).astype(np.float32) - 32)


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    low = _joined(fields(blocks["low"], 1, 4), (8,))
    high = _joined(fields(blocks["high"], 1, 2), (8,)) << np.uint8(4)
    scale = _number(blocks, "d") * ((low | high).astype(np.float32) - 32)
    return scale[..., None] * NIBBLES[_joined(fields(blocks["q"], 16, 4), (8, 32))]


def _plain(numbers: np.ndarray) -> np.ndarray:
    return numbers


def _blocks(*parts: tuple[str, str] | tuple[str, str, int]) -> np.dtype:
    return np.dtype([*parts])


_D, _M, _Q, _Q_K = ("d", F16), ("m", F16), ("q", U8, 16), ("q", U8, 128)
_SCALES_K = ("scales", U8, 12)
# By the number in the file
TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, np.dtype("<f4"), _plain),
    1: BlockType("F16", 1, np.dtype(F16), _plain),
    2: BlockType("Q4_0", 32, _blocks(_D, _Q), _q4_0),
    3: BlockType("Q4_1", 32, _blocks(_D, _M, _Q), _q4_1),
    6: BlockType("Q5_0", 32, _blocks(_D, ("high", U8, 4), _Q), _q5_0),
    7: BlockType("Q5_1", 32, _blocks(_D, _M, ("high", U8, 4), _Q), _q5_1),
    8: BlockType("Q8_0", 32, _blocks(_D, ("q", "i1", 32)), _q8_0),
    10: BlockType("Q2_K", 256, _blocks(("scales", U8, 16), ("q", U8, 64), _D, _M), _q2_k),
    11: BlockType("Q3_K", 256, _blocks(("high", U8, 32), ("q", U8, 64), _SCALES_K, _D), _q3_k),
    12: BlockType("Q4_K", 256, _blocks(_D, _M, _SCALES_K, _Q_K), _q4_k),
    13: BlockType("Q5_K", 256, _blocks(_D, _M, _SCALES_K, ("high", U8, 32), _Q_K), _q5_k),
    14: BlockType("Q6_K", 256, _blocks(_Q_K, ("high", U8, 64), ("scales", "i1", 16), _D), _q6_k),
    20: BlockType("IQ4_NL", 32, _blocks(_D, _Q), _iq4_nl),
    23: BlockType("IQ4_XS", 256, _blocks(_D, ("high", U8, 2), ("low", U8, 4), _Q_K), _iq4_xs),
    28: BlockType("F64", 1, np.dtype("<f8"), _plain),
    30: BlockType("BF16", 1, np.dtype(ml_dtypes.bfloat16), _plain),
    39: BlockType("MXFP4", 32, _blocks(("e", U8), _Q), _mxfp4),
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
