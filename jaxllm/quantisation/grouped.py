"""Matrices of few bits whose groups of columns share a scale and a zero point, packed into int32
words: what AWQ, GPTQ, compressed-tensors and auto-round have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.config import ConfigError
from jaxllm.quantisation.scheme import Bounds, Header, PackedPart, PackedTensor

I32, FLOATS = ("I32",), ("F16", "BF16", "F32")
WORD = 32  # bits

type Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class GroupedMatrix(PackedTensor):
    """A matrix [N, K]: (number - zero point) · scale.

    The first part has the numbers, the second the scales.

    Attributes:
        bits: of a number: 2, 4 or 8.
        group: columns that share a scale, in order; a format may say otherwise.
    """

    bits: int
    group: int

    @abstractmethod
    def numbers(self, arrays: Arrays, bounds: Bounds) -> np.ndarray:
        """What is stored within `bounds`, from 0 on, int32."""

    @abstractmethod
    def scales(self, arrays: Arrays, rows: slice) -> np.ndarray:
        """`[rows, G]`, of the stored type."""

    @abstractmethod
    def zeros(self, arrays: Arrays, rows: slice) -> np.ndarray:
        """Zero points `[rows, G]`, int32."""

    def groups(self, arrays: Arrays, columns: slice) -> np.ndarray:
        """The group of each column."""
        return np.arange(columns.start, columns.stop) // self.group

    def unpack(self, arrays: Arrays, bounds: Bounds) -> np.ndarray:
        rows, columns = (slice(*bound) for bound in bounds)
        scales = self.scales(arrays, rows).astype(np.float32)
        if not np.isfinite(scales).all():
            raise ConfigError(
                f"{self.parts[1].name} has the scale {scales[~np.isfinite(scales)][0]}; scales are "
                "finite: download or convert the checkpoint again"
            )
        group = self.groups(arrays, columns)
        numbers = self.numbers(arrays, bounds) - self.zeros(arrays, rows)[:, group]
        return numbers.astype(np.float32) * scales[:, group]


@dataclass(frozen=True)
class Grouping:
    """What settings say of all matrices.

    Attributes:
        bits: of a number.
        group: columns that share a scale; None: all of them.
        mixed: some modules have other bits or groups, which the shapes of their tensors tell.
    """

    bits: int
    group: int | None
    mixed: bool = False

    @property
    def title(self) -> str:
        columns = "rows" if self.group is None else f"{self.group} columns"
        return f"{self.bits} bits with scales of {columns}"

    def bits_of(self, columns: int, words: int) -> int:
        """Bits of a number, so many of which take so many words."""
        return words * WORD // columns if self.mixed and columns else self.bits

    def group_of(self, columns: int, groups: int) -> int:
        """Columns of a group, where so many are stored."""
        if self.mixed and groups:
            return -(-columns // groups)
        return self.group or columns


def read_grouping(
    settings: Mapping[str, Any], bits: tuple[int, ...], mixed: str | None = None
) -> Grouping:
    """The settings `bits` and `group_size`; `mixed` is where others for some modules stand. Raises
    ConfigError unless `bits` has the number."""
    count = settings.get("bits", settings.get("w_bit"))
    if type(count) is not int or count not in bits:
        known = " or ".join(map(str, bits))
        raise ConfigError(f"bits is {count!r:.40}; {known} are read")
    size = settings.get("group_size", settings.get("q_group_size"))
    if type(size) is not int or size < -1 or size == 0:
        raise ConfigError(
            f"group_size is {size!r:.40}; a positive integer is expected, or -1 for all columns"
        )
    return Grouping(count, None if size == -1 else size, bool(mixed and settings.get(mixed)))


def fields(words: np.ndarray, bits: int, bound: tuple[int, int]) -> np.ndarray:
    """The numbers of a range along the last axis, whose words hold the low bits first; int32."""
    each, (low, high) = WORD // bits, bound
    first = low // each
    own = np.ascontiguousarray(words[..., first : -(-high // each)]).view(np.uint32)
    shifts = np.arange(0, WORD, bits, dtype=np.uint32)
    found = (own[..., None] >> shifts & np.uint32((1 << bits) - 1)).astype(np.int32)
    return found.reshape(*own.shape[:-1], -1)[..., low - first * each : high - first * each]


def checked_groups(part: PackedPart, groups: np.ndarray, count: int) -> np.ndarray:
    """The groups of columns that a checkpoint gives. Raises ConfigError for one that has no
    scale."""
    if groups.size and not 0 <= groups.min() <= groups.max() < count:
        wrong = groups[(groups < 0) | (groups >= count)][0]
        raise ConfigError(
            f"{part.name} has the group {wrong}; there are {count}: download or convert the "
            "checkpoint again"
        )
    return groups


def size(stored: Mapping[str, Header], name: str, axis: int) -> int:
    """Entries of a stored matrix along an axis; 0 where there is none of that name."""
    found = stored.get(name)
    return found.shape[axis] if found is not None and len(found.shape) == 2 else 0
