"""A small part of a matrix in which every pair of values of any two axes occurs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations


def pairwise[T](cells: Sequence[T], axes: Iterable[Sequence[object]]) -> list[T]:
    """Cells that have every pair of values which any cell has.

    Args:
        cells: the whole matrix.
        axes: the values of each cell, in the order of `cells`.
    """
    pairs = [
        {((a, values[a]), (b, values[b])) for a, b in combinations(range(len(values)), 2)}
        for values in axes
    ]
    missing = set().union(*pairs)
    chosen: list[T] = []
    while missing:
        best = max(range(len(cells)), key=lambda number: len(pairs[number] & missing))
        missing -= pairs[best]
        chosen.append(cells[best])
    return chosen
