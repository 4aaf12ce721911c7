"""The compiled steps as pure functions: copy, ingest, decode, extend, process, sample, logprobs,
score. No Python state, no host values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding

from jaxllm.cache.kv import DROP_PAGE, KVCache, PagedContext, PagedInputs, RowKernels
from jaxllm.cache.transfer import Page, put, take
from jaxllm.engine.runtime.batch import ChunkLayout, Shapes, packed_size, unpack, update_shapes
from jaxllm.engine.runtime.state import PROGRESS, SLOT_PARAMS, SlotState, columns_of
from jaxllm.sampling.logprobs import packed_logprobs, processed
from jaxllm.sampling.process import LogitsParams, ProcessRows, process, set_slot_params
from jaxllm.sampling.processor_arguments import Processor
from jaxllm.sampling.sample import Sampler, SamplingRows, draw_rows, sample

# Whose pages are copied together: all of a large model's would need more memory than a small step
LAYERS_AT_ONCE = 8


@dataclass(frozen=True)
class Model:
    """The static half of a model: how to rebuild it from its weight leaves inside a trace."""

    graphdef: nnx.GraphDef
    treedef: jax.tree_util.PyTreeDef
    mesh: Mesh
    backend: str
    page_size: int
    processors: tuple[Processor, ...] = ()
    # Attention divides no row, so that what a row gets does not depend on the others
    whole: bool = False

    def rebuild(self, weights: tuple[Array, ...]) -> nnx.Module:
        """The nnx module around these leaves."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, weights))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForwardOutput:
    """What a forward leaves for sampling, Q rows: B decode rows, R chunk rows, then padding, whose
    logits may be any finite ones.

    Every forward of Q rows is given the last one's buffers to write into, so that their addresses
    stay and recorded command buffers stay valid.
    """

    logits: Array  # [Q, V] float32
    slots: Array  # [Q] int32
    emit: Array  # [Q] bool: the row draws a token


def update_slots(
    kinds: int,
    table: Array,
    rows: Array,
    buffer: Array,
    staged: Array | None = None,
    *,
    local: NamedSharding,
) -> tuple[Array, ...]:
    """Take the row map, new pages and, for `staged`, packed chunks from the host: (table, rows) of
    the slot state, and the chunks for `extend`. `buffer` may lie in pinned host memory; `local` is
    where it is wanted.
    """
    shapes = update_shapes(rows.shape[0], kinds)
    head = packed_size(shapes)
    buffer = jax.device_put(buffer, local)
    new = unpack(buffer[:head], shapes)
    table = table.at[new["slot"], new["index"]].set(new["page"], mode="drop")
    return (table, new["rows"]) if staged is None else (table, new["rows"], buffer[head:])


def decode(
    model: Model,
    rows: int,
    logit_rows: int,
    weights: tuple[Array, ...],
    kv: KVCache,
    state: SlotState,
    reused: ForwardOutput,
) -> tuple[KVCache, ForwardOutput]:
    """One token for each of `rows` rows; `reused` gives the buffers of the `logit_rows` rows that
    are left, and what is not overwritten."""
    region = _decode_region(state, rows, kv, model.page_size)
    empty = jnp.zeros((0,), jnp.int32)
    inputs = [
        PagedInputs(
            decode_tables_BM=table,
            decode_lengths_B=region.lengths,
            chunk_tables_RM=jnp.zeros((0, table.shape[1]), jnp.int32),
            chunk_starts_R=empty,
            chunk_lengths_R=empty,
            chunk_kv_lengths_R=empty,
            write_page_T=page,
            write_offset_T=region.offset,
        )
        for table, page in zip(_tables(state.table[region.slots], kv), region.pages, strict=True)
    ]
    context = PagedContext(kv, inputs, model.backend, model.mesh, region.prompt_length, model.whole)
    module = model.rebuild(weights)
    hidden = module(region.token, region.position, context)
    spare = logit_rows - rows
    slots = jnp.pad(region.slots, (0, spare), constant_values=state.rows.shape[0])
    logits = jax.lax.dynamic_update_slice(reused.logits, module.logits(hidden), (0, 0))
    return context.kv, ForwardOutput(logits, slots, jnp.pad(region.alive, (0, spare)))


def extend(
    model: Model,
    layout: ChunkLayout,
    weights: tuple[Array, ...],
    kv: KVCache,
    state: SlotState,
    staged: Array,
    reused: ForwardOutput,
    states: Array,
) -> tuple[KVCache, SlotState, ForwardOutput, Array]:
    """Decode rows and the prompt chunks of `staged` in one forward; `reused` gives its buffers.
    Behind the last attention only the rows that get logits go on. What the chunk tokens were there
    is left in `states`, which serves all shapes."""
    del reused
    batch = unpack(staged, layout.shapes)
    state = _admit(state, batch)
    region = _decode_region(state, layout.shape.decodes, kv, model.page_size)
    write_pages, write_offset = _chunk_writes(batch, kv, model.page_size)
    inputs = [
        PagedInputs(
            decode_tables_BM=decode_table,
            decode_lengths_B=region.lengths,
            chunk_tables_RM=chunk_table,
            chunk_starts_R=batch["start"],
            chunk_lengths_R=batch["length"],
            chunk_kv_lengths_R=batch["kv_length"],
            write_page_T=jnp.concatenate(pages),
            write_offset_T=jnp.concatenate([region.offset, write_offset]),
        )
        for decode_table, chunk_table, pages in zip(
            _tables(state.table[region.slots], kv),
            _tables(batch["table"], kv),
            zip(region.pages, write_pages, strict=True),
            strict=True,
        )
    ]
    chunk_prompts = columns_of(batch["asks"], SLOT_PARAMS)["prompt_length"][
        jnp.minimum(batch["row"], layout.shape.chunks - 1)
    ]
    prompt_length = jnp.concatenate([region.prompt_length, chunk_prompts])
    context = PagedContext(kv, inputs, model.backend, model.mesh, prompt_length, model.whole)
    module = model.rebuild(weights)
    token = jnp.concatenate([region.token, batch["token"]])
    position = jnp.concatenate([region.position, batch["position"]])
    x_TD, delta_TD = module.begin(token, position, context)
    last = layout.shape.decodes + jnp.maximum(batch["start"] + batch["length"] - 1, 0)
    spare = layout.logit_rows - layout.shape.decodes - layout.shape.chunks
    trash = jnp.full((spare,), state.rows.shape[0], jnp.int32)
    picked = jnp.concatenate(
        [jnp.arange(layout.shape.decodes, dtype=jnp.int32), last, jnp.zeros_like(trash)]
    )
    slots = jnp.concatenate([region.slots, batch["slot"], trash])
    emit = jnp.concatenate([region.alive, batch["final"] != 0, jnp.zeros((spare,), jnp.bool_)])
    hidden = module.finish(x_TD[picked], delta_TD[picked], context)
    states = jax.lax.dynamic_update_slice(states, (x_TD + delta_TD)[layout.shape.decodes :], (0, 0))
    return context.kv, state, ForwardOutput(module.logits(hidden), slots, emit), states


def score(
    model: Model,
    mode: str,
    count: int,
    weights: tuple[Array, ...],
    states: Array,
    asked: Array,
    *,
    local: NamedSharding,
) -> Array:
    """`packed_logprobs` of `asked`, rows of `states` and their next tokens as int32 `[2·rows]`,
    which may lie in pinned host memory. A prompt is scored so many rows at a time, since its logits
    are much larger than its states."""
    row, token = jax.device_put(asked, local).reshape(2, -1)
    module = model.rebuild(weights)
    logits = module.logits(module.finish(states[row], None, RowKernels(model.backend, model.mesh)))
    return packed_logprobs(logits, token, count, normalised=mode.endswith("logprobs"))


def copy(kv: KVCache, buffer: Array, *, local: NamedSharding) -> KVCache:
    """Copy pages of every layer. `buffer` holds for each kind of layers so many sources, then as
    many targets, and may lie in pinned host memory; all sources are read before a target is
    written. A pair whose target is page `DROP_PAGE` does nothing."""
    rows = jax.device_put(buffer, local).reshape(len(kv.num_pages), 2, -1)

    def copied(kind: int, pages: Array) -> Array:
        source, target = (kv.places(kind, row) for row in rows[kind])
        for at in range(0, len(source), LAYERS_AT_ONCE):
            some = slice(at, at + LAYERS_AT_ONCE)
            pages = pages.at[target[some]].set(pages[source[some]], mode="drop")
        return pages

    return kv.each(copied)


def save(kv: KVCache, buffer: Array, *, local: NamedSharding) -> tuple[KVCache, tuple[Page, ...]]:
    """The pages that `buffer` numbers, which may lie in pinned host memory, as arrays of their
    own."""
    return take(kv, jax.device_put(buffer, local))


def load(
    kv: KVCache, buffer: Array, pages: tuple[Page, ...], *, local: NamedSharding
) -> tuple[KVCache, Array]:
    """Such arrays into the pages that `buffer` numbers. The last result tells that it is done."""
    return put(kv, jax.device_put(buffer, local), pages)


def set_slot(
    shapes: Shapes, local: NamedSharding, counts: Array, terms: LogitsParams, buffer: Array
) -> tuple[Array, LogitsParams, Array]:
    """Take from the host what the request in a slot asks of `process` and has said. The last result
    tells that the buffer was read."""
    new = unpack(jax.device_put(buffer, local), shapes)
    return *set_slot_params(counts, terms, new), new["slot"][0]


def apply_token_bitmask(
    shapes: Shapes, local: NamedSharding, terms: LogitsParams, buffer: Array
) -> tuple[LogitsParams, Array]:
    """Take from the host which tokens the requests of some slots may say next. The last result
    tells that the buffer was read."""
    new = unpack(jax.device_put(buffer, local), shapes)
    allowed = terms.allowed.at[new["slot"]].set(new["allowed"], mode="drop")
    return replace(terms, allowed=allowed), new["slot"][0]


def shape_logits(
    processors: tuple[Processor, ...],
    forward_output: ForwardOutput,
    state: SlotState,
    counts: Array,
    terms: LogitsParams,
    reused: Array,
) -> tuple[Array, Array]:
    """(counts, the logits that requests asked for); `reused` gives its buffer. Run in each step in
    which a request that asks emits, and only then: it counts the token that the step before drew
    for each decode row."""
    del reused
    slots = forward_output.slots
    now, asks = (
        columns_of(state.progress[slots], PROGRESS),
        columns_of(state.asks[slots], SLOT_PARAMS),
    )
    # A slot comes alive with the first token of this life, which its prompt's last chunk draws
    drew = forward_output.emit & now["alive"]
    rows = ProcessRows(
        slot_Q=slots,
        asks_Q=forward_output.emit & asks["processed"],
        drew_Q=drew,
        token_Q=now["token"],
        position_Q=now["position"] + 1,
        prompt_length_Q=asks["prompt_length"],
    )
    return process(forward_output.logits, rows, counts, terms, processors)


def draw(
    sampler: Sampler,
    backend: str,
    logits: Array,
    forward_output: ForwardOutput,
    progress: Array,
    asks: Array,
) -> tuple[Array, Array]:
    """Sample every row of `logits` (those of `forward_output`, or what `process` made of them) and
    advance the slots that emit: (progress, token of each row). A row that does not emit reads token
    -1 and changes nothing."""
    slots, emit = forward_output.slots, forward_output.emit
    now = columns_of(progress[slots], PROGRESS)
    rows = _sampling_rows(
        now["position"], columns_of(asks[slots], SLOT_PARAMS), now["min_left"] > 0
    )
    token = sample(logits, rows, sampler, backend)
    stopped = jnp.any(token[:, None] == rows.stop_ids_BK, axis=1) | (token < 0)
    remaining = now["remaining"] - 1
    new = _progress(
        token=token,
        position=rows.position_B,
        alive=~stopped & (remaining > 0),
        remaining=remaining,
        min_left=now["min_left"] - 1,
    )
    target = jnp.where(emit, slots, progress.shape[0])
    return progress.at[target].set(new, mode="drop"), jnp.where(emit, token, -1)


def logprobs(
    mode: str, count: int, logits: Array, forward_output: ForwardOutput, state: SlotState
) -> Array:
    """`packed_logprobs` of the tokens that `draw` has just drawn, with the `count` most likely
    ones; what a row that drew none reads is not theirs. `mode` is one of `config.LOGPROBS_MODES`;
    `logits` are those that `draw` was given where it is a processed one."""
    now = columns_of(state.progress[forward_output.slots], PROGRESS)
    if mode.startswith("processed"):
        asks = columns_of(state.asks[forward_output.slots], SLOT_PARAMS)
        # Before the draw
        rows = _sampling_rows(now["position"], asks, now["min_left"] + forward_output.emit > 0)
        logits = processed(logits, draw_rows(rows))
    return packed_logprobs(logits, now["token"], count, normalised=mode.endswith("logprobs"))


def _sampling_rows(position_Q: Array, asks: dict[str, Array], suppress_Q: Array) -> SamplingRows:
    """What requests ask for that are at these positions."""
    return SamplingRows(
        temperature_B=asks["temperature"],
        top_k_B=asks["top_k"],
        top_p_B=asks["top_p"],
        min_p_B=asks["min_p"],
        key_B2=asks["key"],
        position_B=position_Q + 1,
        stop_ids_BK=asks["stop_ids"],
        suppress_B=suppress_Q,
    )


@dataclass(frozen=True)
class _DecodeRegion:
    """Per decode row: slot, whether it generates, its token, position, where its KV goes in each
    kind of layers, its length with this token, and that of its prompt."""

    slots: Array
    alive: Array
    token: Array
    position: Array
    pages: list[Array]
    offset: Array
    lengths: Array
    prompt_length: Array


def _decode_region(state: SlotState, rows: int, kv: KVCache, page_size: int) -> _DecodeRegion:
    """Rows that are not alive write nowhere and attend to nothing."""
    slots = state.rows[:rows]
    now = columns_of(state.progress[slots], PROGRESS)
    alive, position = now["alive"], now["position"]
    owned = [
        state.table[slots, index] for index in _columns(position // page_size, state.table, kv)
    ]
    return _DecodeRegion(
        slots=slots,
        alive=alive,
        token=jnp.maximum(now["token"], 0),
        position=position,
        pages=[jnp.where(alive, page, DROP_PAGE) for page in owned],
        offset=position % page_size,
        lengths=jnp.where(alive, position + 1, 0),
        prompt_length=columns_of(state.asks[slots], SLOT_PARAMS)["prompt_length"],
    )


def _chunk_writes(
    batch: dict[str, Array], kv: KVCache, page_size: int
) -> tuple[list[Array], Array]:
    """Page, of each kind of layers, and offset of every chunk token; padding tokens (row R) go
    nowhere, and so do those whose KV is there already."""
    table, row, position = batch["table"], batch["row"], batch["position"]
    own = jnp.minimum(row, table.shape[0] - 1)
    owned = [table[own, index] for index in _columns(position // page_size, table, kv)]
    new = (row < table.shape[0]) & (position >= batch["kept"][own])
    return [jnp.where(new, page, DROP_PAGE) for page in owned], position % page_size


def _tables(table_RM: Array, kv: KVCache) -> list[Array]:
    """Page tables of each kind of layers, which stand side by side."""
    kinds = len(kv.num_pages)
    return [table_RM] if kinds == 1 else jnp.split(table_RM, kinds, axis=1)


def _columns(index: Array, table: Array, kv: KVCache) -> list[Array]:
    """Where in these page tables page `index` of a sequence stands, for each kind of layers."""
    kinds = len(kv.num_pages)
    return [index + kind * (table.shape[1] // kinds) if kind else index for kind in range(kinds)]


def _admit(state: SlotState, batch: dict[str, Array]) -> SlotState:
    """Write everything of the chunks' slots. They come alive when their first token is drawn."""
    slot, none = batch["slot"], jnp.zeros_like(batch["slot"])
    new = _progress(
        token=none,
        position=batch["kv_length"] - 1,
        alive=none,
        remaining=batch["remaining"],
        min_left=batch["min_left"],
    )
    return replace(
        state,
        progress=state.progress.at[slot].set(new),
        asks=state.asks.at[slot].set(batch["asks"]),
        table=state.table.at[slot].set(batch["table"]),
    )


def _progress(**columns: Array) -> Array:
    """Rows of the slots' progress, of its columns by name."""
    return jnp.stack([columns[name].astype(jnp.int32) for name in PROGRESS], axis=1)
