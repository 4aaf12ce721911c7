"""Matrices of 4-bit integers that compressed-tensors stores a byte each, in the format
"int-quantized": what it writes where inputs are rounded, too.

`X.weight` int8 [N, K] is -8 to 7, `X.weight_scale` [N, groups], and so is `X.weight_zero_point`,
int8. The weight is (number - zero point) · scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxllm.config import ConfigError
from jaxllm.quantisation.grouped import FLOATS, Arrays
from jaxllm.quantisation.packed_groups import CompressedMatrix
from jaxllm.quantisation.scheme import Bounds, Header, PackedPart

HALF = 8  # of the range of 4 bits
BYTES = ("I8",)


@dataclass(frozen=True)
class ByteMatrix(CompressedMatrix):
    """Parts: numbers, scales and, in some, zero points."""

    @property
    def symmetric(self) -> bool:
        return len(self.parts) == 2

    def numbers(self, arrays: Arrays, bounds: Bounds) -> np.ndarray:
        return self._unsigned(0, arrays[0][tuple(slice(*bound) for bound in bounds)])

    def scales(self, arrays: Arrays, rows: slice) -> np.ndarray:
        return arrays[1][rows]

    def zeros(self, arrays: Arrays, rows: slice) -> np.ndarray:
        if self.symmetric:
            return np.full(arrays[1][rows].shape, HALF, np.int32)
        return self._unsigned(2, arrays[2][rows])

    def check(self, arrays: Arrays) -> None:
        super().check(arrays)
        self.zeros(arrays, slice(0, self.shape[0]))

    def _unsigned(self, part: int, stored: np.ndarray) -> np.ndarray:
        """From 0 on. Raises ConfigError for a number of more bits."""
        if stored.size and not -HALF <= stored.min() <= stored.max() < HALF:
            wrong = stored[(stored < -HALF) | (stored >= HALF)][0]
            raise ConfigError(
                f"{self.parts[part].name} has the number {wrong}; those of 4 bits are {-HALF} to "
                f"{HALF - 1}: download or convert the checkpoint again"
            )
        return stored.astype(np.int32) + HALF


def byte_matrix(
    name: str, stored: Mapping[str, Header], group: int, inputs: str | None, centred: bool
) -> ByteMatrix:
    """The matrix `name`, of which `group` columns share a scale; 0 stands for all columns. Unless
    it is `centred`, it has zero points."""
    rows, columns = stored[name].shape
    size = group or columns
    grid = (rows, -(-columns // size))
    scale, zero = (f"{name}_{leaf}" for leaf in ("scale", "zero_point"))
    parts = [PackedPart(name, (rows, columns), BYTES), PackedPart(scale, grid, FLOATS)]
    if zero in stored or not centred:
        parts.append(PackedPart(zero, grid, BYTES))
    return ByteMatrix(name, (rows, columns), tuple(parts), 4, size, inputs)
