"""4-bit matrices as AutoAWQ writes them. The weight [N, K] is (number - zero point) · scale.

Version "gemm": `X.qweight` int32 [K, N / 8], `X.qzeros` int32 [K / group, N / 8], `X.scales`
[K / group, N]. Nibble j of a word is row (0, 2, 4, 6, 1, 3, 5, 7)[j] of its 8.

Version "gemv": `X.qweight` int32 [N, K / 8], `X.qzeros` int32 [N, W] and `X.scales` [N, 8 · W], low
nibbles first. W words are enough for all groups and a multiple of 2 for groups of 64 columns, of 4
for groups of 32; what fills them up is not read.

Feed-forwards without a gate have scales that divide what the activation gives, `act.scales` beside
the map that reads it. The columns of that map are divided by them, so it is held in plain numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
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
PLACE = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # the nibble of each row of a word
WORDS_ALIKE = MappingProxyType({64: 2, 32: 4})  # of zero points, by columns of a group


class Version(ABC):
    """How words lie."""

    @abstractmethod
    def shape(self, words: tuple[int, int]) -> tuple[int, int]:
        """N and K of a matrix of such words."""

    @abstractmethod
    def scales(self, shape: tuple[int, int], group: int) -> tuple[int, int]:
        """The shape of its scales, for groups of `group` columns."""

    @abstractmethod
    def zeros(self, shape: tuple[int, int], group: int) -> tuple[int, int]:
        """The shape of the words of its zero points."""

    @abstractmethod
    def rows(self, scales: np.ndarray, rows: slice) -> np.ndarray:
        """Scales of a range of rows, `[rows, ≥ G]`."""

    @abstractmethod
    def unpacked(self, words: np.ndarray, rows: slice, columns: slice) -> np.ndarray:
        """Numbers, or zero points of groups, within ranges, int32."""


class Gemm(Version):
    """Rows are packed, and turned."""

    def shape(self, words: tuple[int, int]) -> tuple[int, int]:
        return 8 * words[1], words[0]

    def scales(self, shape: tuple[int, int], group: int) -> tuple[int, int]:
        return -(-shape[1] // group), shape[0]

    def zeros(self, shape: tuple[int, int], group: int) -> tuple[int, int]:
        return -(-shape[1] // group), shape[0] // 8

    def rows(self, scales: np.ndarray, rows: slice) -> np.ndarray:
        return scales[:, rows].T

    def unpacked(self, words: np.ndarray, rows: slice, columns: slice) -> np.ndarray:
        first = rows.start // 8
        last = -(-rows.stop // 8)
        numbers = fields(words[columns], 4, (8 * first, 8 * last))
        ordered = numbers.reshape(len(numbers), -1, 8)[..., PLACE].reshape(len(numbers), -1)
        return ordered[:, rows.start - 8 * first : rows.stop - 8 * first].T


class Gemv(Version):
    """Columns are packed, and words of groups filled up."""

    def shape(self, words: tuple[int, int]) -> tuple[int, int]:
        return words[0], 8 * words[1]

    def scales(self, shape: tuple[int, int], group: int) -> tuple[int, int]:
        return shape[0], 8 * self.zeros(shape, group)[1]

    def zeros(self, shape: tuple[int, int], group: int) -> tuple[int, int]:
        words = -(-shape[1] // (8 * group))
        alike = WORDS_ALIKE.get(group, 1)
        return shape[0], -(-words // alike) * alike

    def rows(self, scales: np.ndarray, rows: slice) -> np.ndarray:
        return scales[rows]

    def unpacked(self, words: np.ndarray, rows: slice, columns: slice) -> np.ndarray:
        return fields(words[rows], 4, (columns.start, columns.stop))


GEMM = Gemm()
VERSIONS: Mapping[str, Version] = MappingProxyType({"gemm": GEMM, "gemv": Gemv()})


@dataclass(frozen=True)
class AwqMatrix(GroupedMatrix):
    """Parts: numbers, scales, zero points."""

    version: Version

    @property
    def count(self) -> int:
        """Groups of a row."""
        return -(-self.shape[1] // self.group)

    def numbers(self, arrays: Arrays, bounds: Bounds) -> np.ndarray:
        rows, columns = (slice(*bound) for bound in bounds)
        return self.version.unpacked(arrays[0], rows, columns)

    def scales(self, arrays: Arrays, rows: slice) -> np.ndarray:
        return self.version.rows(arrays[1], rows)[:, : self.count]

    def zeros(self, arrays: Arrays, rows: slice) -> np.ndarray:
        return self.version.unpacked(arrays[2], rows, slice(0, self.count))


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


@dataclass(frozen=True)
class Awq:
    """The scheme."""

    grouping: Grouping
    version: Version
    method = "awq"

    @property
    def title(self) -> str:
        return f"{self.method}: {self.grouping.title}"

    def usual(self, shape: tuple[int, ...]) -> WeightFormat | None:
        return self.grouping.usual(shape, symmetric=False)

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[AwqMatrix]:
        for name, header in stored.items():
            if not name.endswith(".qweight") or len(header.shape) != 2:
                continue
            module = name.removesuffix(".qweight")
            shape = self.version.shape(header.shape)
            group = self.grouping.group or shape[1]
            parts = [
                PackedPart(name, header.shape, I32),
                PackedPart(f"{module}.scales", self.version.scales(shape, group), FLOATS),
                PackedPart(f"{module}.qzeros", self.version.zeros(shape, group), I32),
            ]
            owner, _, leaf = module.rpartition(".")
            divided = leaf in BEHIND and (divisors := f"{owner}.{DIVISORS}") in stored
            if divided:
                parts.append(PackedPart(divisors, shape[1:], FLOATS))
            matrix_class = DividedMatrix if divided else AwqMatrix
            yield matrix_class(f"{module}.weight", shape, tuple(parts), 4, group, self.version)


def read(settings: Mapping[str, Any]) -> Awq:
    """The scheme of these settings. Raises ConfigError."""
    setting = settings.get("version") or "gemm"
    version = None
    if isinstance(setting, str):
        version = VERSIONS.get(setting.lower())
    if version is None:
        raise ConfigError(f"version is {setting!r:.40}; {' and '.join(VERSIONS)} are read")
    return Awq(read_grouping(settings, (4,)), version)
