"""4-bit matrices on their way to the devices: all of a row in bytes, so that rows can be picked and
ordered like those of any matrix.

A row is its numbers, two a byte and the low half first; the float32 scales of its groups; then
their zero points, a byte each, or their float32 offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from jaxllm.quantisation.weight_format import OFFSETS, SYMMETRIC, ZEROS, WeightFormat

# Bytes of a group's scale and of what stands beside it
GROUP_BYTES: Mapping[str, int] = MappingProxyType({SYMMETRIC: 4, ZEROS: 5, OFFSETS: 8})


def groups_of(weight_format: WeightFormat, columns: int) -> int:
    """Groups of a row."""
    if weight_format.group is None:
        return 1
    return -(-columns // weight_format.group)


def row_bytes(weight_format: WeightFormat, columns: int) -> int:
    """Bytes of a row."""
    return -(-columns // 2) + groups_of(weight_format, columns) * GROUP_BYTES[weight_format.form]


def columns_of(weight_format: WeightFormat, size: int) -> int:
    """The columns of a row of `size` bytes; an odd number is given as the next even one."""
    columns = 2 * size
    while row_bytes(weight_format, columns) > size:
        excess = row_bytes(weight_format, columns) - size
        columns -= 2 * max(1, excess // (1 + GROUP_BYTES[weight_format.form]))
    return columns


def rows_of(numbers: np.ndarray, scales: np.ndarray, others: np.ndarray | None) -> np.ndarray:
    """Rows of numbers [N, K] of 0 to 15, float32 scales [N, G], and zero points (integers) or
    offsets (float32) of the same shape."""
    even = np.pad(numbers.astype(np.uint8), ((0, 0), (0, numbers.shape[1] % 2)))
    parts = [even[:, 0::2] | even[:, 1::2] << 4, _bytes(scales.astype(np.float32))]
    if others is not None:
        if np.issubdtype(others.dtype, np.floating):
            parts.append(_bytes(others.astype(np.float32)))
        else:
            parts.append(others.astype(np.uint8))
    return np.concatenate(parts, axis=1)


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
