"""Matrices of 8-bit floats with a scale for each block of rows and columns, as DeepSeek-V3,
MiniMax-M2 and Qwen3-FP8 are published.

`X.weight` [N, K] is stored as float8_e4m3fn, `X.weight_scale_inv` has the scale of each block,
[⌈N / rows⌉, ⌈K / columns⌉]; the last blocks may be cut off. The weight is the product of both
(transformers, integrations/finegrained_fp8.py), whatever "inv" says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.config import ConfigError
from jaxllm.quantisation.scheme import (
    FLOATS,
    Bounds,
    Header,
    PackedPart,
    PackedTensor,
    check_scales,
)

E4M3 = "F8_E4M3"
# The float32 value of each byte: a look-up takes a seventh of the time of a cast
VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@dataclass(frozen=True)
class BlockMatrix(PackedTensor):
    """A matrix in blocks of `rows` × `columns`."""

    rows: int
    columns: int

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        (matrix, scales), ((top, bottom), (left, right)) = arrays, bounds
        values = VALUES[matrix[top:bottom, left:right].view(np.uint8)]
        column = np.arange(left, right) // self.columns
        for row in range(top // self.rows, -(-bottom // self.rows)):
            own = scales[row].astype(np.float32)[column]
            check_scales(self.parts[1], own)
            begin, end = (max(0, edge * self.rows - top) for edge in (row, row + 1))
            values[begin:end] *= own
        return values


@dataclass(frozen=True)
class Fp8Blocks:
    """The scheme; a block has `rows` × `columns` weights."""

    rows: int
    columns: int

    @property
    def title(self) -> str:
        return f"fp8 in blocks of {self.rows} × {self.columns}"

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[BlockMatrix]:
        for name, found in stored.items():
            if found.dtype != E4M3 or len(found.shape) != 2 or not name.endswith(".weight"):
                continue
            blocks = (-(-found.shape[0] // self.rows), -(-found.shape[1] // self.columns))
            scales = PackedPart(f"{name}_scale_inv", blocks, FLOATS)
            parts = (PackedPart(name, found.shape, (E4M3,)), scales)
            yield BlockMatrix(name, found.shape, parts, self.rows, self.columns)


def read(settings: Mapping[str, Any]) -> Fp8Blocks:
    """The scheme of these settings. Raises ConfigError."""
    size = settings.get("weight_block_size")
    if (
        not isinstance(size, list)
        or len(size) != 2
        or not all(type(count) is int and count > 0 for count in size)
    ):
        raise ConfigError(
            f"weight_block_size is {size!r:.80}; two positive integers are expected, "
            "such as [128, 128]"
        )
    return Fp8Blocks(*size)
