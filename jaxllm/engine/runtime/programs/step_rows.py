"""The rows that a forward computes: of decoding requests, and of prompt chunks beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.cache.arrays import DROP_PAGE, KVCache, page_counts
from jaxllm.cache.kv import PagedContext
from jaxllm.cache.states import StateInputs
from jaxllm.cache.step import PagedInputs
from jaxllm.engine.runtime.packing import ChunkLayout
from jaxllm.engine.runtime.program import STATE, Resident
from jaxllm.engine.runtime.programs.update_slots import head_layout, updated
from jaxllm.engine.runtime.shapes import Model
from jaxllm.engine.runtime.state import (
    PROGRESS,
    SLOT_PARAMS,
    SlotState,
    device_columns,
    pack_progress,
)
from jaxllm.engine.scheduling.buckets import ExtendShape
from jaxllm.nn.row_facts import RowFacts, facts_of


@dataclass(frozen=True)
class StepRows:
    """The rows of a step inside a trace: B decode rows, then the tokens of chunks, T in all.

    Attributes:
        decodes: the decode rows.
        batch: arrays of the chunks; empty without chunks.
        facts: what is known of each row.
        context: what they attend with.
        trash_slot: the slot of rows that are padding.
        state: what changes in the slot state: the new one, or nothing.
    """

    decodes: DecodeRows
    batch: dict[str, Array]
    facts: RowFacts
    context: PagedContext
    trash_slot: int
    state: tuple[SlotState, ...]


@dataclass(frozen=True)
class Decodes:
    """One token for each of `count` rows."""

    count: int
    takes: tuple[jax.ShapeDtypeStruct, ...] = ()
    gives: tuple[Resident, ...] = ()

    @property
    def tokens(self) -> int:
        """T."""
        return self.count

    def read(self, model: Model, kv: KVCache, state: SlotState) -> StepRows:
        """The rows as they stand in the slot state."""
        decodes = DecodeRows.read(state, self.count, kv, model.page_size)
        empty = jnp.zeros((0,), jnp.int32)
        inputs = [
            PagedInputs(
                decode_tables_BM=table,
                decode_lengths_B=decodes.lengths,
                chunk_tables_RM=jnp.zeros((0, table.shape[1]), jnp.int32),
                chunk_starts_R=empty,
                chunk_lengths_R=empty,
                chunk_kv_lengths_R=empty,
                write_page_T=page,
                write_offset_T=decodes.offset,
            )
            for table, page in zip(decodes.tables, decodes.pages, strict=True)
        ]
        states = state_inputs(decodes, kv, trash_slot=state.rows.shape[0])
        context = model.context(kv, [*inputs, *states], decodes.prompt_length)
        return StepRows(
            decodes=decodes,
            batch={},
            facts=facts_of(decodes.token, decodes.position),
            context=context,
            trash_slot=state.rows.shape[0],
            state=(),
        )


@dataclass(frozen=True)
class Chunks:
    """Decode rows and the prompt chunks of `buffer`, which the host fills: what `update_slots`
    takes, then the packed chunks."""

    layout: ChunkLayout
    buffer: jax.ShapeDtypeStruct
    gives: tuple[Resident, ...] = (STATE,)

    @property
    def takes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What it reads beside weights, pages and state."""
        return (self.buffer,)

    @property
    def tokens(self) -> int:
        """T."""
        return self.layout.shape.decodes + self.layout.shape.tokens

    def read(self, model: Model, kv: KVCache, state: SlotState, staged: Array) -> StepRows:
        """The rows, with the slots of the chunks written. `staged` is the buffer on the device."""
        shape = self.layout.shape
        state, batch = _admit(self.layout, kv, state, staged)
        decodes = DecodeRows.read(state, shape.decodes, kv, model.page_size)
        inputs = _paged_inputs(decodes, batch, kv, model.page_size)
        states = state_inputs(decodes, kv, state.rows.shape[0], batch)
        lengths = _prompt_lengths(decodes, batch, shape)
        context = model.context(kv, [*inputs, *states], lengths)
        return StepRows(
            decodes=decodes,
            batch=batch,
            facts=facts_of(
                jnp.concatenate([decodes.token, batch["token"]]),
                jnp.concatenate([decodes.position, batch["position"]]),
            ),
            context=context,
            trash_slot=state.rows.shape[0],
            state=(state,),
        )


type RowSource = Decodes | Chunks


def _paged_inputs(
    decodes: DecodeRows, batch: dict[str, Array], kv: KVCache, page_size: int
) -> list[PagedInputs]:
    """Inputs of each cache group: decode rows, then chunks."""
    write_pages, write_offset = chunk_writes(batch, kv, page_size)
    return [
        PagedInputs(
            decode_tables_BM=decode_table,
            decode_lengths_B=decodes.lengths,
            chunk_tables_RM=chunk_table,
            chunk_starts_R=batch["start"],
            chunk_lengths_R=batch["length"],
            chunk_kv_lengths_R=batch["kv_length"],
            write_page_T=jnp.concatenate(pages),
            write_offset_T=jnp.concatenate([decodes.offset, write_offset]),
        )
        for decode_table, chunk_table, pages in zip(
            decodes.tables,
            split_tables(batch["table"], kv),
            zip(decodes.pages, write_pages, strict=True),
            strict=True,
        )
    ]


def state_inputs(
    decodes: DecodeRows, kv: KVCache, trash_slot: int, batch: Mapping[str, Array] | None = None
) -> list[StateInputs]:
    """Inputs of each cache group with states: decode rows, then the chunks of a batch."""
    count = len(kv) - len(page_counts(kv))
    if not count:
        return []
    none = jnp.zeros((0,), jnp.int32)
    inputs = StateInputs(
        decode_slots_B=jnp.where(decodes.alive, decodes.slots, trash_slot),
        chunk_slots_R=none if batch is None else batch["slot"],
        chunk_begins_R=none == 0 if batch is None else batch["kv_length"] == batch["length"],
        chunk_row_T=none if batch is None else batch["row"],
    )
    return [inputs] * count


def _prompt_lengths(decodes: DecodeRows, batch: dict[str, Array], shape: ExtendShape) -> Array:
    """[T] prompt length of each token's request."""
    of_chunks = device_columns(batch["params"], SLOT_PARAMS)["prompt_length"]
    of_tokens = of_chunks[jnp.minimum(batch["row"], shape.chunks - 1)]
    return jnp.concatenate([decodes.prompt_length, of_tokens])


def chunk_writes(batch: dict[str, Array], kv: KVCache, page_size: int) -> tuple[list[Array], Array]:
    """For every chunk token: page, of each cache group, and offset. Padding tokens (row R) and
    tokens whose KV exists already are dropped."""
    table = batch["table"]
    row = batch["row"]
    position = batch["position"]
    chunk = jnp.minimum(row, table.shape[0] - 1)
    pages = [table[chunk, index] for index in table_columns(position // page_size, table, kv)]
    new = (row < table.shape[0]) & (position >= batch["kept"][chunk])
    return [jnp.where(new, page, DROP_PAGE) for page in pages], position % page_size


def _admit(
    layout: ChunkLayout, kv: KVCache, state: SlotState, staged: Array
) -> tuple[SlotState, dict[str, Array]]:
    """The state with what the step brings, and the arrays of its chunks. Their slots' whole state
    is written; they come alive with their first token."""
    groups = len(page_counts(kv))
    head = head_layout(state.rows.shape[0], groups).size
    table, rows = updated(groups, state.table, state.rows, staged[:head])
    batch = layout.arrays.unpack(staged[head:])
    slot = batch["slot"]
    none = jnp.zeros_like(slot)
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
        alive = now["alive"]
        position = now["position"]
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
    groups = len(page_counts(kv))
    return [table_RM] if groups == 1 else jnp.split(table_RM, groups, axis=1)


def table_columns(index: Array, table: Array, kv: KVCache) -> list[Array]:
    """For each cache group, the column of a page table that holds page `index` of a sequence."""
    groups = len(page_counts(kv))
    width = table.shape[1] // groups
    return [index + group * width if group else index for group in range(groups)]
