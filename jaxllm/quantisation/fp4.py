"""Tensors of 4-bit floats (e2m1) in groups of columns: MXFP4, whose scales are exponents; NVFP4,
whose scales are 8-bit floats times one number of the whole matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxllm.config import ConfigError
from jaxllm.quantisation.int4_rows import row_bytes, rows_of
from jaxllm.quantisation.scheme import Bounds, PackedPart, PackedTensor, check_scales
from jaxllm.quantisation.weight_format import FP4, WeightFormat

U8 = "U8"
BIAS = 127  # of an exponent
LARGEST = 252  # exponent with which 6 is a finite float32; 255 is not a number
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_HALVES = np.array([*MAGNITUDES, *(-value for value in MAGNITUDES)], np.float32)
_PAIRS = np.stack([np.tile(_HALVES, 16), np.repeat(_HALVES, 16)], axis=1)
# Both numbers of each byte as one element: a look-up of rows takes many times as long
VALUES = _PAIRS.view(np.complex64)[:, 0]


@dataclass(frozen=True)
class Fp4Matrix(PackedTensor):
    """A matrix [N, K]. The first part has two numbers a byte, the low half first, the second the
    scales [N, G].

    Attributes:
        group: columns that share a scale.
        whole: how the third part, the number of the whole matrix, enters: "times", "divided", or
            "" where there is none. Parts after it are scales of inputs, which stay as they are.
    """

    group: int
    whole: str = ""

    @property
    def format(self) -> WeightFormat | None:
        return WeightFormat(FP4, self.group)

    def leaves(self) -> tuple[PackedTensor, ...]:
        shape = (self.shape[0], row_bytes(WeightFormat(FP4, self.group), self.shape[1]))
        return (Fp4Rows(f"{self.name}.rows", shape, self.parts, self),)

    def scales(self, arrays: Sequence[np.ndarray], rows: slice) -> np.ndarray:
        """`[rows, G]`, float32. Raises ConfigError."""
        part = self.parts[1]
        stored = arrays[1][rows]
        if stored.dtype in (np.uint8, ml_dtypes.float8_e8m0fnu):
            return powers(part, np.ascontiguousarray(stored).view(np.uint8))
        scales = stored.astype(np.float32)
        check_scales(part, scales)
        if not self.whole:
            return scales
        number = arrays[2].astype(np.float32).reshape(())
        if not (np.isfinite(number) and number > 0):
            raise ConfigError(
                f"{self.parts[2].name} is {number}; it is finite and above 0: download or convert "
                "the checkpoint again"
            )
        with np.errstate(over="ignore"):
            if self.whole == "times":
                scales = scales * number
            else:
                scales = scales / number
        check_scales(part, scales)
        return scales

    def check(self, arrays: Sequence[np.ndarray]) -> None:
        self.scales(arrays, slice(0, self.shape[0]))

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        rows = slice(*bounds[0])
        left, right = bounds[1]
        scales = self.scales(arrays, rows)[:, np.arange(left, right) // self.group]
        stored = np.ascontiguousarray(arrays[0][rows, left // 2 : -(-right // 2)]).view(np.uint8)
        first = left % 2
        return VALUES[stored].view(np.float32)[:, first : first + right - left] * scales


@dataclass(frozen=True)
class Fp4Rows(PackedTensor):
    """A matrix as the bytes of its rows, see `int4_rows`."""

    matrix: Fp4Matrix

    def check(self, arrays: Sequence[np.ndarray]) -> None:
        self.matrix.check(arrays)

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        rows = slice(*bounds[0])
        stored = np.ascontiguousarray(arrays[0][rows]).view(np.uint8)
        return with_scales(stored, self.matrix.scales(arrays, rows))[:, slice(*bounds[1])]


def powers(part: PackedPart, exponents: np.ndarray) -> np.ndarray:
    """2 ** (exponent - 127), float32. Raises ConfigError for one that weights cannot have."""
    check_exponents(part, exponents)
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - BIAS)


def check_exponents(part: PackedPart, exponents: np.ndarray) -> None:
    """Raises ConfigError for an exponent that weights cannot have."""
    if exponents.max(initial=0) > LARGEST:
        raise ConfigError(
            f"{part.name} has the exponent {exponents.max()}; exponents of weights are at most "
            f"{LARGEST}: download or convert the checkpoint again"
        )


def with_scales(stored: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The bytes of rows, of two numbers a byte [N, K / 2] and of scales [N, G]."""
    numbers = np.stack([stored & 15, stored >> 4], axis=-1).reshape(len(stored), -1)
    return rows_of(numbers, scales, None)
