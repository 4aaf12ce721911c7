"""Forwards: one token for each running request, and prompt chunks with decode rows beside them.

Each runs on every device, over the device's own heads, inner widths and share of the vocabulary.
Where the layers are divided into stages, each stage has forwards of its own: all but the first take
the hidden states that the stage before has handed on, and all but the last hand theirs on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.cache.kv import DROP_PAGE, KVCache, PagedContext, PagedInputs
from jaxllm.engine.runtime.packing import ChunkLayout
from jaxllm.engine.runtime.program import (
    KV,
    PEERS,
    STATE,
    WEIGHTS,
    Program,
    Resident,
    Variant,
    always,
    generates,
)
from jaxllm.engine.runtime.programs.update_slots import buffer_size, head_layout, updated
from jaxllm.engine.runtime.shapes import Model, StepShapes
from jaxllm.engine.runtime.state import (
    PROGRESS,
    SLOT_PARAMS,
    ForwardOutput,
    SlotState,
    device_columns,
    pack_progress,
)
from jaxllm.engine.scheduling.buckets import ExtendShape


def decode(
    model: Model,
    rows: int,
    weights: tuple[Array, ...],
    kv: KVCache,
    state: SlotState,
    reused: ForwardOutput,
    *handed: Array,
) -> tuple[KVCache, ForwardOutput]:
    """One token for each of B = `rows` rows. `reused` gives the buffers, and the logits of the rows
    beyond them."""
    given, context = _decode_context(model, rows, kv, state)
    module = model.rebuild(weights)
    carry = module.through_attention(given.token, given.position, context, *handed)
    hidden = module.after_attention(carry, context)
    spare = reused.logits.shape[0] - rows
    slots = jnp.pad(given.slots, (0, spare), constant_values=state.rows.shape[0])
    logits = jax.lax.dynamic_update_slice(reused.logits, module.logits(hidden, context), (0, 0))
    return context.kv, ForwardOutput(logits, slots, jnp.pad(given.alive, (0, spare)))


def hand_decode(
    model: Model,
    rows: int,
    weights: tuple[Array, ...],
    kv: KVCache,
    state: SlotState,
    *handed: Array,
) -> tuple[KVCache, Array]:
    """`decode` of a stage that is not the last: what it hands on, [B, D]."""
    given, context = _decode_context(model, rows, kv, state)
    module = model.rebuild(weights)
    carry = module.through_attention(given.token, given.position, context, *handed)
    return context.kv, module.handed(carry, context)


def _decode_context(
    model: Model, rows: int, kv: KVCache, state: SlotState
) -> tuple[DecodeRows, PagedContext]:
    given = DecodeRows.read(state, rows, kv, model.page_size)
    empty = jnp.zeros((0,), jnp.int32)
    inputs = [
        PagedInputs(
            decode_tables_BM=table,
            decode_lengths_B=given.lengths,
            chunk_tables_RM=jnp.zeros((0, table.shape[1]), jnp.int32),
            chunk_starts_R=empty,
            chunk_lengths_R=empty,
            chunk_kv_lengths_R=empty,
            write_page_T=page,
            write_offset_T=given.offset,
        )
        for table, page in zip(given.tables, given.pages, strict=True)
    ]
    return given, model.context(kv, inputs, given.prompt_length)


def extend(
    model: Model,
    layout: ChunkLayout,
    weights: tuple[Array, ...],
    kv: KVCache,
    state: SlotState,
    staged: Array,
    reused: ForwardOutput,
    hidden_states: Array,
    *handed: Array,
) -> tuple[KVCache, SlotState, ForwardOutput, Array]:
    """Decode rows and the chunks of `staged` in one forward; `reused` gives its buffers. `staged`
    is on the device: what `update_slots` takes, then the packed chunks.

    After the last attention layer, only rows that need logits continue. The carry of the chunk
    tokens stays in `hidden_states`, which serves all shapes.
    """
    shape = layout.shape
    state, batch = _admit(layout, kv, state, staged)
    given, context = _extend_context(model, shape, kv, state, batch)
    module = model.rebuild(weights)
    carry = module.through_attention(*_extend_tokens(given, batch), context, *handed)
    picked, slots, emit = _logit_rows(layout, state, given, batch)
    hidden = module.after_attention(carry.rows(picked), context)
    hidden_states = jax.lax.dynamic_update_slice(
        hidden_states, carry.packed(model.collective)[shape.decodes :], (0, 0)
    )
    output = ForwardOutput(module.logits(hidden, context), slots, emit)
    return context.kv, state, output, hidden_states


def _logit_rows(
    layout: ChunkLayout, state: SlotState, given: DecodeRows, batch: dict[str, Array]
) -> tuple[Array, Array, Array]:
    """Of each row of logits: the token whose hidden state it is made of, its slot, and whether a
    token is drawn from it."""
    shape = layout.shape
    unused = state.rows.shape[0]
    last = shape.decodes + jnp.maximum(batch["start"] + batch["length"] - 1, 0)
    spare = max(0, layout.logit_rows - shape.decodes - shape.chunks)
    trash = jnp.full((spare,), unused, jnp.int32)
    picked = jnp.concatenate(
        [jnp.arange(shape.decodes, dtype=jnp.int32), last, jnp.zeros_like(trash)]
    )
    slots = jnp.concatenate([given.slots, batch["slot"], trash])
    emit = jnp.concatenate([given.alive, batch["final"] != 0, jnp.zeros((spare,), jnp.bool_)])
    if not layout.closes_gaps:
        return picked, slots, emit
    decodes = jnp.sum(given.slots < unused)
    chunks = jnp.sum(batch["slot"] < unused)
    row = jnp.arange(layout.logit_rows, dtype=jnp.int32)
    is_used = row < decodes + chunks
    place = jnp.where(row < decodes, row, row + shape.decodes - decodes)
    place = jnp.where(is_used, place, 0)
    return picked[place], jnp.where(is_used, slots[place], unused), emit[place] & is_used


def hand_extend(
    model: Model,
    layout: ChunkLayout,
    weights: tuple[Array, ...],
    kv: KVCache,
    state: SlotState,
    staged: Array,
    *handed: Array,
) -> tuple[KVCache, SlotState, Array]:
    """`extend` of a stage that is not the last: what it hands on of every token, [B + T, D]."""
    state, batch = _admit(layout, kv, state, staged)
    given, context = _extend_context(model, layout.shape, kv, state, batch)
    module = model.rebuild(weights)
    carry = module.through_attention(*_extend_tokens(given, batch), context, *handed)
    return context.kv, state, module.handed(carry, context)


def _extend_context(
    model: Model, shape: ExtendShape, kv: KVCache, state: SlotState, batch: dict[str, Array]
) -> tuple[DecodeRows, PagedContext]:
    given = DecodeRows.read(state, shape.decodes, kv, model.page_size)
    inputs = _paged_inputs(given, batch, kv, model.page_size)
    return given, model.context(kv, inputs, _prompt_lengths(given, batch, shape))


def _extend_tokens(given: DecodeRows, batch: dict[str, Array]) -> tuple[Array, Array]:
    """Tokens and positions of the decode rows, then of the chunks."""
    token = jnp.concatenate([given.token, batch["token"]])
    return token, jnp.concatenate([given.position, batch["position"]])


def _paged_inputs(
    given: DecodeRows, batch: dict[str, Array], kv: KVCache, page_size: int
) -> list[PagedInputs]:
    """Inputs of each cache group: decode rows, then chunks."""
    write_pages, write_offset = chunk_writes(batch, kv, page_size)
    return [
        PagedInputs(
            decode_tables_BM=decode_table,
            decode_lengths_B=given.lengths,
            chunk_tables_RM=chunk_table,
            chunk_starts_R=batch["start"],
            chunk_lengths_R=batch["length"],
            chunk_kv_lengths_R=batch["kv_length"],
            write_page_T=jnp.concatenate(pages),
            write_offset_T=jnp.concatenate([given.offset, write_offset]),
        )
        for decode_table, chunk_table, pages in zip(
            given.tables,
            split_tables(batch["table"], kv),
            zip(given.pages, write_pages, strict=True),
            strict=True,
        )
    ]


def _prompt_lengths(given: DecodeRows, batch: dict[str, Array], shape: ExtendShape) -> Array:
    """[T] prompt length of each token's request."""
    of_chunks = device_columns(batch["params"], SLOT_PARAMS)["prompt_length"]
    of_tokens = of_chunks[jnp.minimum(batch["row"], shape.chunks - 1)]
    return jnp.concatenate([given.prompt_length, of_tokens])


def chunk_writes(batch: dict[str, Array], kv: KVCache, page_size: int) -> tuple[list[Array], Array]:
    """For every chunk token: page, of each cache group, and offset. Padding tokens (row R) and
    tokens whose KV exists already are dropped."""
    table, row, position = batch["table"], batch["row"], batch["position"]
    own = jnp.minimum(row, table.shape[0] - 1)
    owned = [table[own, index] for index in table_columns(position // page_size, table, kv)]
    new = (row < table.shape[0]) & (position >= batch["kept"][own])
    return [jnp.where(new, page, DROP_PAGE) for page in owned], position % page_size


def _admit(
    layout: ChunkLayout, kv: KVCache, state: SlotState, staged: Array
) -> tuple[SlotState, dict[str, Array]]:
    """The state with what the step brings, and the arrays of its chunks. Their slots' whole state
    is written; they come alive with their first token."""
    groups = len(kv.num_pages)
    head = head_layout(state.rows.shape[0], groups).size
    table, rows = updated(groups, state.table, state.rows, staged[:head])
    batch = layout.arrays.unpack(staged[head:])
    slot, none = batch["slot"], jnp.zeros_like(batch["slot"])
    new = pack_progress(
        token=none,
        position=batch["kv_length"] - 1,
        alive=none,
        remaining=batch["remaining"],
        min_left=batch["min_left"],
    )
    state = state._replace(
        rows=rows,
        progress=state.progress.at[slot].set(new),
        params=state.params.at[slot].set(batch["params"]),
        table=table.at[slot].set(batch["table"]),
    )
    return state, batch


@dataclass(frozen=True)
class DecodeRows:
    """The decode rows of a step as they stand in the slot state, B rows.

    Attributes:
        slots: slot of each row.
        alive: whether it generates.
        token: its input token.
        position: position of that token.
        tables: for each cache group `[B, M]`, the row's page table.
        pages: for each cache group, the page that gets the token's KV.
        offset: offset in that page.
        lengths: tokens to attend to, this one included; 0 for rows that are not alive.
        prompt_length: length of the request's prompt.
    """

    slots: Array
    alive: Array
    token: Array
    position: Array
    tables: list[Array]
    pages: list[Array]
    offset: Array
    lengths: Array
    prompt_length: Array

    @staticmethod
    def read(state: SlotState, rows: int, kv: KVCache, page_size: int) -> DecodeRows:
        """The first `rows` rows. Rows that are not alive write to no page."""
        slots = state.rows[:rows]
        now = device_columns(state.progress[slots], PROGRESS)
        alive, position = now["alive"], now["position"]
        owned = [
            state.table[slots, index]
            for index in table_columns(position // page_size, state.table, kv)
        ]
        return DecodeRows(
            slots=slots,
            alive=alive,
            token=jnp.maximum(now["token"], 0),
            position=position,
            tables=split_tables(state.table[slots], kv),
            pages=[jnp.where(alive, page, DROP_PAGE) for page in owned],
            offset=position % page_size,
            lengths=jnp.where(alive, position + 1, 0),
            prompt_length=device_columns(state.params[slots], SLOT_PARAMS)["prompt_length"],
        )


def split_tables(table_RM: Array, kv: KVCache) -> list[Array]:
    """The page tables of each cache group, which stand side by side."""
    groups = len(kv.num_pages)
    return [table_RM] if groups == 1 else jnp.split(table_RM, groups, axis=1)


def table_columns(index: Array, table: Array, kv: KVCache) -> list[Array]:
    """For each cache group, the column of a page table that holds page `index` of a sequence."""
    groups = len(kv.num_pages)
    width = table.shape[1] // groups
    return [index + group * width if group else index for group in range(groups)]


def _build_decode(shapes: StepShapes, rows: int) -> Variant:
    if not shapes.stage.is_last:
        takes = (WEIGHTS, KV, STATE, *_handed(shapes, rows))
        return _per_device(shapes, hand_decode, rows, takes, (KV, shapes.replicated))
    output = Resident("forward_output", shapes.buckets.logit_rows(rows))
    takes = (WEIGHTS, KV, STATE, output, *_handed(shapes, rows))
    return _per_device(shapes, decode, rows, takes, (KV, output))


def _build_extend(shapes: StepShapes, tokens: int, chunks: int, decodes: int) -> Variant:
    layout = shapes.chunk_layouts[ExtendShape(tokens, chunks, decodes)]
    takes = (WEIGHTS, KV, STATE, shapes.host_buffer(buffer_size(shapes, layout)))
    handed = _handed(shapes, tokens + decodes)
    if not shapes.stage.is_last:
        gives = (KV, STATE, shapes.replicated)
        return _brought(shapes, hand_extend, layout, (*takes, *handed), gives)
    output, hidden = Resident("forward_output", layout.logit_rows), Resident("hidden_states")
    takes = (*takes, output, hidden, *handed)
    return _brought(shapes, extend, layout, takes, (KV, STATE, output, hidden))


def _brought(
    shapes: StepShapes,
    forward: Callable,
    layout: ChunkLayout,
    takes: tuple[Any, ...],
    gives: tuple[Any, ...],
) -> Variant:
    """A forward with what the host brings to it: its fourth argument is copied to the device.

    So a step with chunks is one launch. Of two devices another one would take half a millisecond.
    """
    variant = _per_device(shapes, forward, layout, takes, gives)

    def function(weights: Any, kv: Any, state: Any, buffer: Array, *rest: Any) -> Any:
        staged = jax.device_put(buffer, shapes.replicated)
        return variant.function(weights, kv, state, staged, *rest)

    function.__name__ = forward.__name__  # profiles show it
    return replace(variant, function=function)


def _handed(shapes: StepShapes, tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What a forward of so many tokens takes of the stage before, if there is one."""
    return () if shapes.stage.is_first else (shapes.handed(tokens),)


def _per_device(
    shapes: StepShapes,
    forward: Callable,
    size: int | ChunkLayout,
    takes: tuple[Any, ...],
    gives: tuple[Any, ...],
) -> Variant:
    """A forward on every device, over the device's own arrays."""
    function: Callable = functools.partial(forward, shapes.model, size)
    if shapes.peers:
        takes = (*takes, PEERS)

        @functools.wraps(forward)
        def function(*arrays: Any) -> Any:
            return forward(shapes.model.with_peers(arrays[-1]), size, *arrays[:-1])

    given, made = (
        tuple(at.shapes(shapes) if isinstance(at, Resident) else at for at in side)
        for side in (takes, gives)
    )
    return Variant(shapes.per_device(function, given, made), takes, gives)


def _extend_sizes(shapes: StepShapes) -> list[tuple[int, ...]]:
    """Shapes with two attention kernels first, then the largest."""
    found = sorted(shapes.buckets.extend, key=lambda s: (not s.decodes, -s.tokens))
    return [(s.tokens, s.chunks, s.decodes) for s in found]


DECODE = Program(
    "decode",
    sizes=lambda shapes: [(rows,) for rows in sorted(shapes.buckets.decode)],
    build=_build_decode,
    rank=2,
    is_kept=always,
    has_products=True,
    runs=generates,
    is_first=lambda shapes, sizes: sizes[0] in shapes.buckets.first.decode,
)
EXTEND = Program(
    "extend",
    sizes=_extend_sizes,
    build=_build_extend,
    rank=0,
    is_kept=always,
    has_products=True,
    rows=lambda sizes: sizes[0] + sizes[2],
    runs=generates,
    is_first=lambda shapes, sizes: ExtendShape(*sizes) in shapes.buckets.first.extend,
)
