"""What converters do to tensors, undone where they are read. Raises ValueError for shapes that do
not fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxllm.tensors import Bounds, Deferred


def halves(tensor: Deferred, heads: int) -> Deferred:
    """Rows of heads whose dimensions 2i and 2i + 1 turn together, as i and i + half."""
    rows = np.arange(tensor.shape[0]).reshape(heads, -1, 2)
    return tensor.take(rows.swapaxes(1, 2).reshape(-1), axis=0)


def row(tensor: Deferred) -> Deferred:
    """A vector as a matrix of one row; a matrix stays."""
    if len(tensor.shape) == 1:
        return tensor.reshape((1, *tensor.shape))
    return tensor


def plus(tensor: Deferred, value: float) -> Deferred:
    """`value` added to every number."""
    return Deferred(
        tensor.shape, lambda bounds: tensor.read(bounds).astype(np.float32) + np.float32(value)
    )


def joined(tensors: Sequence[Deferred], axis: int) -> Deferred:
    """Tensors one behind the other."""
    shapes = {(*tensor.shape[:axis], *tensor.shape[axis + 1 :]) for tensor in tensors}
    if len(shapes) != 1:
        raise ValueError("their other axes differ")
    ends = np.cumsum([tensor.shape[axis] for tensor in tensors]).tolist()

    def read(bounds: Bounds) -> np.ndarray:
        low, high = bounds[axis]
        parts = []
        for tensor, end in zip(tensors, ends, strict=True):
            start = end - tensor.shape[axis]
            span = (min(max(low, start), end) - start, min(max(high, start), end) - start)
            if span[0] < span[1]:  # blocks cannot be made of nothing
                parts.append(tensor.read((*bounds[:axis], span, *bounds[axis + 1 :])))
        return np.concatenate(parts, axis)

    first = tensors[0].shape
    return Deferred((*first[:axis], ends[-1], *first[axis + 1 :]), read)


def alternating(even: Deferred, odd: Deferred) -> Deferred:
    """Entries of the second axis of two tensors in turn."""
    if even.shape != odd.shape:
        raise ValueError("their shapes differ")
    first, count, *others = even.shape

    def read(bounds: Bounds) -> np.ndarray:
        low, high = bounds[1]
        begin = low // 2
        halved = (bounds[0], (begin, -(-high // 2)), *bounds[2:])
        both = np.stack([even.read(halved), odd.read(halved)], axis=2)
        rows = both.reshape(both.shape[0], -1, *both.shape[3:])
        return rows[:, low - 2 * begin : high - 2 * begin]

    return Deferred((first, 2 * count, *others), read)
