"""A tensor that is computed where it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

type Bounds = tuple[tuple[int, int], ...]  # first index and the one after the last, of each axis


class Deferred:
    """An array of `shape`, of which `read(bounds)` computes a block.

    Views are remembered; `np.asarray` of a view computes it, from no more than the block that it
    needs. Other operations see the whole array.
    """

    def __init__(self, shape: tuple[int, ...], read: Callable[[Bounds], np.ndarray]):
        self.shape = shape
        self.read = read

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read(tuple((0, size) for size in self.shape)), dtype)

    def __array_namespace__(self) -> ModuleType:
        return np

    def __getitem__(self, index: int | slice | tuple[slice, ...]) -> Deferred:
        """The slices have step 1."""
        if isinstance(index, int):
            entry = (index, index + 1)
            return Deferred(self.shape[1:], lambda bounds: self.read((entry, *bounds))[0])
        if isinstance(index, tuple):
            leading = index
        else:
            leading = (index,)
        slices = leading + (slice(None),) * (len(self.shape) - len(leading))
        cut = [
            axis_slice.indices(size)[:2]
            for axis_slice, size in zip(slices, self.shape, strict=True)
        ]

        def read(bounds: Bounds) -> np.ndarray:
            moved = zip(cut, bounds, strict=True)
            return self.read(
                tuple((start + low, start + high) for (start, _), (low, high) in moved)
            )

        return Deferred(tuple(stop - start for start, stop in cut), read)

    def astype(self, dtype: Any) -> np.ndarray:
        return np.asarray(self).astype(dtype)

    def swapaxes(self, first: int, second: int) -> Deferred:
        order = list(range(len(self.shape)))
        order[first], order[second] = order[second], order[first]

        def read(bounds: Bounds) -> np.ndarray:
            return self.read(tuple(bounds[axis] for axis in order)).swapaxes(first, second)

        return Deferred(tuple(self.shape[axis] for axis in order), read)

    def take(self, indices: np.ndarray, axis: int) -> Deferred:
        def read(bounds: Bounds) -> np.ndarray:
            taken = indices[slice(*bounds[axis])]
            first, last = (taken.min(), taken.max() + 1) if taken.size else (0, 0)
            block = self.read((*bounds[:axis], (int(first), int(last)), *bounds[axis + 1 :]))
            return block.take(taken - first, axis)

        return Deferred((*self.shape[:axis], len(indices), *self.shape[axis + 1 :]), read)

    def reshape(self, shape: tuple[int, ...]) -> Deferred:
        """Where an axis is split, no more of it is read than its first part needs; axes that are
        joined are read whole."""
        runs = list(_runs(self.shape, shape))

        def read(bounds: Bounds) -> np.ndarray:
            taken: list[tuple[int, int]] = []
            sizes: list[int] = []
            index: list[slice] = []
            for before, after in runs:
                if len(self.shape[before]) == 1 and shape[after]:
                    entries, seen, inside = _split(shape[after], bounds[after])
                    taken.append(entries)
                else:
                    seen = shape[after]
                    inside = [slice(*bound) for bound in bounds[after]]
                    taken += [(0, size) for size in self.shape[before]]
                sizes += seen
                index += inside
            return self.read(tuple(taken)).reshape(sizes)[tuple(index)]

        return Deferred(shape, read)


def _runs(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Runs of axes of two shapes that hold the same entries; each run has as few axes as
    possible."""
    old_axis = 0
    new_axis = 0
    while old_axis < len(old) or new_axis < len(new):
        first = old_axis
        second = new_axis
        left = math.prod(old[old_axis : old_axis + 1])
        right = math.prod(new[new_axis : new_axis + 1])
        old_axis = min(old_axis + 1, len(old))
        new_axis = min(new_axis + 1, len(new))
        while left != right:
            if left < right:
                left = left * old[old_axis]
                old_axis = old_axis + 1
            else:
                right = right * new[new_axis]
                new_axis = new_axis + 1
        yield slice(first, old_axis), slice(second, new_axis)


def _split(
    sizes: tuple[int, ...], bounds: Bounds
) -> tuple[tuple[int, int], tuple[int, ...], list[slice]]:
    """For an axis that is seen as axes of `sizes`: the entries to read for `bounds`, the sizes of
    the axes that these entries are seen as, and where the bounds lie in those axes."""
    cut = next((i for i, (low, high) in enumerate(bounds) if high - low != 1), len(sizes) - 1)
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(cut + 1)]
    start = sum(low * stride for (low, _), stride in zip(bounds, strides, strict=False))
    count = bounds[cut][1] - bounds[cut][0]
    seen = (*[1] * cut, count, *sizes[cut + 1 :])
    inside = [slice(None)] * (cut + 1) + [slice(*bound) for bound in bounds[cut + 1 :]]
    return (start, start + count * strides[cut]), seen, inside
