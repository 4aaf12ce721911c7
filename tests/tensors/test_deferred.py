"""Tensors that are computed where they are read."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from jaxllm.nn.rules import Ordered, Part, Piece, Plus, Step, Transposed
from jaxllm.quantisation import Bounds
from jaxllm.tensors import Deferred


def deferred(array: np.ndarray) -> tuple[Deferred, list[int]]:
    """The array, and the number of entries of each read."""
    reads: list[int] = []

    def read(bounds: Bounds) -> np.ndarray:
        found = array[tuple(slice(*own) for own in bounds)]
        assert all(0 <= low <= high for low, high in bounds)
        reads.append(found.size)
        return found

    return Deferred(array.shape, read), reads


def counted(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


PIECES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Step, ...]]] = {
    "as stored": ((6, 8), (6, 8), ()),
    "rows of shards": ((6, 8), (3, 2, 8), ()),
    "columns of shards": ((6, 8), (6, 4, 2), ()),
    "both": ((6, 8), (2, 3, 1, 2, 4), ()),
    "one expert": ((6, 8), (1, 6, 8), ()),
    "joined": ((1, 6, 8), (6, 8), ()),
    "joined and split": ((2, 6), (4, 3), ()),
    "ones at the end": ((6, 1), (6,), ()),
    "more ones": ((6,), (6, 1, 1), ()),
    "transposed": ((6, 8), (8, 6), (Transposed(),)),
    "part": ((6, 8), (2, 2, 8), (Part((2, 3, 8), 1, 1, 3),)),
    "ordered": ((6, 8), (2, 3, 8), (Ordered((2, 3, 8), 1, (2, 0, 1)),)),
    "with zeros": ((6, 8), (2, 4, 8), (Ordered((2, 3, 8), 1, (2, -1, 1, 0)),)),
    "experts": (
        (3, 8, 4),
        (3, 4, 8),
        (Transposed(), Ordered((3, 4, 8), 1, (0, 2, 1, 3))),
    ),
    "added": ((6, 8), (6, 8), (Plus(1.0),)),
}


@pytest.mark.parametrize("name", PIECES)
def test_every_block_of_a_piece_is_that_of_the_array(name: str) -> None:
    source, view, steps = PIECES[name]
    piece, array = Piece("x", source, view, steps=steps), counted(*source)
    expected, found = piece.arranged(array), piece.arranged(deferred(array)[0])
    assert found.shape == view
    np.testing.assert_array_equal(np.asarray(found), expected)
    for cut in product(*([slice(None), slice(n // 2, n), slice(0, 1)] for n in view)):
        np.testing.assert_array_equal(np.asarray(found[cut]), expected[cut])
    for entry in range(view[0]):
        np.testing.assert_array_equal(np.asarray(found[entry]), expected[entry])


@pytest.mark.parametrize(
    ("name", "block", "entries"),
    [
        ("rows of shards", lambda x: x[1:2], 16),
        ("rows of shards", lambda x: x[1][1:2], 8),
        ("columns of shards", lambda x: x[:, 1:3], 24),
        ("columns of shards", lambda x: x[2:4][:, 1:2], 4),
        ("one expert", lambda x: x[0][4:], 16),
        ("part", lambda x: x[1], 16),
        ("ordered", lambda x: x[1], 24),
        ("ordered", lambda x: x[1:, 1:], 16),
        ("experts", lambda x: x[2:], 32),
    ],
)
def test_a_block_reads_no_more_than_it_needs(
    name: str, block: Callable[[Any], Any], entries: int
) -> None:
    source, view, steps = PIECES[name]
    tensor, reads = deferred(counted(*source))
    own = block(Piece("x", source, view, steps=steps).arranged(tensor))
    assert reads == []
    np.asarray(own)
    assert reads == [entries]
