"""Forward of a pooling model: prompt chunks to one vector for each."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding

from jaxllm.cache.arrays import KVCache
from jaxllm.cache.step import PagedInputs
from jaxllm.engine.runtime.packing import ChunkLayout
from jaxllm.engine.runtime.program import KV, WEIGHTS, Program, Variant, always
from jaxllm.engine.runtime.programs.step_rows import chunk_writes, split_tables
from jaxllm.engine.runtime.shapes import Model, StepShapes
from jaxllm.engine.runtime.state import SLOT_PARAMS, device_columns
from jaxllm.engine.scheduling.buckets import ExtendShape


def pool(
    pooled: Callable,
    weights: tuple[Array, ...],
    kv: KVCache,
    buffer: Array,
    *,
    local: NamedSharding,
) -> tuple[KVCache, Array]:
    """`pooled_chunks` of a buffer that the host filled."""
    return pooled(weights, kv, jax.device_put(buffer, local))


def pooled_chunks(
    model: Model, layout: ChunkLayout, weights: tuple[Array, ...], kv: KVCache, buffer: Array
) -> tuple[KVCache, Array]:
    """The chunks of `buffer` in one forward: the pages, and float32 `[R, E]`, the vector of each
    chunk. That of a chunk that is not its prompt's last means nothing."""
    batch = layout.arrays.unpack(buffer)
    tables = split_tables(batch["table"], kv)
    pages, offset = chunk_writes(batch, kv, model.page_size)
    none = jnp.zeros((0,), jnp.int32)
    inputs = [
        PagedInputs(
            decode_tables_BM=jnp.zeros((0, table.shape[1]), jnp.int32),
            decode_lengths_B=none,
            chunk_tables_RM=table,
            chunk_starts_R=batch["start"],
            chunk_lengths_R=batch["length"],
            chunk_kv_lengths_R=batch["kv_length"],
            write_page_T=page,
            write_offset_T=offset,
        )
        for table, page in zip(tables, pages, strict=True)
    ]
    prompt_length_R = device_columns(batch["params"], SLOT_PARAMS)["prompt_length"]
    prompt_length_T = prompt_length_R[jnp.minimum(batch["row"], layout.shape.chunks - 1)]
    context = model.context(kv, inputs, prompt_length_T)
    module = model.rebuild(weights)
    vectors = module(batch["token"], batch["position"], batch["start"], batch["length"], context)
    return context.kv, vectors


def _build(shapes: StepShapes, tokens: int, chunks: int) -> Variant:
    layout = shapes.chunk_layouts[ExtendShape(tokens, chunks, 0)]
    staged = shapes.array((layout.arrays.size,), jnp.int32)
    pooled = shapes.per_device(
        functools.partial(pooled_chunks, shapes.model, layout),
        (shapes.weights, shapes.kv, staged),
        (shapes.kv, shapes.replicated),
    )
    return Variant(
        functools.partial(pool, pooled, local=shapes.replicated),
        takes=(WEIGHTS, KV, shapes.host_buffer(layout.arrays.size)),
        gives=(KV, shapes.host),
    )


PROGRAM = Program(
    "pool",
    sizes=lambda shapes: [(s.tokens, s.chunks) for s in reversed(shapes.buckets.extend)],
    build=_build,
    rank=0,
    is_kept=always,
    has_products=True,
    runs=lambda shapes: shapes.pooling is not None and not shapes.pooling.bidirectional,
)
