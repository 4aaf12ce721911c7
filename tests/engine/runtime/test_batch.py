"""Packing a step's host arrays into one buffer."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.engine.runtime.batch import (
    ALIGN,
    Shapes,
    grown,
    offsets,
    pack,
    packed_size,
    unpack,
    update_arrays,
    update_shapes,
)
from jaxllm.engine.scheduling.plan import Plan
from jaxllm.engine.scheduling.request import Request, Table
from jaxllm.sampling.options import SamplingParams

KINDS = (np.int32, np.uint32, np.float32)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=2), st.sampled_from(KINDS)),
        min_size=1,
        max_size=6,
    )
)
def test_what_is_packed_is_unpacked_bit_by_bit_and_every_array_is_aligned(layout: list) -> None:
    shapes: Shapes = {f"a{i}": (tuple(shape), dtype) for i, (shape, dtype) in enumerate(layout)}
    rng = np.random.default_rng(0)
    arrays = {
        n: rng.integers(-(2**31), 2**31, shape).astype(np.int32).view(dtype)
        for n, (shape, dtype) in shapes.items()
    }
    buffer = pack(arrays, shapes)
    assert buffer.shape == (packed_size(shapes),)
    assert all(start % ALIGN == 0 for start in offsets(shapes)[0].values())
    for name, found in unpack(buffer, shapes).items():
        assert found.dtype == shapes[name][1]
        np.testing.assert_array_equal(np.asarray(found).view(np.int32), arrays[name].view(np.int32))


@given(st.lists(st.tuples(st.integers(0, 11), st.booleans()), max_size=5))
def test_rows_get_a_table_entry_at_the_start_of_a_page_and_for_a_copy(
    rows: list[tuple[int, bool]],
) -> None:
    size, slots, decodes, copies = 4, 8, [], []
    for row, (position, copied) in enumerate(rows):
        request = Request(
            id="r", index=0, prompt=[1], params=SamplingParams(), seed=0, arrival=0.0, max_tokens=9
        )
        request.slot, request.tables = 7 - row, (Table([100 * row + page for page in range(3)]),)
        decodes.append(request)
        copies += [(99, request.pages[position // size], 0)] if copied else []
    plan = Plan(tuple(decodes), tuple(position for position, _ in rows), (), copies=tuple(copies))
    entries = [row for row, (position, copied) in enumerate(rows) if position % size == 0 or copied]
    assert grown(plan, size) == entries
    arrays = update_arrays(plan, entries, update_shapes(slots, 1), size, width=3)
    assert arrays["rows"].tolist() == [7 - row for row in range(len(rows))] + [slots] * (
        slots - len(rows)
    )
    for row in range(slots):
        found = tuple(int(arrays[name][row]) for name in ("slot", "index", "page"))
        index = rows[row][0] // size if row in entries else 0
        assert found == (
            (7 - row, index, 100 * row + index) if row in entries else (slots + 1, 0, 0)
        )
