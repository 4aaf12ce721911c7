"""Matrices of GGUF files whose blocks are integers in groups of columns. The source unpacks all
other blocks before anything else sees them.

It names the integers `X.weight.integers` [N, K], of the type I8, I4 (-8 to 7) or U4 (0 to 15),
their scales `X.weight.scales` [N, G] and, beside U4, what is added, `X.weight.offsets` [N, G].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.quantisation.int4_rows import row_bytes, rows_of
from jaxllm.quantisation.scheme import Bounds, Header, PackedPart, PackedTensor
from jaxllm.quantisation.weight_format import INT4, INT8, OFFSETS, SYMMETRIC, WeightFormat

PARTS = INTEGERS, SCALES, ADDED = ".integers", ".scales", ".offsets"
I8, I4, U4 = TYPES = ("I8", "I4", "U4")
MIDDLE = 8  # of the integers that INT4 holds


@dataclass(frozen=True)
class IntegerMatrix(PackedTensor):
    """A matrix whose `parts` are the integers, the scales and, beside U4, the offsets."""

    @property
    def integers(self) -> str:
        """The type of the integers."""
        return self.parts[0].dtypes[0]

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[1] // self.parts[1].shape[1]

    @property
    def format(self) -> WeightFormat:
        group = self.group if self.group < self.shape[1] else None
        if self.integers == I8:
            return WeightFormat(INT8, group)
        return WeightFormat(INT4, group, form=OFFSETS if self.integers == U4 else SYMMETRIC)

    def leaves(self) -> tuple[PackedTensor, ...]:
        if self.integers == I8:
            suffixes = (".values", ".scale")
            pairs = zip(suffixes, self.parts, strict=True)
            return tuple(Part(self.name + suffix, own.shape, (own,)) for suffix, own in pairs)
        shape = (self.shape[0], row_bytes(self.format, self.shape[1]))
        return (Int4Rows(f"{self.name}.rows", shape, self.parts),)

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        rows, (left, right) = slice(*bounds[0]), bounds[1]
        first, group = left // self.group, self.group
        columns = np.arange(left, right) // group - first
        values = np.asarray(arrays[0][rows, left:right]).astype(np.float32)
        scales, *offsets = (
            np.asarray(part[rows, first : -(-right // group)])[:, columns] for part in arrays[1:]
        )
        return values * scales + offsets[0] if offsets else values * scales


@dataclass(frozen=True)
class Part(PackedTensor):
    """One of the parts as it is."""

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        return np.asarray(arrays[0][tuple(slice(*each) for each in bounds)])


@dataclass(frozen=True)
class Int4Rows(PackedTensor):
    """A matrix of 4 bits as the bytes of its rows, see `int4_rows`."""

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        numbers, scales, *offsets = (np.asarray(part[slice(*bounds[0])]) for part in arrays)
        unsigned = numbers if offsets else numbers + np.int8(MIDDLE)
        return rows_of(unsigned, scales, offsets[0] if offsets else None)[:, slice(*bounds[1])]


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
        for name, found in stored.items():
            if not name.endswith(INTEGERS) or found.dtype not in TYPES:
                continue
            own = name.removesuffix(INTEGERS)
            others = PARTS[1:] if found.dtype == U4 else (SCALES,)
            parts = [PackedPart(own + each, stored[own + each].shape, ("F32",)) for each in others]
            integers = PackedPart(name, found.shape, (found.dtype,))
            yield IntegerMatrix(own, found.shape, (integers, *parts))


def read(settings: Mapping[str, Any]) -> Gguf:
    """The scheme of these settings."""
    return Gguf(f"{settings.get('types', 'types of its own'):.200}")
