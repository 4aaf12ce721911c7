"""Forward of prompt chunks, with decode rows beside them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.cache.kv import DROP_PAGE, KVCache, PagedContext, PagedInputs
from jaxllm.engine.runtime.packing import ChunkLayout
from jaxllm.engine.runtime.program import KV, STATE, WEIGHTS, Program, Resident, Variant, always
from jaxllm.engine.runtime.shapes import Model, StepShapes
from jaxllm.engine.runtime.state import (
    SLOT_PARAMS,
    DecodeRows,
    ForwardOutput,
    SlotState,
    device_columns,
    pack_progress,
    split_tables,
    table_columns,
)
from jaxllm.engine.scheduling.buckets import ExtendShape


def extend(
    model: Model,
    layout: ChunkLayout,
    weights: tuple[Array, ...],
    kv: KVCache,
    state: SlotState,
    staged: Array,
    reused: ForwardOutput,
    hidden_states: Array,
) -> tuple[KVCache, SlotState, ForwardOutput, Array]:
    """Decode rows and the chunks of `staged` in one forward; `reused` gives its buffers.

    After the last attention layer, only rows that need logits continue. The residual stream of the
    chunk tokens stays in `hidden_states`, which serves all shapes.
    """
    del reused
    shape, batch = layout.shape, layout.arrays.unpack(staged)
    state = _admit(state, batch)
    given = DecodeRows.read(state, shape.decodes, kv, model.page_size)
    context = PagedContext(
        kv,
        _paged_inputs(given, batch, kv, model.page_size),
        model.backend,
        model.mesh,
        _prompt_lengths(given, batch, shape),
        model.batch_invariant,
    )
    module = model.rebuild(weights)
    token = jnp.concatenate([given.token, batch["token"]])
    position = jnp.concatenate([given.position, batch["position"]])
    x_TD, delta_TD = module.through_attention(token, position, context)
    last = shape.decodes + jnp.maximum(batch["start"] + batch["length"] - 1, 0)
    spare = layout.logit_rows - shape.decodes - shape.chunks
    trash = jnp.full((spare,), state.rows.shape[0], jnp.int32)
    picked = jnp.concatenate(
        [jnp.arange(shape.decodes, dtype=jnp.int32), last, jnp.zeros_like(trash)]
    )
    slots = jnp.concatenate([given.slots, batch["slot"], trash])
    emit = jnp.concatenate([given.alive, batch["final"] != 0, jnp.zeros((spare,), jnp.bool_)])
    hidden = module.after_attention(x_TD[picked], delta_TD[picked], context)
    hidden_states = jax.lax.dynamic_update_slice(
        hidden_states, (x_TD + delta_TD)[shape.decodes :], (0, 0)
    )
    output = ForwardOutput(module.logits(hidden), slots, emit)
    return context.kv, state, output, hidden_states


def _paged_inputs(
    given: DecodeRows, batch: dict[str, Array], kv: KVCache, page_size: int
) -> list[PagedInputs]:
    """Inputs of each cache group: decode rows, then chunks."""
    write_pages, write_offset = _chunk_writes(batch, kv, page_size)
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


def _chunk_writes(
    batch: dict[str, Array], kv: KVCache, page_size: int
) -> tuple[list[Array], Array]:
    """For every chunk token: page, of each cache group, and offset. Padding tokens (row R) and
    tokens whose KV exists already are dropped."""
    table, row, position = batch["table"], batch["row"], batch["position"]
    own = jnp.minimum(row, table.shape[0] - 1)
    owned = [table[own, index] for index in table_columns(position // page_size, table, kv)]
    new = (row < table.shape[0]) & (position >= batch["kept"][own])
    return [jnp.where(new, page, DROP_PAGE) for page in owned], position % page_size


def _admit(state: SlotState, batch: dict[str, Array]) -> SlotState:
    """Write the whole state of the chunks' slots. They come alive with their first token."""
    slot, none = batch["slot"], jnp.zeros_like(batch["slot"])
    new = pack_progress(
        token=none,
        position=batch["kv_length"] - 1,
        alive=none,
        remaining=batch["remaining"],
        min_left=batch["min_left"],
    )
    return state._replace(
        progress=state.progress.at[slot].set(new),
        params=state.params.at[slot].set(batch["params"]),
        table=state.table.at[slot].set(batch["table"]),
    )


def _build(shapes: StepShapes, tokens: int, chunks: int, decodes: int) -> Variant:
    layout = shapes.chunk_layouts[ExtendShape(tokens, chunks, decodes)]
    output, hidden = Resident("forward_output", layout.logit_rows), Resident("hidden_states")
    return Variant(
        functools.partial(extend, shapes.model, layout),
        takes=(WEIGHTS, KV, STATE, Resident("staged_chunks"), output, hidden),
        gives=(KV, STATE, output, hidden),
    )


def _sizes(shapes: StepShapes) -> list[tuple[int, ...]]:
    """Shapes with two attention kernels first, then the largest."""
    found = sorted(shapes.buckets.extend, key=lambda s: (not s.decodes, -s.tokens))
    return [(s.tokens, s.chunks, s.decodes) for s in found]


PROGRAM = Program(
    "extend",
    sizes=_sizes,
    build=_build,
    rank=0,
    is_kept=always,
    has_products=True,
    rows=lambda sizes: sizes[0] + sizes[2],
)
