"""Matrices as bitsandbytes writes them: 4 bits (QLoRA, appendix E) or 8 (LLM.int8).

Of 4 bits, `X.weight` has the numbers of [N, K] row by row, the high half of a byte first. A number
stands for `X.weight.quant_map` [16] times the largest of its block of numbers, `X.weight.absmax`.
Where these are bytes, they stand for `nested_quant_map` [256] times `nested_absmax` of each 256 of
them, plus an offset. Shape, sizes and offset are JSON in `X.weight.quant_state.bitsandbytes__nf4`.

Of 8 bits, `X.weight` int8 [N, K] times `X.SCB` [N] / 127 is the weight. Inputs stay as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from jaxllm.config import ConfigError
from jaxllm.quantisation.int4_rows import row_bytes, rows_of
from jaxllm.quantisation.matrix import Numbers
from jaxllm.quantisation.scheme import (
    Bounds,
    Header,
    PackedPart,
    PackedTensor,
    Stored,
    check_scales,
)
from jaxllm.quantisation.weight_format import INT8, NF4, WeightFormat

STATE = ".quant_state.bitsandbytes__"
TYPES = ("nf4", "fp4")
STORAGE = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}  # bytes of the type that holds the numbers
RANGE = np.float32(127)
LAST = 0.9677083  # of a normal distribution's quantiles, that of the largest number


def nf4_map() -> np.ndarray:
    """What numbers of nf4 stand for: quantiles, eight above zero and seven below, over the largest.
    Files hold them with an error of a float32."""
    quantile = NormalDist().inv_cdf
    above, below = (
        [quantile(share) for share in np.linspace(LAST, 0.5, count)[:-1]] for count in (9, 8)
    )
    return np.array(sorted([*above, 0.0, *(-value for value in below)])) / max(above)


class State(NamedTuple):
    """What the JSON says; `nested` is the block size of maxima that are bytes, else 0."""

    shape: tuple[int, int]
    block: int
    nested: int
    offset: float


@dataclass(frozen=True)
class BlockMatrix(PackedTensor):
    """A matrix of 4 bits. Parts: numbers, maxima, map, state and, if `state.nested`, the maxima and
    map of maxima."""

    quant_type: str
    state: State

    @property
    def format(self) -> WeightFormat | None:
        block = self.state.block
        columns = self.shape[1]
        if self.quant_type != NF4 or columns % block:
            return None
        return WeightFormat(NF4, block)

    def leaves(self) -> tuple[PackedTensor, ...]:
        assert self.format is not None
        shape = (self.shape[0], row_bytes(self.format, self.shape[1]))
        return (BlockRows(f"{self.name}.rows", shape, self.parts, self),)

    def numbers(self, arrays: Sequence[np.ndarray], rows: slice) -> np.ndarray:
        """`[rows, K]`."""
        columns = self.shape[1]
        first = rows.start * columns
        last = rows.stop * columns
        stored = np.ascontiguousarray(arrays[0]).view(np.uint8).reshape(-1)
        packed = stored[first // 2 : -(-last // 2)]
        pairs = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)
        return pairs[first % 2 : first % 2 + last - first].reshape(-1, columns)

    def maxima(self, arrays: Sequence[np.ndarray], first: int, last: int) -> np.ndarray:
        """The maxima of the blocks `first` to `last`, float32. Raises ConfigError."""
        maxima = arrays[1][first:last]
        if self.state.nested:
            outer = np.arange(first, last) // self.state.nested
            maxima = arrays[5][maxima] * arrays[4][outer] + np.float32(self.state.offset)
        maxima = maxima.astype(np.float32)
        check_scales(self.parts[1], maxima)
        return maxima

    def check(self, arrays: Sequence[np.ndarray]) -> None:
        self.maxima(arrays, 0, -(-math.prod(self.shape) // self.state.block))

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        top, bottom = bounds[0]
        columns = slice(*bounds[1])
        place = np.arange(top * self.shape[1], bottom * self.shape[1]) // self.state.block
        if not place.size:
            return np.zeros((0, columns.stop - columns.start), np.float32)
        maxima = self.maxima(arrays, int(place[0]), int(place[-1]) + 1)[place - place[0]]
        stands = arrays[2].astype(np.float32)
        if not np.isfinite(stands).all():
            raise ConfigError(
                f"{self.parts[2].name} has a number that is not finite: download the checkpoint "
                "again"
            )
        values = stands[self.numbers(arrays, slice(top, bottom))]
        return (values * maxima.reshape(values.shape))[:, columns]


@dataclass(frozen=True)
class BlockRows(PackedTensor):
    """A matrix as the bytes of its rows, see `int4_rows`."""

    matrix: BlockMatrix

    def check(self, arrays: Sequence[np.ndarray]) -> None:
        self.matrix.check(arrays)
        self._check_map(arrays)

    def _check_map(self, arrays: Sequence[np.ndarray]) -> None:
        if not np.allclose(arrays[2], nf4_map(), rtol=0, atol=1e-6):
            raise ConfigError(
                f"{self.parts[2].name} does not hold the numbers of nf4: download the checkpoint "
                "again"
            )

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        self._check_map(arrays)
        matrix = self.matrix
        top, bottom = bounds[0]
        row_blocks = matrix.shape[1] // matrix.state.block
        maxima = matrix.maxima(arrays, top * row_blocks, bottom * row_blocks).reshape(
            -1, row_blocks
        )
        numbers = matrix.numbers(arrays, slice(top, bottom))
        return rows_of(numbers, maxima, None)[:, slice(*bounds[1])]


@dataclass(frozen=True)
class RowMatrix(PackedTensor):
    """A matrix of 8 bits. Parts: numbers, maxima of rows and, in some, the order of the numbers."""

    @property
    def format(self) -> WeightFormat | None:
        return WeightFormat(INT8)

    def leaves(self) -> tuple[PackedTensor, ...]:
        scale = RowScale(f"{self.name}.scale", (self.shape[0], 1), self.parts[1:])
        return (Numbers(f"{self.name}.values", self.shape, self.parts[:1]), scale)

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        rows, columns = (slice(*bound) for bound in bounds)
        scales = _row_scales(self.parts[1:], arrays[1:], rows)
        return np.asarray(arrays[0][rows, columns].astype(np.float32) * scales)


@dataclass(frozen=True)
class RowScale(PackedTensor):
    """The scales of rows [N, 1]."""

    def check(self, arrays: Sequence[np.ndarray]) -> None:
        self.checked_whole(arrays)

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        return _row_scales(self.parts, arrays, slice(*bounds[0]))


def _row_scales(
    parts: Sequence[PackedPart], arrays: Sequence[np.ndarray], rows: slice
) -> np.ndarray:
    if len(arrays) > 1 and arrays[1].any():
        raise ConfigError(
            f"{parts[1].name} is {arrays[1].reshape(-1)[0]}: the numbers are ordered for a device; "
            "save the model again from the CPU"
        )
    maxima = arrays[0][rows, None].astype(np.float32)
    check_scales(parts[0], maxima)
    return maxima / RANGE


@dataclass(frozen=True)
class BitsAndBytes:
    """The scheme; `bits` are 4 or 8."""

    bits: int
    method = "bitsandbytes"

    @property
    def title(self) -> str:
        return f"bitsandbytes of {self.bits} bits"

    def usual(self, shape: tuple[int, ...]) -> WeightFormat | None:
        if len(shape) != 2:
            return None
        if self.bits == 8:
            return WeightFormat(INT8)
        return WeightFormat(NF4, 64)

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[PackedTensor]:
        for name, header in stored.items():
            if self.bits == 8 and name.endswith(".weight") and header.dtype == "I8":
                yield _row_matrix(name, header, stored)
            elif self.bits == 4 and STATE in name and isinstance(stored, Stored):
                yield _block_matrix(name, stored)


def _row_matrix(name: str, header: Header, stored: Mapping[str, Header]) -> RowMatrix:
    module = name.removesuffix("weight")
    parts = [
        PackedPart(name, header.shape, ("I8",)),
        PackedPart(f"{module}SCB", header.shape[:1], ("F32", "F16", "BF16")),
    ]
    if f"{module}weight_format" in stored:
        parts.append(PackedPart(f"{module}weight_format", (), ("U8",)))
    return RowMatrix(name, header.shape, tuple(parts))


def _block_matrix(state_name: str, stored: Stored) -> BlockMatrix:
    name, _, quant_type = state_name.partition(STATE)
    if quant_type not in TYPES:
        raise ConfigError(f"{state_name:.160} has the type {quant_type!r:.20}; {TYPES} are read")
    state = _state(state_name, stored.read(state_name))
    count = state.shape[0] * state.shape[1]
    blocks = -(-count // state.block)
    dtype = "U8"
    if name in stored:
        dtype = stored[name].dtype
    words = -(-count // 2) // STORAGE.get(dtype, 1)
    if state.nested:
        maxima = ("U8",)
    else:
        maxima = ("F32",)
    parts = [
        PackedPart(name, (words, 1), tuple(STORAGE)),
        PackedPart(f"{name}.absmax", (blocks,), maxima),
        PackedPart(f"{name}.quant_map", (16,), ("F32",)),
        PackedPart(state_name, stored[state_name].shape, ("U8",)),
    ]
    if state.nested:
        parts.append(PackedPart(f"{name}.nested_absmax", (-(-blocks // state.nested),), ("F32",)))
        parts.append(PackedPart(f"{name}.nested_quant_map", (256,), ("F32",)))
    return BlockMatrix(name, state.shape, tuple(parts), quant_type, state)


def _state(name: str, stored: np.ndarray) -> State:
    """Raises ConfigError for what is no such JSON."""
    try:
        fields = json.loads(stored.tobytes())
        rows, columns = fields["shape"]
        nested = fields.get("nested_blocksize", 0)
        sizes = (rows, columns, fields["blocksize"])
        offset = float(fields.get("nested_offset", 0))
        legal = all(type(size) is int and size > 0 for size in sizes) and np.isfinite(offset)
        if not legal or type(nested) is not int or nested < 0:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{name:.160} has no legal shape, blocksize and offset: download the checkpoint again"
        ) from None
    return State((rows, columns), fields["blocksize"], nested, offset)


def read(settings: Mapping[str, Any]) -> BitsAndBytes:
    """The scheme of these settings. Raises ConfigError."""
    if settings.get("load_in_8bit") and settings.get("load_in_4bit"):
        raise ConfigError("load_in_8bit and load_in_4bit are both true; one of them is expected")
    if settings.get("load_in_8bit"):
        return BitsAndBytes(8)
    quant_type = settings.get("bnb_4bit_quant_type", "fp4")
    if not settings.get("load_in_4bit") or quant_type not in TYPES:
        raise ConfigError(
            f"load_in_8bit, or load_in_4bit with bnb_4bit_quant_type of {' or '.join(TYPES)}, is "
            f"expected; bnb_4bit_quant_type is {quant_type!r:.40}"
        )
    return BitsAndBytes(4)
