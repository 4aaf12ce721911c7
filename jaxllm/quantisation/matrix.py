"""Matrices of 8-bit numbers with scales: of all, of rows, of groups of columns, or of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from jaxllm.config import ConfigError
from jaxllm.quantisation.scheme import (
    FLOATS,
    Bounds,
    Header,
    PackedPart,
    PackedTensor,
    check_scales,
)
from jaxllm.quantisation.weight_format import FP8, INT8, OFFSETS, SYMMETRIC, WeightFormat

E4M3 = "F8_E4M3"
SCALES = (*FLOATS, "U8")  # bytes are exponents, as those of F8_E8M0
NUMBERS = {E4M3: FP8, "I8": INT8}  # by the type in files
# The float32 value of each byte: a look-up takes a seventh of the time of a cast
_BYTES = np.arange(256, dtype=np.uint8)
VALUES = {
    E4M3: _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "I8": _BYTES.view(np.int8).astype(np.float32),
}


@dataclass(frozen=True)
class Grid:
    """Which weights share a scale.

    Attributes:
        rows: of a block.
        columns: of a block; the last of either may be cut off.
        inputs: how inputs of the product are rounded, see `WeightFormat`.
        bound: of inputs before, see `WeightFormat`.
    """

    rows: int
    columns: int
    inputs: str
    bound: float | None = None


@dataclass(frozen=True)
class ScaledMatrix(PackedTensor):
    """A matrix [N, K], of which `parts` has the numbers and the scales; for inputs that are "given"
    also the scale of these, and where it is `shifted` also the numbers that stand for zero."""

    grid: Grid
    shifted: bool = False

    @property
    def format(self) -> WeightFormat | None:
        if self.shifted and self.grid.inputs != "plain":
            return None
        columns = self.grid.columns
        group = None
        if columns < self.shape[1]:
            group = columns
        if group is None and self.grid.inputs == "group":
            inputs = "token"
        else:
            inputs = self.grid.inputs
        if self.shifted:
            form = OFFSETS
        else:
            form = SYMMETRIC
        numbers = NUMBERS[self.parts[0].dtypes[0]]
        return WeightFormat(numbers, group, inputs, form, bound=self.grid.bound)

    def leaves(self) -> tuple[PackedTensor, ...]:
        groups = -(-self.shape[1] // self.grid.columns)
        rows = replace(self.grid, columns=1)
        leaves: tuple[PackedTensor, ...] = (
            Numbers(f"{self.name}.values", self.shape, self.parts[:1]),
            RowScales(f"{self.name}.scale", (self.shape[0], groups), self.parts[1:2], rows),
        )
        if self.grid.inputs == "given":
            leaves += (InputScale(f"{self.name}.input_scale", (1, 1), self.parts[2:]),)
        if self.shifted:
            fields = (self.shape[0], groups), self.parts[1:], rows
            leaves += (RowOffsets(f"{self.name}.offset", *fields),)
        return leaves

    def check(self, arrays: Sequence[np.ndarray]) -> None:
        check_scales(self.parts[1], _floats(arrays[1]))

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        matrix, scales, *others = arrays
        (top, bottom), (left, right) = bounds
        scales = _blocks(scales, self.shape, self.grid)
        zeros = None
        if self.shifted:
            zeros = _blocks(others[-1], self.shape, self.grid)
        values = VALUES[self.parts[0].dtypes[0]][matrix[top:bottom, left:right].view(np.uint8)]
        column = np.arange(left, right) // self.grid.columns
        rows = self.grid.rows
        for row in range(top // rows, -(-bottom // rows)):
            row_scales = _floats(scales[row])[column]
            check_scales(self.parts[1], row_scales)
            begin, end = (max(0, edge * rows - top) for edge in (row, row + 1))
            if zeros is not None:
                values[begin:end] -= zeros[row].astype(np.float32)[column]
            values[begin:end] *= row_scales
        return values


@dataclass(frozen=True)
class Numbers(PackedTensor):
    """The numbers of a matrix as they are stored."""

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        return arrays[0][tuple(slice(*bound) for bound in bounds)]


@dataclass(frozen=True)
class RowScales(PackedTensor):
    """The scales of a matrix, repeated for each row, [N, G]."""

    grid: Grid

    def check(self, arrays: Sequence[np.ndarray]) -> None:
        check_scales(self.parts[0], _floats(arrays[0]))

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        top, bottom = bounds[0]
        columns = slice(*bounds[1])
        scales = _blocks(arrays[0], self.shape, self.grid)
        row_scales = _floats(scales[np.arange(top, bottom) // self.grid.rows, columns])
        check_scales(self.parts[0], row_scales)
        return row_scales


@dataclass(frozen=True)
class RowOffsets(PackedTensor):
    """What is added to the products of numbers and scales, [N, G]: of `parts`, the scales and the
    numbers that stand for zero."""

    grid: Grid

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        rows = np.arange(*bounds[0]) // self.grid.rows
        columns = slice(*bounds[1])
        scales, zeros = (
            _blocks(array, self.shape, self.grid)[rows, columns].astype(np.float32)
            for array in arrays
        )
        return -zeros * scales


@dataclass(frozen=True)
class InputScale(PackedTensor):
    """The scale of a product's inputs, [1, 1]."""

    def check(self, arrays: Sequence[np.ndarray]) -> None:
        self.checked_whole(arrays)

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        scale = arrays[0].astype(np.float32).reshape(1, 1)
        check_scales(self.parts[0], scale)
        if not scale:  # which divides inputs
            raise ConfigError(
                f"{self.parts[0].name} is 0; scales of inputs are above 0: download or convert the "
                "checkpoint again"
            )
        return scale


def _floats(scales: np.ndarray) -> np.ndarray:
    """Scales in float32; one that is not a number stays so."""
    if scales.dtype == np.uint8:
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    return scales.astype(np.float32)


def _blocks(scales: np.ndarray, shape: tuple[int, ...], grid: Grid) -> np.ndarray:
    """Scales as they are for each block of rows and of columns."""
    return scales.reshape(-(-shape[0] // grid.rows), -(-shape[1] // grid.columns))


def matrices(stored: Mapping[str, Header], dtype: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and shapes of the weights that are matrices of this type."""
    for name, header in stored.items():
        if header.dtype == dtype and len(header.shape) == 2 and name.endswith(".weight"):
            rows, columns = header.shape
            yield name, (rows, columns)


def scaled_matrix(
    name: str,
    stored: Mapping[str, Header],
    scale: str,
    grid: Grid,
    input_scale: str | None = None,
    zero: str | None = None,
) -> ScaledMatrix:
    """The matrix `name` with the scales of the tensor `scale`, of its inputs with the scale of the
    tensor `input_scale`, and with the zero points of the tensor `zero`."""
    numbers = stored[name]
    blocks = (-(-numbers.shape[0] // grid.rows), -(-numbers.shape[1] // grid.columns))

    def part(tensor: str, wanted: tuple[int, ...], dtypes: tuple[str, ...]) -> PackedPart:
        shape = wanted
        if tensor in stored:
            shape = stored[tensor].shape
        # A shape that differs in axes of 1 alone holds the same numbers
        if [size for size in shape if size != 1] != [size for size in wanted if size != 1]:
            shape = wanted
        return PackedPart(tensor, shape, dtypes)

    parts = [PackedPart(name, numbers.shape, (numbers.dtype,)), part(scale, blocks, SCALES)]
    if input_scale is not None:
        parts.append(part(input_scale, (1,), FLOATS))
    if zero is not None:
        parts.append(part(zero, blocks, (numbers.dtype,)))
    return ScaledMatrix(name, numbers.shape, tuple(parts), grid, zero is not None)
