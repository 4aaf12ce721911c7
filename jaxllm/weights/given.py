"""Weights that a caller has as arrays, under the names of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxllm.weights.stored import STORED_NAMES, Entry, Found

WHAT = "not an array of NumPy or JAX"


class GivenArrays:
    """Arrays in host memory by name, as a file of a checkpoint has tensors. They must stay as they
    are until they are loaded.

    Args:
        arrays: a mapping, or pairs, of names and arrays of NumPy or JAX.

    Attributes:
        name: what errors call them.
        entries: their types and shapes.
    """

    name = "the arrays given"

    def __init__(self, arrays: Mapping[str, Any] | Iterable[tuple[str, Any]]):
        pairs = list(arrays.items() if isinstance(arrays, Mapping) else arrays)
        self._arrays = dict(pairs)
        self.entries: dict[str, Entry] = {}
        self._problems: list[str] = []
        if len(self._arrays) < len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1})
            self._problems += [f"{name:.100} is given twice" for name in twice]
        for name, array in self._arrays.items():
            try:
                dtype = np.dtype(array.dtype)
                shape = tuple(array.shape)
            except (AttributeError, TypeError):
                self._problems.append(f"{name:.100} is a {type(array).__name__}, {WHAT}")
            else:
                self.entries[name] = Entry(STORED_NAMES.get(dtype, str(dtype)), shape, 0, 0)

    def tensor(self, name: str) -> np.ndarray:
        """One of them on the host."""
        return np.asarray(self._arrays[name])

    def close(self) -> None:
        """Nothing: the arrays are the caller's."""

    def found(self) -> Found:
        """What a source finds in a model directory."""
        bad = {name for name in self._arrays if name not in self.entries}
        return Found([self], list(self._problems), bad)
