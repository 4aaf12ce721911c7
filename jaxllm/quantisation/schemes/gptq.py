"""Matrices of 2, 3, 4 or 8 bits as AutoGPTQ and GPTQModel write them.

`X.qweight` int32 [K · bits / 32, N] holds the low bits first, along K; `X.qzeros` int32
[groups, N · bits / 32], along N; numbers of 3 bits may cross words. `X.scales` is [groups, N], and
`X.g_idx` int32 [K] has the group of each column, which with `desc_act` is in no order. The weight
[N, K] is (number - zero point) · scale. Format "gptq" stores zero points less 1, modulo their bits;
"gptq_v2" as they are.
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
    WORD,
    Arrays,
    GroupedMatrix,
    Grouping,
    bits_read,
    checked_groups,
    fields,
    read_grouping,
    size,
)
from jaxllm.quantisation.scheme import Bounds, Header, PackedPart
from jaxllm.quantisation.weight_format import WeightFormat

BITS = (2, 3, 4, 8)
LESS = {"gptq": 1, "gptq_v2": 0}  # what stored zero points lack


@dataclass(frozen=True)
class GptqMatrix(GroupedMatrix):
    """Parts: numbers, scales, zero points and, in some, the group of each column.

    Attributes:
        less: what stored zero points lack.
        shuffled: groups may be in no order.
        centred: settings say that zero points are half of the range.
    """

    less: int
    shuffled: bool
    centred: bool

    @property
    def symmetric(self) -> bool:
        # Of 4 bits, zero points are held as they are
        return self.centred and self.bits == 8

    @property
    def ordered(self) -> bool:
        return len(self.parts) == 3 or not self.shuffled

    def numbers(self, arrays: Arrays, bounds: Bounds) -> np.ndarray:
        rows, columns = bounds
        return fields(arrays[0][:, slice(*rows)].T, self.bits, columns)

    def scales(self, arrays: Arrays, rows: slice) -> np.ndarray:
        return arrays[1][:, rows].T

    def zeros(self, arrays: Arrays, rows: slice) -> np.ndarray:
        stored = fields(arrays[2], self.bits, (rows.start, rows.stop))
        return ((stored + self.less) & ((1 << self.bits) - 1)).T

    def groups(self, arrays: Arrays, columns: slice) -> np.ndarray:
        if len(arrays) == 3:
            return super().groups(arrays, columns)
        return checked_groups(self.parts[3], arrays[3][columns], len(arrays[1]))


@dataclass(frozen=True)
class Gptq:
    """The scheme.

    Attributes:
        less: what stored zero points lack.
        shuffled: groups of columns may be in no order.
        centred: settings say that zero points are half of the range.
    """

    grouping: Grouping
    less: int
    shuffled: bool
    centred: bool
    method = "gptq"

    @property
    def title(self) -> str:
        return f"{self.method}: {self.grouping.title}"

    def usual(self, shape: tuple[int, ...]) -> WeightFormat | None:
        return self.grouping.usual(shape, self.centred and self.grouping.bits == 8)

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[GptqMatrix]:
        for name, header in stored.items():
            if not name.endswith(".qweight") or len(header.shape) != 2:
                continue
            module = name.removesuffix(".qweight")
            words, rows = header.shape
            scales, zeros, index = (f"{module}.{leaf}" for leaf in ("scales", "qzeros", "g_idx"))
            bits = self.grouping.bits_of(rows, size(stored, zeros, 1))
            if bits not in BITS:
                raise ConfigError(f"{zeros} has numbers of {bits} bits; {bits_read(BITS)}")
            columns = words * WORD // bits
            group = self.grouping.group_of(columns, size(stored, scales, 0))
            groups = -(-columns // group)
            parts = [
                PackedPart(name, header.shape, I32),
                PackedPart(scales, (groups, rows), FLOATS),
                PackedPart(zeros, (groups, -(-rows * bits // WORD)), I32),
            ]
            if index in stored:
                parts.append(PackedPart(index, (columns,), I32))
            fields = (f"{module}.weight", (rows, columns), tuple(parts), bits, group)
            yield GptqMatrix(*fields, self.less, self.shuffled, self.centred)


def read(settings: Mapping[str, Any]) -> Gptq:
    """The scheme of these settings. Raises ConfigError."""
    stored = settings.get("checkpoint_format") or "gptq"
    if stored not in LESS:
        raise ConfigError(f"checkpoint_format is {stored!r:.40}; {' and '.join(LESS)} are read")
    grouping = read_grouping(settings, BITS, mixed="dynamic")
    shuffled = any(module.get("desc_act") for module in of_modules(settings, "dynamic"))
    return Gptq(grouping, LESS[stored], shuffled, is_centred(settings, "dynamic"))


def of_modules(settings: Mapping[str, Any], others: str) -> list[Mapping[str, Any]]:
    """The settings, and those of some modules, which stand under `others`."""
    by_module = settings.get(others)
    if not isinstance(by_module, dict):
        return [settings]
    return [settings, *(module for module in by_module.values() if isinstance(module, dict))]


def is_centred(settings: Mapping[str, Any], others: str) -> bool:
    """Whether the settings say that zero points are half of the range, and no module's differ."""
    every = of_modules(settings, others)
    return settings.get("sym") is True and all(module.get("sym", True) is True for module in every)
