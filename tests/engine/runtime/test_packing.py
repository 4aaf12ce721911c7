"""Packing a step's host arrays into one buffer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.engine.runtime.packing import ALIGN, PER_CHUNK, ChunkLayout, Layout, Shapes
from jaxllm.engine.runtime.programs.update_slots import SlotUpdate, buffer_size, head_layout
from jaxllm.engine.runtime.state import SLOT_PARAMS, host_columns
from jaxllm.engine.scheduling.buckets import Buckets, ExtendShape
from jaxllm.engine.scheduling.plan import Chunk, Plan, TableWrite
from jaxllm.engine.scheduling.request import PageTable, Request
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams

KINDS = (np.int32, np.uint32, np.float32)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=2), st.sampled_from(KINDS)),
        min_size=1,
        max_size=6,
    )
)
def test_what_is_packed_is_unpacked_bit_by_bit_and_every_array_is_aligned(
    kinds: list,
) -> None:
    shapes: Shapes = {f"a{i}": (tuple(shape), dtype) for i, (shape, dtype) in enumerate(kinds)}
    rng = np.random.default_rng(0)
    arrays = {
        n: rng.integers(-(2**31), 2**31, shape).astype(np.int32).view(dtype)
        for n, (shape, dtype) in shapes.items()
    }
    layout = Layout(shapes)
    buffer = layout.pack(arrays)
    assert buffer.shape == (layout.size,)
    assert all(span.start % ALIGN == 0 for span in layout.spans.values())
    for name, found in layout.unpack(buffer).items():
        assert found.dtype == shapes[name][1]
        np.testing.assert_array_equal(np.asarray(found).view(np.int32), arrays[name].view(np.int32))


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=5, unique=True),
)
def test_each_table_write_of_a_plan_is_an_entry_and_unused_entries_are_dropped(
    count: int, written: list[tuple[int, int]]
) -> None:
    slots, width, decodes = 8, 3, []
    for row in range(count):
        request = Request(
            id="r",
            index=0,
            prompt=Prompt([1]),
            params=SamplingParams(),
            seed=0,
            arrival=0.0,
            max_tokens=9,
        )
        request.slot = 7 - row
        decodes.append(request)
    writes = tuple(
        TableWrite(7 - at, index, 100 * at + index, group)
        for at, (index, group) in enumerate(written)
    )
    plan = Plan(tuple(decodes), (0,) * count, (), table_writes=writes)
    shapes: Any = SimpleNamespace(slots=slots, num_groups=2, table_width=2 * width)
    update = SlotUpdate(shapes, None)
    full = tuple(TableWrite(slot, 2, 9, group) for slot in range(slots) for group in range(2))
    update.pack(Plan(tuple(decodes), (0,) * count, (), table_writes=full))
    arrays = head_layout(slots, 2).views(update.pack(plan))
    assert arrays["rows"].tolist() == [7 - row for row in range(count)] + [slots] * (slots - count)
    entries = [
        tuple(int(arrays[name][at]) for name in ("slot", "index", "page"))
        for at in range(2 * slots)
    ]
    assert entries == [
        (slot, column + group * width, page) for slot, column, page, group in writes
    ] + [(slots + 1, 0, 0)] * (2 * slots - len(writes))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("pages", [128, 2048, 16384])
@pytest.mark.parametrize(("slots", "tokens"), [(256, 8192), (1024, 32768)])
def test_rings_of_all_shapes_take_little_more_memory_than_the_largest_and_no_buffer_grows_much(
    slots: int, tokens: int, pages: int, groups: int
) -> None:
    buckets, width = Buckets.build(slots, tokens, "gpu"), pages * groups
    shapes: Any = SimpleNamespace(slots=slots, num_groups=groups, table_width=width)
    head, sizes = head_layout(slots, groups).size, set()
    for shape in buckets.extend:
        layout = ChunkLayout(shape, width, buckets.logit_rows(shape))
        needed, size = head + layout.arrays.size, buffer_size(shapes, layout)
        assert needed <= size <= needed * 9 // 8 and size % ALIGN == 0
        sizes.add(size)
    assert sum(sizes) <= 5 * max(sizes)


def test_a_buffer_that_is_packed_again_is_as_a_new_one() -> None:
    layout = ChunkLayout(ExtendShape(tokens=32, chunks=4, decodes=0), table_width=6, logit_rows=4)
    shapes: Any = SimpleNamespace(slots=8, num_groups=1, table_width=6)
    used = SlotUpdate(shapes, layout)

    def plan(*lengths: int) -> Plan:
        chunks = []
        for slot, length in enumerate(lengths):
            request = Request(
                id="r",
                index=0,
                prompt=Prompt([7 + slot] * length),
                params=SamplingParams(temperature=0.5, min_tokens=2),
                seed=2**64 - 2 - slot,
                arrival=0.0,
                max_tokens=9,
                stops=frozenset({4, 3}),
            )
            request.slot, request.tables = slot, (PageTable([slot, 5]),)
            chunks.append(Chunk(request, 0, length, True))
        return Plan((), (), tuple(chunks))

    used.pack(plan(9, 9, 9, 5))
    again = used.pack(plan(12))
    np.testing.assert_array_equal(again, SlotUpdate(shapes, layout).pack(plan(12)))
    arrays = layout.arrays.views(again[head_layout(8, 1).size :])
    assert arrays["token"].tolist() == [7] * 12 + [0] * 20
    assert arrays["position"].tolist() == [*range(12)] + [0] * 20
    assert arrays["row"].tolist() == [0] * 12 + [4] * 20
    assert arrays["slot"].tolist() == [0, 8, 8, 8]
    columns = host_columns(arrays["params"], SLOT_PARAMS)
    assert columns["key"][0].tolist() == [2**32 - 2, 2**32 - 1]
    assert columns["stop_ids"][:, :3].tolist() == [[3, 4, -1]] + [[-1] * 3] * 3
    told = {name: int(arrays[name][0]) for name in PER_CHUNK}
    assert told == {
        "slot": 0,
        "start": 0,
        "length": 12,
        "kv_length": 12,
        "kept": 0,
        "final": 1,
        "remaining": 9,
        "min_left": 2,
    }
    assert arrays["table"].tolist() == [[0, 5, 0, 0, 0, 0]] + [[0] * 6] * 3
    names = "prompt_length", "processed", "temperature", "top_p", "top_k", "repetition_penalty"
    assert [columns[name].ravel()[0].item() for name in names] == [12, 0, 0.5, 1, 0, 1]
    assert all(columns[name].dtype == np.float32 for name in ("temperature", "top_p"))
