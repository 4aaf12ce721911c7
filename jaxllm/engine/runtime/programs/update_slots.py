"""Upload of a step's row map, page-table entries and, with chunks, their packed form."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jaxllm.engine.runtime.packing import ChunkLayout, ChunkViews, Layout, Shapes
from jaxllm.engine.runtime.program import Key, Program, Resident, Variant, generates
from jaxllm.engine.runtime.shapes import StepShapes
from jaxllm.engine.scheduling.plan import Plan


def update_slots(
    groups: int,
    table: Array,
    rows: Array,
    buffer: Array,
    staged: Array | None = None,
    *,
    local: NamedSharding,
) -> tuple[Array, ...]:
    """(table, rows) of the slot state, and for `staged` the packed chunks that follow the head of
    `buffer`. `buffer` may lie in pinned host memory; `local` is the device's own."""
    head = head_layout(rows.shape[0], groups)
    buffer = jax.device_put(buffer, local)
    new = head.unpack(buffer[: head.size])
    table = table.at[new["slot"], new["index"]].set(new["page"], mode="drop")
    return (table, new["rows"]) if staged is None else (table, new["rows"], buffer[head.size :])


@functools.cache
def head_layout(slots: int, groups: int) -> Layout:
    """The buffer before the packed chunks: the row map, and at most one page-table entry per row
    and cache group: table[slot, index] = page."""
    rows: Shapes = {"rows": ((slots,), np.int32)}
    return Layout(rows | dict.fromkeys(("slot", "index", "page"), ((slots * groups,), np.int32)))


class SlotUpdate:
    """Packs what `update_slots` takes in steps of one shape, again and again in the same memory.

    A buffer of many arrays takes longer to take apart into views than to fill. Unused entries of
    the page table name the slot S + 1, which drops them.

    Attributes:
        key: the program that takes it.
    """

    def __init__(self, shapes: StepShapes, layout: ChunkLayout | None):
        self.key = Key("update_slots", (int(layout is not None),))
        slots, head = shapes.slots, head_layout(shapes.slots, shapes.num_groups)
        self._width = shapes.table_width // shapes.num_groups
        self._buffer = np.zeros(head.size + (layout.arrays.size if layout else 0), np.int32)
        self._head = head.views(self._buffer)
        self._head["rows"][:], self._head["slot"][:] = slots, slots + 1
        self._chunks = None
        if layout is not None:
            self._chunks = ChunkViews(layout, self._buffer[head.size :])
            self._chunks.pad(slots)
        self._nothing = self._buffer.copy()

    def pack(self, plan: Plan, eos_ids: Sequence[int]) -> np.ndarray:
        """Row map, page-table entries and chunks of a plan, until the next call."""
        self._buffer[:] = self._nothing
        head = self._head
        if plan.decodes:
            head["rows"][: len(plan.decodes)] = plan.slots
        for at, (slot, column, page, group) in enumerate(plan.table_writes):
            head["slot"][at], head["index"][at] = slot, column + group * self._width
            head["page"][at] = page
        if self._chunks is not None:
            self._chunks.write(plan.chunks, eos_ids)
        return self._buffer


def _build(shapes: StepShapes, with_chunks: int) -> Variant:
    table, rows = Resident("state", field="table"), Resident("state", field="rows")
    staged = (Resident("staged_chunks"),) if with_chunks else ()
    size = head_layout(shapes.slots, shapes.num_groups).size
    if with_chunks:
        size += shapes.staged_chunks.shape[0]
    return Variant(
        functools.partial(update_slots, shapes.num_groups, local=shapes.replicated),
        takes=(table, rows, shapes.host_buffer(size), *staged),
        gives=(table, rows, *staged),
    )


PROGRAM = Program("update_slots", sizes=lambda shapes: [(1,), (0,)], build=_build, runs=generates)
