"""Packing a step's host arrays into one buffer."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.engine.batch import ALIGN, Shapes, offsets, pack, packed_size, unpack

KINDS = (np.int32, np.uint32, np.float32)


@given(st.lists(st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=2), st.sampled_from(KINDS)), min_size=1, max_size=6))
def test_what_is_packed_is_unpacked_bit_by_bit_and_every_array_is_aligned(layout: list) -> None:
    shapes: Shapes = {f"a{i}": (tuple(shape), dtype) for i, (shape, dtype) in enumerate(layout)}
    rng = np.random.default_rng(0)
    arrays = {n: rng.integers(-(2**31), 2**31, shape).astype(np.int32).view(dtype) for n, (shape, dtype) in shapes.items()}
    buffer = pack(arrays, shapes)
    assert buffer.shape == (packed_size(shapes),)
    assert all(start % ALIGN == 0 for start in offsets(shapes)[0].values())
    for name, found in unpack(buffer, shapes).items():
        assert found.dtype == shapes[name][1]
        np.testing.assert_array_equal(np.asarray(found).view(np.int32), arrays[name].view(np.int32))
