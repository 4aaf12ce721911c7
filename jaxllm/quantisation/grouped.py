"""Matrices of few bits whose groups of columns share a scale and a zero point, packed into int32
words: what AWQ, GPTQ, compressed-tensors and auto-round have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxllm.config import ConfigError
from jaxllm.quantisation.int4_rows import row_bytes, rows_of
from jaxllm.quantisation.scheme import Bounds, Header, PackedPart, PackedTensor
from jaxllm.quantisation.weight_format import INT4, INT8, OFFSETS, SYMMETRIC, ZEROS, WeightFormat

I32 = ("I32",)
FLOATS = ("F16", "BF16", "F32")
WORD = 32  # bits
MIDDLE = 128  # the zero point of symmetric numbers of 8 bits

type Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class GroupedMatrix(PackedTensor):
    """A matrix [N, K]: (number - zero point) · scale.

    The first part has the numbers, the second the scales.

    Attributes:
        bits: of a number: 2, 3, 4 or 8.
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

    @property
    def symmetric(self) -> bool:
        """Whether all zero points are half of the range."""
        return False

    @property
    def ordered(self) -> bool:
        """Whether the settings say that groups follow each other."""
        return True

    def groups(self, arrays: Arrays, columns: slice) -> np.ndarray:
        """The group of each column."""
        return np.arange(columns.start, columns.stop) // self.group

    @property
    def format(self) -> WeightFormat | None:
        group = None
        if self.group < self.shape[1]:
            group = self.group
        weight_format = _held(self.bits, group, self.symmetric)
        return weight_format and replace(weight_format, ordered=self.ordered)

    def leaves(self) -> tuple[PackedTensor, ...]:
        assert self.format is not None
        if self.ordered:
            return self._leaves(self.format)
        order = ColumnOrder(f"{self.name}.order", (1, self.shape[1]), self.parts, self)
        return (*self._leaves(self.format), order)

    def _leaves(self, weight_format: WeightFormat) -> tuple[PackedTensor, ...]:
        if weight_format.numbers == INT8:
            scales = (self.shape[0], -(-self.shape[1] // self.group))
            leaves = (
                Int8Numbers(f"{self.name}.values", self.shape, self.parts, self),
                Int8Scales(f"{self.name}.scale", scales, self.parts, self),
            )
            if self.symmetric:
                return leaves
            return (*leaves, Int8Offsets(f"{self.name}.offset", scales, self.parts, self))
        shape = (self.shape[0], row_bytes(weight_format, self.shape[1]))
        return (Int4Rows(f"{self.name}.rows", shape, self.parts, self),)

    def checked_scales(self, arrays: Arrays, rows: slice) -> np.ndarray:
        """Scales in float32. Raises ConfigError for one that is not finite."""
        scales = self.scales(arrays, rows).astype(np.float32)
        if not np.isfinite(scales).all():
            raise ConfigError(
                f"{self.parts[1].name} has the scale {scales[~np.isfinite(scales)][0]}; scales are "
                "finite: download or convert the checkpoint again"
            )
        return scales

    def order(self, arrays: Arrays) -> np.ndarray:
        """The columns by their groups. Raises ConfigError where groups have other columns than the
        settings say."""
        columns = self.shape[1]
        groups = self.groups(arrays, slice(0, columns))
        wanted = np.arange(columns) // self.group
        if self.ordered:
            order = np.arange(columns)
        else:
            order = np.argsort(groups, kind="stable")
        if np.array_equal(groups[order], wanted):
            return order
        if self.ordered:
            raise ConfigError(
                f"{self.parts[-1].name} has groups in another order than the settings say; "
                "set desc_act to true in quantization_config"
            )
        raise ConfigError(
            f"{self.parts[-1].name} has groups of other sizes than {self.group} columns: download "
            "or convert the checkpoint again"
        )

    def by_group(self, arrays: Arrays, rows: tuple[int, int]) -> np.ndarray:
        """Numbers of rows, their columns in the order of groups."""
        return self.numbers(arrays, (rows, (0, self.shape[1])))[:, self.order(arrays)]

    def check(self, arrays: Arrays) -> None:
        self.checked_scales(arrays, slice(0, self.shape[0]))
        self.groups(arrays, slice(0, self.shape[1]))

    def unpack(self, arrays: Arrays, bounds: Bounds) -> np.ndarray:
        rows, columns = (slice(*bound) for bound in bounds)
        scales = self.checked_scales(arrays, rows)
        group = self.groups(arrays, columns)
        numbers = self.numbers(arrays, bounds) - self.zeros(arrays, rows)[:, group]
        return numbers.astype(np.float32) * scales[:, group]


@dataclass(frozen=True)
class Int4Rows(PackedTensor):
    """A matrix of 4 bits as the bytes of its rows, see `int4_rows`."""

    matrix: GroupedMatrix

    def check(self, arrays: Arrays) -> None:
        self.matrix.check(arrays)
        self.matrix.order(arrays)

    def unpack(self, arrays: Arrays, bounds: Bounds) -> np.ndarray:
        matrix = self.matrix
        rows = slice(*bounds[0])
        zeros = None
        if not matrix.symmetric:
            zeros = matrix.zeros(arrays, rows)
        return rows_of(
            matrix.by_group(arrays, bounds[0]), matrix.checked_scales(arrays, rows), zeros
        )[:, slice(*bounds[1])]


@dataclass(frozen=True)
class Int8Numbers(PackedTensor):
    """The numbers of a matrix of 8 bits, around zero."""

    matrix: GroupedMatrix

    def unpack(self, arrays: Arrays, bounds: Bounds) -> np.ndarray:
        numbers = self.matrix.by_group(arrays, bounds[0])[:, slice(*bounds[1])]
        return (numbers - MIDDLE).astype(np.int8)


@dataclass(frozen=True)
class ColumnOrder(PackedTensor):
    """The columns by their groups, int32 [1, K]."""

    matrix: GroupedMatrix

    def unpack(self, arrays: Arrays, bounds: Bounds) -> np.ndarray:
        return self.matrix.order(arrays).astype(np.int32)[None][tuple(slice(*b) for b in bounds)]


@dataclass(frozen=True)
class Int8Scales(PackedTensor):
    """The scales of a matrix of 8 bits, [N, G]."""

    matrix: GroupedMatrix

    def check(self, arrays: Arrays) -> None:
        self.matrix.check(arrays)
        self.matrix.order(arrays)
        self.checked_whole(arrays)

    def unpack(self, arrays: Arrays, bounds: Bounds) -> np.ndarray:
        rows, columns = (slice(*bound) for bound in bounds)
        zeros = self.matrix.zeros(arrays, rows)
        if self.matrix.symmetric and (zeros != MIDDLE).any():
            raise ConfigError(
                f"{self.parts[2].name} has the zero point {zeros[zeros != MIDDLE][0]}, and "
                f"symmetric numbers have {MIDDLE}; set sym to false in quantization_config"
            )
        return self.matrix.checked_scales(arrays, rows)[:, columns]


@dataclass(frozen=True)
class Int8Offsets(PackedTensor):
    """What is added to the products of numbers and scales of a matrix of 8 bits, [N, G]."""

    matrix: GroupedMatrix

    def unpack(self, arrays: Arrays, bounds: Bounds) -> np.ndarray:
        rows, columns = (slice(*bound) for bound in bounds)
        scales = self.matrix.checked_scales(arrays, rows)
        zeros = self.matrix.zeros(arrays, rows)
        return ((MIDDLE - zeros).astype(np.float32) * scales)[:, columns]


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
        columns = "rows"
        if self.group is not None:
            columns = f"{self.group} columns"
        return f"{self.bits} bits with scales of {columns}"

    def usual(self, shape: tuple[int, ...], symmetric: bool) -> WeightFormat | None:
        """What a matrix of this shape is held in."""
        if len(shape) != 2:
            return None
        group = None
        if self.group is not None and self.group < shape[1]:
            group = self.group
        return _held(self.bits, group, symmetric)

    def bits_of(self, columns: int, words: int) -> int:
        """Bits of a number, where the numbers of `columns` columns take `words` words."""
        if self.mixed and columns:
            return words * WORD // columns
        return self.bits

    def group_of(self, columns: int, groups: int) -> int:
        """Columns of a group, where `groups` groups are stored for `columns` columns."""
        group = self.group or columns
        if self.mixed and groups and -(-columns // group) != groups:
            return -(-columns // groups)
        return group


def _held(bits: int, group: int | None, symmetric: bool) -> WeightFormat | None:
    """What holds such numbers: those of fewer bits are numbers of 4, with zero points of their
    own."""
    if bits == 8:
        return WeightFormat(INT8, group, form=SYMMETRIC if symmetric else OFFSETS)
    if bits > 4 or (symmetric and bits < 4):
        return None
    return WeightFormat(INT4, group, form=SYMMETRIC if symmetric else ZEROS)


def read_grouping(
    settings: Mapping[str, Any], bits: tuple[int, ...], mixed: str | None = None
) -> Grouping:
    """The settings `bits` and `group_size`; `mixed` is where others for some modules stand. Raises
    ConfigError unless `bits` has the number."""
    count = settings.get("bits", settings.get("w_bit"))
    if type(count) is not int or count not in bits:
        raise ConfigError(f"bits is {count!r:.40}; {bits_read(bits)}")
    size = settings.get("group_size", settings.get("q_group_size"))
    if type(size) is not int or size < -1 or size == 0:
        raise ConfigError(
            f"group_size is {size!r:.40}; a positive integer is expected, or -1 for all columns"
        )
    return Grouping(count, None if size == -1 else size, bool(mixed and settings.get(mixed)))


def bits_read(bits: tuple[int, ...]) -> str:
    """What runs, and what to do about other numbers of bits."""
    known = " or ".join(map(str, bits))
    return (
        f"{known} are read: take a checkpoint of these, or plain weights with --quantization int4"
    )


def fields(words: np.ndarray, bits: int, bound: tuple[int, int]) -> np.ndarray:
    """The numbers of a range along the last axis, whose words hold the low bits first; int32.
    Numbers whose bits do not divide a word's go on in the next."""
    if WORD % bits:
        return _crossing(words, bits, bound)
    per_word = WORD // bits
    low, high = bound
    first = low // per_word
    needed = np.ascontiguousarray(words[..., first : -(-high // per_word)]).view(np.uint32)
    shifts = np.arange(0, WORD, bits, dtype=np.uint32)
    numbers = (needed[..., None] >> shifts & np.uint32((1 << bits) - 1)).astype(np.int32)
    return numbers.reshape(*needed.shape[:-1], -1)[
        ..., low - first * per_word : high - first * per_word
    ]


def _crossing(words: np.ndarray, bits: int, bound: tuple[int, int]) -> np.ndarray:
    bit = np.arange(*bound) * bits
    word = bit // WORD
    shift = (bit % WORD).astype(np.uint64)
    low, high = (
        words[..., np.minimum(place, words.shape[-1] - 1)].view(np.uint32).astype(np.uint64)
        for place in (word, word + 1)
    )
    pair = low | high << np.uint64(WORD)
    return (pair >> shift & np.uint64((1 << bits) - 1)).astype(np.int32)


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
    header = stored.get(name)
    if header is not None and len(header.shape) == 2:
        return header.shape[axis]
    return 0
