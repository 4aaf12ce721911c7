"""Matrices of GGUF files, whose blocks are numbers of few bits in groups of columns.

The source names the numbers `X.weight.integers` [N, K], of the type I8, I4 (-8 to 7), U4 (0 to 15),
U5 (0 to 31), F4 or N4 (places in a table); their scales `X.weight.scales` [N, G] and, beside U4 and
U5, what is added, `X.weight.offsets` [N, G]. Where a checkpoint has one tensor of all experts, they
have an axis of these before, and a tensor X without ".weight" is [E, K, N].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.gguf.types import F4, I4, I8, N4, OFFSETS, TABLES, U4, U5
from jaxllm.quantisation import weight_format
from jaxllm.quantisation.int4_rows import row_bytes, rows_of
from jaxllm.quantisation.scheme import Bounds, Header, PackedPart, PackedTensor
from jaxllm.quantisation.weight_format import (
    FLOAT16,
    FLOAT32,
    FP4,
    INT4,
    INT8,
    IQ4,
    SYMMETRIC,
    WeightFormat,
)

PARTS = INTEGERS, SCALES, ADDED = ".integers", ".scales", ".offsets"
NUMBERS = {I8: INT8, U5: INT8, I4: INT4, U4: INT4, F4: FP4, N4: IQ4}  # that hold them
# What the numbers that hold them have more, and how many times their scales
MORE = {I4: 8, U5: -16}
TIMES = {F4: 2}


@dataclass(frozen=True)
class GroupedNumbers(PackedTensor):
    """A matrix [N, K], or those of experts [E, N, K] or [E, K, N], whose `parts` are the numbers,
    the scales and, beside some, the offsets."""

    @property
    def kind(self) -> str:
        """The type of the numbers."""
        return self.parts[0].dtypes[0]

    @property
    def turned(self) -> bool:
        return is_turned(self.name, self.shape)

    @property
    def columns(self) -> int:
        return self.parts[0].shape[-1]

    @property
    def format(self) -> WeightFormat:
        group = self.columns // self.parts[1].shape[-1]
        if self.kind in OFFSETS:
            form = weight_format.OFFSETS
        else:
            form = SYMMETRIC
        numbers = NUMBERS[self.kind]
        stored_group = None
        if group < self.columns:
            stored_group = group
        if numbers == INT8:
            scales = FLOAT16
        else:
            scales = FLOAT32
        return WeightFormat(numbers, stored_group, form=form, scales=scales)

    def leaves(self) -> tuple[PackedTensor, ...]:
        numbers, scales, *_ = self.parts
        if NUMBERS[self.kind] != INT8:
            shape = (*numbers.shape[:-1], row_bytes(self.format, self.columns))
            return (Rows(f"{self.name}.rows", shape, self.parts),)
        leaves: list[PackedTensor] = [
            Integers(f"{self.name}.values", numbers.shape, (numbers,)),
            Part(f"{self.name}.scale", scales.shape, (scales,)),
        ]
        if self.kind in OFFSETS:
            leaves.append(Moved(f"{self.name}.offset", scales.shape, self.parts))
        return tuple(leaves)

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        *rows, (left, right) = bounds
        if self.turned:
            rows[1], (left, right) = (left, right), rows[1]
        index = tuple(slice(*bound) for bound in rows)
        group = self.columns // self.parts[1].shape[-1]
        first = left // group
        columns = np.arange(left, right) // group - first
        numbers = np.asarray(arrays[0][(*index, slice(left, right))])
        if self.kind in TABLES:
            stands = TABLES[self.kind][numbers]
        else:
            stands = numbers
        scales, *offsets = (
            np.asarray(part[(*index, slice(first, -(-right // group)))])[..., columns]
            for part in arrays[1:]
        )
        values = stands.astype(np.float32) * scales
        if offsets:
            shifted = values + offsets[0]
        else:
            shifted = values
        if self.turned:
            return shifted.swapaxes(1, 2)
        return shifted


@dataclass(frozen=True)
class Part(PackedTensor):
    """One of the parts as it is."""

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        return np.asarray(arrays[0][tuple(slice(*bound) for bound in bounds)])


@dataclass(frozen=True)
class Integers(PackedTensor):
    """Numbers as integers of 8 bits around zero."""

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        integers = np.asarray(arrays[0][tuple(slice(*bound) for bound in bounds)]).astype(np.int8)
        return integers + np.int8(MORE.get(self.parts[0].dtypes[0], 0))


@dataclass(frozen=True)
class Moved(PackedTensor):
    """The offsets of integers around zero."""

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        index = tuple(slice(*bound) for bound in bounds)
        scales, offsets = (np.asarray(part[index]) for part in arrays[1:])
        return offsets - np.float32(MORE[self.parts[0].dtypes[0]]) * scales


@dataclass(frozen=True)
class Rows(PackedTensor):
    """Numbers of 4 bits as the bytes of their rows, see `int4_rows`."""

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        index = tuple(slice(*bound) for bound in bounds[:-1])
        dtype = self.parts[0].dtypes[0]
        numbers, scales, *offsets = (np.asarray(part[index]) for part in arrays)
        flat = [array.reshape(-1, array.shape[-1]) for array in (numbers, scales, *offsets)]
        flat[0] = flat[0].astype(np.int8) + np.int8(MORE.get(dtype, 0))
        flat[1] = flat[1] * np.float32(TIMES.get(dtype, 1))
        rows = rows_of(*flat, *([] if offsets else [None]))
        return rows.reshape(*numbers.shape[:-1], -1)[..., slice(*bounds[-1])]


@dataclass(frozen=True)
class Gguf:
    """The scheme; `types` are those of the file's blocks with their shares."""

    types: str
    method = "gguf"

    @property
    def title(self) -> str:
        return f"GGUF ({self.types})"

    def usual(self, shape: tuple[int, ...]) -> WeightFormat | None:
        return None

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[PackedTensor]:
        for name, header in stored.items():
            if not name.endswith(INTEGERS) or header.dtype not in NUMBERS:
                continue
            module = name.removesuffix(INTEGERS)
            shape = header.shape
            others = PARTS[1:] if header.dtype in OFFSETS else (SCALES,)
            parts = [
                PackedPart(module + leaf, stored[module + leaf].shape, ("F32",)) for leaf in others
            ]
            integers = PackedPart(name, shape, (header.dtype,))
            plain = (shape[0], shape[2], shape[1]) if is_turned(module, shape) else shape
            yield GroupedNumbers(module, plain, (integers, *parts))


def is_turned(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of all experts is [E, in, out]."""
    return len(shape) > 2 and not name.endswith(".weight")


def read(settings: Mapping[str, Any]) -> Gguf:
    """The scheme of these settings."""
    return Gguf(f"{settings.get('types', 'types of its own'):.200}")
