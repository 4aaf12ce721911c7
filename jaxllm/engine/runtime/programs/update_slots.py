"""Upload of a step's row map and page-table entries; a step with chunks carries them itself."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jaxllm.engine.runtime.packing import ALIGN, ChunkLayout, ChunkViews, Layout, Shapes
from jaxllm.engine.runtime.program import Program, Resident, Variant, generates
from jaxllm.engine.runtime.shapes import StepShapes
from jaxllm.engine.scheduling.plan import Plan


def update_slots(
    row_writes: int, table: Array, rows: Array, buffer: Array, *, local: NamedSharding
) -> tuple[Array, Array]:
    """(table, rows) of the slot state, with what `buffer` brings. That may lie in pinned host
    memory; `local` is the device's own."""
    return updated(row_writes, table, rows, jax.device_put(buffer, local))


def updated(row_writes: int, table: Array, rows: Array, head: Array) -> tuple[Array, Array]:
    """(table, rows) of the slot state, with what the `head` of a buffer brings."""
    new = head_layout(rows.shape[0], row_writes).unpack(head)
    return table.at[new["slot"], new["index"]].set(new["page"], mode="drop"), new["rows"]


@functools.cache
def head_layout(slots: int, row_writes: int) -> Layout:
    """The buffer before the packed chunks: the row map, and at most `row_writes` page-table entries
    per row (`StepShapes`): table[slot, index] = page."""
    rows: Shapes = {"rows": ((slots,), np.int32)}
    entries = (slots * row_writes,), np.int32
    return Layout(rows | dict.fromkeys(("slot", "index", "page"), entries))


class SlotUpdate:
    """Packs what the host brings to steps of one shape, again and again in the same memory: a head,
    which `update_slots` or `extend` takes, and the chunks, if there are some.

    A buffer of many arrays takes longer to take apart into views than to fill. Unused entries of
    the page table name the slot S + 1, which drops them.
    """

    def __init__(self, shapes: StepShapes, layout: ChunkLayout | None):
        slots = shapes.slots
        head = head_layout(shapes.slots, shapes.row_writes)
        self._width = shapes.table_width // shapes.num_groups
        self._buffer = np.zeros(buffer_size(shapes, layout), np.int32)
        self._head = head.views(self._buffer)
        self._head["rows"][:] = slots
        self._head["slot"][:] = slots + 1
        self._chunks = None
        if layout is not None:
            self._chunks = ChunkViews(layout, self._buffer[head.size :])
            self._chunks.pad(slots)
        self._nothing = self._buffer.copy()

    def pack(self, plan: Plan) -> np.ndarray:
        """Row map, page-table entries and chunks of a plan, until the next call."""
        self._buffer[:] = self._nothing
        head = self._head
        if plan.decodes:
            head["rows"][: len(plan.decodes)] = plan.slots
        for at, (slot, column, page, group) in enumerate(plan.table_writes):
            head["slot"][at] = slot
            head["index"][at] = column + group * self._width
            head["page"][at] = page
        if self._chunks is not None:
            self._chunks.write(plan.chunks)
        return self._buffer


def buffer_size(shapes: StepShapes, layout: ChunkLayout | None) -> int:
    """Elements that the host brings to a step, in chunks of this layout if it has some.

    Page tables take most of a buffer, so shapes with as many prompts differ little. With chunks,
    sizes are rounded up by an eighth at most: shapes of one size share pinned memory.
    """
    head = head_layout(shapes.slots, shapes.row_writes).size
    if layout is None:
        return head
    size = head + layout.arrays.size
    grain = max(ALIGN, 1 << (size.bit_length() - 4))
    return -(-size // grain) * grain


def _build(shapes: StepShapes) -> Variant:
    table = Resident("state", field="table")
    rows = Resident("state", field="rows")
    return Variant(
        functools.partial(update_slots, shapes.row_writes, local=shapes.replicated),
        takes=(table, rows, shapes.host_buffer(buffer_size(shapes, None))),
        gives=(table, rows),
    )


PROGRAM = Program("update_slots", sizes=lambda shapes: [()], build=_build, runs=generates)
