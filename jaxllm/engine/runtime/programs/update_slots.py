"""Upload of a step's row map, page-table entries and, with chunks, their packed form."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jaxllm.engine.runtime.packing import Layout, Shapes
from jaxllm.engine.runtime.program import Program, Resident, Variant, generates
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


def pack_head(buffer: np.ndarray, plan: Plan, shapes: StepShapes) -> None:
    """Write row map and page-table entries of a plan into a zeroed buffer. Unused entries name the
    slot S + 1, which drops them."""
    slots, width = shapes.slots, shapes.table_width // shapes.num_groups
    arrays = head_layout(slots, shapes.num_groups).views(buffer)
    arrays["rows"][:] = slots
    arrays["rows"][: len(plan.decodes)] = plan.slots
    arrays["slot"][:] = slots + 1
    for at, (slot, column, page, group) in enumerate(plan.table_writes):
        arrays["slot"][at], arrays["index"][at] = slot, column + group * width
        arrays["page"][at] = page


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
