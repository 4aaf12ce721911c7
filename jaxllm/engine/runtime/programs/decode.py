"""Forward of one token for each running request."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.cache.kv import KVCache, PagedContext, PagedInputs
from jaxllm.engine.runtime.program import KV, STATE, WEIGHTS, Program, Resident, Variant, always
from jaxllm.engine.runtime.shapes import Model, StepShapes
from jaxllm.engine.runtime.state import DecodeRows, ForwardOutput, SlotState


def decode(
    model: Model,
    rows: int,
    weights: tuple[Array, ...],
    kv: KVCache,
    state: SlotState,
    reused: ForwardOutput,
) -> tuple[KVCache, ForwardOutput]:
    """One token for each of B = `rows` rows. `reused` gives the buffers, and the logits of the rows
    beyond them."""
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
    context = PagedContext(
        kv, inputs, model.backend, model.mesh, given.prompt_length, model.batch_invariant
    )
    module = model.rebuild(weights)
    hidden = module(given.token, given.position, context)
    spare = reused.logits.shape[0] - rows
    slots = jnp.pad(given.slots, (0, spare), constant_values=state.rows.shape[0])
    logits = jax.lax.dynamic_update_slice(reused.logits, module.logits(hidden), (0, 0))
    return context.kv, ForwardOutput(logits, slots, jnp.pad(given.alive, (0, spare)))


def _build(shapes: StepShapes, rows: int) -> Variant:
    output = Resident("forward_output", shapes.buckets.logit_rows(rows))
    return Variant(
        functools.partial(decode, shapes.model, rows),
        takes=(WEIGHTS, KV, STATE, output),
        gives=(KV, output),
    )


PROGRAM = Program(
    "decode",
    sizes=lambda shapes: [(rows,) for rows in sorted(shapes.buckets.decode)],
    build=_build,
    rank=2,
    is_kept=always,
    has_products=True,
)
