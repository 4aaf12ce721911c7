"""4-bit matrices as AutoAWQ writes them (version "gemm").

`X.qweight` int32 [K, N / 8], `X.qzeros` int32 [K / group, N / 8], `X.scales` [K / group, N]. Nibble
j of a word is column (0, 2, 4, 6, 1, 3, 5, 7)[j] of its 8. The weight [N, K] is
(number - zero point) · scale.

Feed-forwards without a gate have scales that divide what the activation gives, `act.scales` beside
the map that reads it. The columns of that map are divided by them, so it is held in plain numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.config import ConfigError
from jaxllm.quantisation.grouped import (
    FLOATS,
    I32,
    Arrays,
    GroupedMatrix,
    Grouping,
    fields,
    read_grouping,
)
from jaxllm.quantisation.scheme import Bounds, Header, PackedPart
from jaxllm.quantisation.weight_format import WeightFormat

DIVISORS = "act.scales"
BEHIND = ("dense_4h_to_h", "c_proj")  # maps that read an activation with such scales
PLACE = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # the nibble of each column of a word


@dataclass(frozen=True)
class AwqMatrix(GroupedMatrix):
    """Parts: numbers, scales, zero points."""

    def numbers(self, arrays: Arrays, bounds: Bounds) -> np.ndarray:
        rows, columns = bounds
        return _columns(arrays[0][slice(*columns)], rows).T

    def scales(self, arrays: Arrays, rows: slice) -> np.ndarray:
        return arrays[1][:, rows].T

    def zeros(self, arrays: Arrays, rows: slice) -> np.ndarray:
        return _columns(arrays[2], (rows.start, rows.stop)).T


@dataclass(frozen=True)
class DividedMatrix(AwqMatrix):
    """Parts: those of the matrix, and what its columns are divided by."""

    @property
    def format(self) -> WeightFormat | None:
        return None

    def check(self, arrays: Arrays) -> None:
        super().check(arrays)
        divisors = arrays[3].astype(np.float32)
        if wrong := divisors[~(np.isfinite(divisors) & (divisors != 0))].tolist():
            raise ConfigError(
                f"{self.parts[3].name} has the scale {wrong[0]}; such scales are finite and not 0: "
                "download or convert the checkpoint again"
            )

    def unpack(self, arrays: Arrays, bounds: Bounds) -> np.ndarray:
        divisors = arrays[3][slice(*bounds[1])].astype(np.float32)
        return np.asarray(super().unpack(arrays, bounds) / divisors)


def _columns(words: np.ndarray, bound: tuple[int, int]) -> np.ndarray:
    """The numbers of a range of columns."""
    first, last = bound[0] // 8, -(-bound[1] // 8)
    found = fields(words, 4, (8 * first, 8 * last)).reshape(len(words), -1, 8)[..., PLACE]
    return found.reshape(len(words), -1)[:, bound[0] - 8 * first : bound[1] - 8 * first]


@dataclass(frozen=True)
class Awq:
    """The scheme."""

    grouping: Grouping
    method = "awq"

    @property
    def title(self) -> str:
        return f"{self.method}: {self.grouping.title}"

    def usual(self, shape: tuple[int, ...]) -> WeightFormat | None:
        return self.grouping.usual(shape, symmetric=False)

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[AwqMatrix]:
        for name, found in stored.items():
            if not name.endswith(".qweight") or len(found.shape) != 2:
                continue
            module, (columns, words) = name.removesuffix(".qweight"), found.shape
            group = self.grouping.group or columns
            groups = -(-columns // group)
            parts = [
                PackedPart(name, found.shape, I32),
                PackedPart(f"{module}.scales", (groups, 8 * words), FLOATS),
                PackedPart(f"{module}.qzeros", (groups, words), I32),
            ]
            owner, _, own = module.rpartition(".")
            divided = own in BEHIND and (divisors := f"{owner}.{DIVISORS}") in stored
            if divided:
                parts.append(PackedPart(divisors, (columns,), FLOATS))
            kind = DividedMatrix if divided else AwqMatrix
            yield kind(f"{module}.weight", (8 * words, columns), tuple(parts), 4, group)


def read(settings: Mapping[str, Any]) -> Awq:
    """The scheme of these settings. Raises ConfigError."""
    version = settings.get("version") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise ConfigError(f"version is {version!r:.40}; gemm is read")
    return Awq(read_grouping(settings, (4,)))
