"""Matrices that compressed-tensors stores in the format "pack-quantized": 4 or 8 bits. Inputs of
those of 4 bits may be rounded to 8, with a scale for each token.

`X.weight_packed` int32 [N, ⌈K · bits / 32⌉] holds the low bits first; `X.weight_scale`
[N, groups]; `X.weight_shape` is [N, K]; `X.weight_zero_point` int32 [⌈N · bits / 32⌉, groups] is
packed along N; `X.weight_g_idx` int32 [K] has the group of each column. Numbers and zero points are
signed and stored with half their range added, so the weight is (number - zero point) · scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxllm.config import ConfigError
from jaxllm.quantisation.grouped import (
    FLOATS,
    I32,
    WORD,
    Arrays,
    GroupedMatrix,
    Grouping,
    bits_read,
    checked_groups,
    fields,
    size,
)
from jaxllm.quantisation.scheme import Bounds, Header, PackedPart, Stored
from jaxllm.quantisation.weight_format import FP8, INT8, WeightFormat

BITS = (4, 8)
PACKED = "weight_packed"
SCALE = "weight_scale"
SHAPE = "weight_shape"
OPTIONAL = ("weight_zero_point", "weight_g_idx")
TYPES = {"int": INT8, "float": FP8}  # of rounded inputs
STRATEGIES = ("tensor", "token")  # of scales found at run time, which are those of tokens
SHUFFLED = ("true", "group", "dynamic")  # values of actorder that leave groups in no order
UNKNOWN = -1  # in `weight_g_idx`, which then says nothing


@dataclass(frozen=True)
class CompressedMatrix(GroupedMatrix):
    """What matrices of compressed-tensors have beside their numbers.

    Attributes:
        inputs: numbers that inputs are rounded to; None: they stay as they are.
    """

    inputs: str | None = None

    @property
    def format(self) -> WeightFormat | None:
        return with_inputs(super().format, self.inputs)


@dataclass(frozen=True)
class PackedMatrix(CompressedMatrix):
    """Parts: numbers, scales, the shape, then those of `OPTIONAL` that there are."""

    @property
    def symmetric(self) -> bool:
        return not self._has(OPTIONAL[0])

    @property
    def ordered(self) -> bool:
        return not self._has(OPTIONAL[1])

    def check(self, arrays: Arrays) -> None:
        super().check(arrays)
        self._check_shape(arrays)

    def numbers(self, arrays: Arrays, bounds: Bounds) -> np.ndarray:
        self._check_shape(arrays)
        rows, columns = bounds
        return fields(arrays[0][slice(*rows)], self.bits, columns)

    def _check_shape(self, arrays: Arrays) -> None:
        if tuple(arrays[2].tolist()) != self.shape:
            raise ConfigError(
                f"{self.parts[2].name} is {arrays[2].tolist()}, the numbers have the shape "
                f"{list(self.shape)}: download or convert the checkpoint again"
            )

    def scales(self, arrays: Arrays, rows: slice) -> np.ndarray:
        return arrays[1][rows]

    def zeros(self, arrays: Arrays, rows: slice) -> np.ndarray:
        stored = self._optional(arrays, OPTIONAL[0])
        if stored is None:
            shape = (rows.stop - rows.start, arrays[1].shape[1])
            return np.full(shape, 1 << (self.bits - 1), np.int32)
        return fields(stored.T, self.bits, (rows.start, rows.stop)).T

    def groups(self, arrays: Arrays, columns: slice) -> np.ndarray:
        stored = self._optional(arrays, OPTIONAL[1])
        if stored is None or (stored == UNKNOWN).all():
            return super().groups(arrays, columns)
        return checked_groups(self.parts[-1], stored[columns], arrays[1].shape[1])

    def _has(self, leaf: str) -> bool:
        return any(part.name.endswith(leaf) for part in self.parts)

    def _optional(self, arrays: Arrays, leaf: str) -> np.ndarray | None:
        arrays_of_leaf = (
            a for p, a in zip(self.parts, arrays, strict=True) if p.name.endswith(leaf)
        )
        return next(arrays_of_leaf, None)


@dataclass(frozen=True)
class Packing(Grouping):
    """The settings of a group of modules.

    Attributes:
        leaves: those of `OPTIONAL` that its matrices have.
    """

    leaves: tuple[str, ...] = ()


@dataclass(frozen=True)
class PackQuantized:
    """The scheme: the settings of each group of modules, and the numbers that inputs of all are
    rounded to, None for none."""

    groupings: tuple[Packing, ...]
    inputs: str | None = None
    method = "compressed-tensors"

    @property
    def title(self) -> str:
        weights = ", ".join(grouping.title for grouping in self.groupings)
        if self.inputs is None:
            return weights
        return f"{weights}, inputs in {self.inputs}"

    def usual(self, shape: tuple[int, ...]) -> WeightFormat | None:
        return with_inputs(self.groupings[0].usual(shape, symmetric=True), self.inputs)

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[PackedMatrix]:
        for name, header in stored.items():
            if not name.endswith(f".{PACKED}") or len(header.shape) != 2 or header.dtype == "U8":
                continue  # 4-bit floats are bytes
            module = name.removesuffix(f".{PACKED}")
            rows, words = header.shape
            groups = size(stored, f"{module}.{SCALE}", 1)
            known = _columns(f"{module}.{SHAPE}", stored)
            fitting = self._fitting(words, groups, known)
            bits = fitting[0].bits
            columns = words * WORD // bits
            if known is not None and -(-known * bits // WORD) == words:
                columns = known
            group = fitting[0].group or columns
            count = -(-columns // group)
            needed = {
                leaf for leaf in OPTIONAL if all(leaf in packing.leaves for packing in fitting)
            }
            shapes = {
                PACKED: ((rows, words), I32),
                SCALE: ((rows, count), FLOATS),
                SHAPE: ((2,), ("I64", "I32")),
                OPTIONAL[0]: ((-(-rows * bits // WORD), count), I32),
                OPTIONAL[1]: ((columns,), I32),
            }
            parts = tuple(
                PackedPart(f"{module}.{leaf}", *header_fields)
                for leaf, header_fields in shapes.items()
                if leaf not in OPTIONAL or leaf in needed or f"{module}.{leaf}" in stored
            )
            fields = (f"{module}.weight", (rows, columns), parts, bits, group)
            yield PackedMatrix(*fields, self.inputs)

    def _fitting(self, words: int, groups: int, known: int | None) -> list[Packing]:
        """The settings with which a matrix of `words` words a row, and of `known` columns unless
        that is None, has `groups` groups; where no settings do, the first."""

        def fits(packing: Packing) -> bool:
            if known is None:
                columns = words * WORD // packing.bits
            else:
                columns = known
            group = packing.group or columns
            return -(-columns * packing.bits // WORD) == words and -(-columns // group) == groups

        return [packing for packing in self.groupings if fits(packing)] or [self.groupings[0]]


def _columns(name: str, stored: Mapping[str, Header]) -> int | None:
    """The columns that the shape in a file says; None where it cannot be read."""
    header = stored.get(name)
    if header is None or header.shape != (2,) or not isinstance(stored, Stored):
        return None
    columns = int(stored.read(name)[1])
    if columns > 0:
        return columns
    return None


def read(groups: Mapping[str, Mapping[str, Any]]) -> PackQuantized:
    """The scheme of these groups, by their places in the configuration. Raises ConfigError."""
    groupings = tuple(_grouping(where, group) for where, group in groups.items())
    inputs = {where: read_inputs(where, group) for where, group in groups.items()}
    if len(set(inputs.values())) > 1:  # sizes alone tell their matrices apart
        raise ConfigError(f"{next(iter(groups))} and others of its format round inputs differently")
    return PackQuantized(groupings, next(iter(inputs.values())))


def read_inputs(where: str, group: Mapping[str, Any]) -> str | None:
    """The numbers of 8 bits that inputs of 4-bit weights are rounded to, None for none. Raises
    ConfigError."""
    inputs = group.get("input_activations")
    if not inputs:
        return None
    if isinstance(inputs, dict):
        asked = inputs
    else:
        asked = {}
    number_type = asked.get("type", "int")
    strategy = asked.get("strategy", "token")
    told = asked.get("num_bits"), asked.get("dynamic"), asked.get("symmetric", True)
    four = group["weights"].get("num_bits") == 4
    legal = told == (8, True, True) and strategy in STRATEGIES and four
    if not legal or not isinstance(number_type, str) or number_type not in TYPES:
        raise ConfigError(
            f"{where}.input_activations is {inputs!r:.160}; of 4-bit weights alone, inputs of 8 "
            "bits, symmetric and dynamic for each token, are read"
        )
    return TYPES[number_type]


def with_inputs(weight_format: WeightFormat | None, numbers: str | None) -> WeightFormat | None:
    """The format with inputs rounded to these numbers, None for no rounding."""
    if weight_format is None or numbers is None:
        return weight_format
    return replace(weight_format, inputs="token", input_numbers=numbers)


def _grouping(where: str, group: Mapping[str, Any]) -> Packing:
    weights = group["weights"]
    bits, strategy, size = (weights.get(key) for key in ("num_bits", "strategy", "group_size"))
    if bits not in BITS or weights.get("type", "int") != "int":
        raise ConfigError(f"num_bits of {where} is {bits!r:.40}; integers of {bits_read(BITS)}")
    zero, index = OPTIONAL
    leaves: tuple[str, ...] = ()
    if weights.get("symmetric") is False:
        leaves = (zero,)
    if strategy == "channel" and size in (None, -1):
        return Packing(bits, None, leaves=leaves)
    if strategy != "group" or type(size) is not int or size < 1:
        raise ConfigError(
            f"strategy and group_size of {where} are {strategy!r:.40} and {size!r:.40}; "
            "group with a positive integer, or channel, are read"
        )
    if is_shuffled(weights):
        leaves = (*leaves, index)
    return Packing(bits, size, leaves=leaves)


def is_shuffled(weights: Mapping[str, Any]) -> bool:
    """Whether these settings leave the groups of columns in no order."""
    return str(weights.get("actorder")).lower() in SHUFFLED
