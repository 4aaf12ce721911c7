"""Matrices of GGUF files whose blocks are integers of 8 bits times the scales of their groups. The
source unpacks all other blocks before anything else sees them.

It names the integers `X.weight.integers` [N, K] and the scales `X.weight.scales` [N, K / group].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.quantisation.scheme import Bounds, Header, PackedPart, PackedTensor
from jaxllm.quantisation.weight_format import INT8, WeightFormat

INTEGERS, SCALES = ".weight.integers", ".weight.scales"


@dataclass(frozen=True)
class IntegerMatrix(PackedTensor):
    """A matrix whose `parts` are the integers and the scales."""

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[1] // self.parts[1].shape[1]

    @property
    def format(self) -> WeightFormat:
        return WeightFormat(INT8, self.group if self.group < self.shape[1] else None)

    def leaves(self) -> tuple[PackedTensor, ...]:
        integers, scales = self.parts
        return (
            Part(f"{self.name}.values", integers.shape, (integers,)),
            Part(f"{self.name}.scale", scales.shape, (scales,)),
        )

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        rows, (left, right) = slice(*bounds[0]), bounds[1]
        first, group = left // self.group, self.group
        integers = np.asarray(arrays[0][rows, left:right]).astype(np.float32)
        scales = np.asarray(arrays[1][rows, first : -(-right // group)])
        return integers * scales[:, np.arange(left, right) // group - first]


@dataclass(frozen=True)
class Part(PackedTensor):
    """One of the parts as it is."""

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        return np.asarray(arrays[0][tuple(slice(*each) for each in bounds)])


@dataclass(frozen=True)
class Gguf:
    """The scheme; `types` are those of the file's blocks with their shares."""

    types: str
    method = "gguf"

    @property
    def title(self) -> str:
        return f"GGUF ({self.types})"

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[PackedTensor]:
        for name, found in stored.items():
            if not name.endswith(INTEGERS):
                continue
            owner = name.removesuffix(INTEGERS)
            scales = stored[owner + SCALES].shape
            parts = (
                PackedPart(name, found.shape, ("I8",)),
                PackedPart(owner + SCALES, scales, ("F32",)),
            )
            yield IntegerMatrix(f"{owner}.weight", found.shape, parts)


def read(settings: Mapping[str, Any]) -> Gguf:
    """The scheme of these settings."""
    return Gguf(f"{settings.get('types', 'types of its own'):.200}")
