"""Attention of items over pages for TPU in Pallas: the `mosaic_tpu` back ends.

A grid step is one item of `pallas_kernels.items` and a block of KV heads. Asynchronous copies bring
a tile of several pages into one of two buffers while the kernel computes on the other. Tiles are
numbered through the whole grid: during an item's last tile the copies of the next item's first tile
run. An unused item costs an empty step.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels import items
from pallas_kernels.items import Items, sinks_of_places

LOG2E = math.log2(math.e)
# Finite, so that a query that has seen no key yet gives no NaN
HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)
LANES = 128
BUFFER_BYTES = 4 << 20  # two tiles of K and two of V; a TPU has 16 MiB of VMEM
TABLE_BYTES = 256 << 10  # a TPU has 1 MiB of scalar memory
FIELDS = 7  # scalars of an item that the kernel reads


@dataclass(frozen=True, kw_only=True)
class Spec(items.Spec):
    """Static parameters of the kernel.

    Attributes:
      heads: KV heads of a grid step.
      pages: pages of a tile.
      interpret: Pallas' `interpret`, for machines without a TPU.
    """

    heads: int
    pages: int
    interpret: Any


def check(q: Array, k_pages: Array, v_pages: Array) -> None:
    """Raise ValueError for shapes and types that the kernel does not support."""
    N, H = q.shape[1:]
    _, K, C, HK = k_pages.shape
    if (
        q.dtype not in (jnp.bfloat16, jnp.float32)
        or k_pages.dtype != q.dtype
        or v_pages.dtype != q.dtype
    ):
        raise ValueError(
            "mosaic_tpu takes bfloat16 or float32 throughout, "
            f"got q {q.dtype}, k {k_pages.dtype}, v {v_pages.dtype}"
        )
    if H % LANES or HK != H or v_pages.shape != k_pages.shape:
        raise ValueError(
            f"mosaic_tpu takes a head_dim that is a multiple of {LANES}, and equal K and V pools, "
            f"got q {q.shape}, k {k_pages.shape}, v {v_pages.shape}"
        )
    if C % sublanes(q.dtype):
        raise ValueError(
            f"mosaic_tpu takes pages of a multiple of {sublanes(q.dtype)} tokens in {q.dtype}, "
            f"got {C}"
        )
    if N % K:
        raise ValueError(
            f"mosaic_tpu takes a whole number of query heads a KV head, got {N} over {K}"
        )


def sublanes(dtype: DTypeLike) -> int:
    """Rows of a register tile for this type."""
    return 32 // jnp.dtype(dtype).itemsize


def row_groups(table: Array) -> list[slice]:
    """Slices of rows whose page tables fit scalar memory together."""
    rows, width = table.shape
    size = max(1, TABLE_BYTES // (4 * width))
    return [slice(start, start + size) for start in range(0, rows, size)]


def pages_per_tile(k_pages: Array, heads: int, max_tokens: int) -> int:
    """Pages in one tile of `heads` heads: as many as fit the buffers and `max_tokens` tokens, at
    least one."""
    _, _, C, H = k_pages.shape
    tokens = min(max_tokens, BUFFER_BYTES // (4 * heads * H * k_pages.dtype.itemsize))
    return max(1, tokens // C)


def attend(
    spec: Spec,
    q_WKRH: Array,
    k_pages: Array,
    v_pages: Array,
    table: Array,
    items: Items,
    sinks: Array | None,
) -> Array:
    """Attention of every item, `[W, K, R, H]`; `sinks` as in `AttentionOptions`. Raises ValueError
    for a page table that does not fit scalar memory."""
    W, K, R, H = q_WKRH.shape
    _, _, C, _ = k_pages.shape
    if table.size * 4 > TABLE_BYTES:
        raise ValueError(
            f"mosaic_tpu takes at most {TABLE_BYTES // 4} pages a request, got {table.shape[1]}"
        )

    def block(h: Array, i: Array, *_: Array) -> tuple[Array | int, ...]:
        return i, h, 0, 0

    places = pl.BlockSpec((1, spec.heads, R, H), block)
    pool = pl.BlockSpec(memory_space=pl.ANY)
    in_specs = [places, pool, pool]
    inputs = [q_WKRH, k_pages, v_pages]
    sinks_KR = sinks_of_places(sinks, K, spec.queries, R)
    if sinks_KR is not None:
        in_specs.append(pl.BlockSpec((spec.heads, R, LANES), lambda h, i, *_: (h, 0, 0)))
        inputs.append(jnp.broadcast_to(sinks_KR[:, :, None] * LOG2E, (K, R, LANES)))
    buffer = pltpu.VMEM((2, spec.heads, spec.pages, C, H), k_pages.dtype)
    column = pltpu.VMEM((spec.heads, R, LANES), jnp.float32)
    run = pl.pallas_call(
        functools.partial(_kernel, spec, table.shape[1], sinks_KR is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(K // spec.heads, W),
            in_specs=in_specs,
            out_specs=places,
            scratch_shapes=[
                *(buffer, buffer, pltpu.SemaphoreType.DMA((2, 2))),
                *(column, column, pltpu.VMEM((spec.heads, R, H), jnp.float32)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q_WKRH.shape, q_WKRH.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=spec.interpret,
        name="paged_attention",
    )
    return run(table.astype(jnp.int32).reshape(-1), _fields(spec, items, C), *inputs)


def _fields(spec: Spec, items: Items, page_size: int) -> Array:
    """The kernel's scalars, int32: `FIELDS` of each item, then the number of all tiles and the
    first item in use."""
    row_W, position_W, keys_W = items
    W = row_W.shape[0]
    if spec.window is None:
        first_W = jnp.zeros_like(keys_W)
    else:
        first_W = jnp.maximum(position_W - spec.window + 1, 0)
    page_W = first_W // page_size  # pages wholly before the window are not read
    end_W = -(-keys_W // page_size)
    tiles_W = jnp.where(keys_W > 0, -(-(end_W - page_W) // spec.pages), 0)
    until_W = jnp.cumsum(tiles_W, dtype=jnp.int32)
    live_W = jnp.where(tiles_W > 0, jnp.arange(W, dtype=jnp.int32), W)
    next_W = jnp.append(lax.cummin(live_W, reverse=True), W)
    fields = jnp.stack(
        [row_W, position_W, keys_W, page_W, tiles_W, until_W - tiles_W, next_W[1:]], axis=1
    )
    return jnp.concatenate([fields.reshape(-1), until_W[-1:], next_W[:1]]).astype(jnp.int32)


def _kernel(
    spec: Spec, width: int, sinks: bool, table_ref, items_ref, q_ref, k_ref, v_ref, *refs
) -> None:  # type: ignore[no-untyped-def]
    sinks_ref, refs = (refs[0], refs[1:]) if sinks else (None, refs)
    o_ref, k_buf, v_buf, arrived, top_ref, total_ref, mixed_ref = refs
    h = pl.program_id(0)
    i = pl.program_id(1)
    blocks = pl.num_programs(0)
    count = pl.num_programs(1)
    C = k_buf.shape[3]
    tokens = k_buf.shape[2] * k_buf.shape[3]
    row, position, keys, page, tiles, begin, following = (
        items_ref[i * FIELDS + f] for f in range(FIELDS)
    )
    all_tiles = items_ref[count * FIELDS]
    first_live = items_ref[count * FIELDS + 1]

    def copies(head, item, tile, slot, act) -> None:  # type: ignore[no-untyped-def]
        """Start or await the copies of the pages in use of one tile."""
        first_page = items_ref[item * FIELDS + 3] + tile * spec.pages
        used = jnp.minimum(spec.pages, pl.cdiv(items_ref[item * FIELDS + 2], C) - first_page)
        entry = items_ref[item * FIELDS] * width + first_page

        @pl.loop(0, used)
        def _(j) -> None:  # type: ignore[no-untyped-def]
            source = table_ref[entry + j], pl.ds(head * spec.heads, spec.heads)
            for side, (pages_ref, buf) in enumerate(((k_ref, k_buf), (v_ref, v_buf))):
                act(
                    pltpu.make_async_copy(
                        pages_ref.at[source], buf.at[slot, :, j], arrived.at[slot, side]
                    )
                )

    def start(head, item, tile, number) -> None:  # type: ignore[no-untyped-def]
        copies(head, item, tile, lax.rem(number, 2), lambda copy: copy.start())

    top_ref[...] = jnp.full_like(top_ref, -jnp.inf) if sinks_ref is None else sinks_ref[...]
    total_ref[...] = jnp.full_like(total_ref, 0.0 if sinks_ref is None else 1.0)
    mixed_ref[...] = jnp.zeros_like(mixed_ref)
    base = h * all_tiles + begin
    pl.when((base == 0) & (tiles > 0))(lambda: start(h, i, 0, base))

    @pl.loop(0, tiles)
    def _(t) -> None:  # type: ignore[no-untyped-def]
        slot = lax.rem(base + t, 2)
        another = following < count
        pl.when(t + 1 < tiles)(lambda: start(h, i, t + 1, base + t + 1))
        pl.when((t + 1 == tiles) & another)(lambda: start(h, following, 0, base + t + 1))
        pl.when((t + 1 == tiles) & ~another & (h + 1 < blocks))(
            lambda: start(h + 1, first_live, 0, base + t + 1)
        )
        copies(h, i, t, slot, lambda copy: copy.wait())
        first = (page + t * spec.pages) * C
        full = first + tokens <= position + 1
        if spec.window is not None:
            full &= first > position + spec.queries - 1 - spec.window
        fold = functools.partial(
            _fold, spec, q_ref, k_buf.at[slot], v_buf.at[slot], (top_ref, total_ref, mixed_ref)
        )
        pl.when(full)(lambda: fold(None))
        pl.when(~full)(lambda: fold((first, position, keys)))

    total = total_ref[..., :1]
    o_ref[0] = (mixed_ref[...] / jnp.where(total == 0.0, 1.0, total)).astype(o_ref.dtype)


def _fold(spec: Spec, q_ref, k_ref, v_ref, carry, edge) -> None:  # type: ignore[no-untyped-def]
    """Fold a tile into the running maximum, sum and weighted values. `edge` is (first key, first
    query, keys of the item) for a tile with hidden keys, else None."""
    top_ref, total_ref, mixed_ref = carry
    heads, pages, C, H = k_ref.shape
    tokens = pages * C
    precision = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None
    multiply = functools.partial(
        lax.dot_general, precision=precision, preferred_element_type=jnp.float32
    )
    k = k_ref[...].reshape(heads, tokens, H)
    v = v_ref[...].reshape(heads, tokens, H)
    scores = multiply(q_ref[0], k, (((2,), (2,)), ((0,), (0,))))
    if spec.softcap is None:
        scores *= spec.scale * LOG2E
    else:
        scores = jnp.tanh(scores * (spec.scale / spec.softcap)) * (spec.softcap * LOG2E)
    if edge is not None:
        first, position, keys = edge
        key = lax.broadcasted_iota(jnp.int32, scores.shape, 2) + first
        query = lax.broadcasted_iota(jnp.int32, scores.shape, 1) & (spec.queries - 1)
        seen = key <= query + position
        if spec.window is not None:
            seen &= key > query + (position - spec.window)
        scores = jnp.where(seen, scores, HIDDEN)
        # A page may hold NaN, and 0 · NaN is NaN
        valid = lax.broadcasted_iota(jnp.int32, v.shape, 1) + first < keys
        v = jnp.where(valid, v.astype(jnp.float32), 0.0).astype(v.dtype)
    old = top_ref[...]
    top = jnp.maximum(old, jnp.max(scores, axis=2, keepdims=True))
    weights = jnp.exp2(scores - top[..., :1])
    decay = jnp.exp2(old - top)
    top_ref[...] = top
    total_ref[...] = total_ref[...] * decay + jnp.sum(weights, axis=2, keepdims=True)
    mixed_ref[...] = mixed_ref[...] * decay[..., :1] + multiply(
        weights.astype(v.dtype), v, (((2,), (1,)), ((0,), (0,)))
    )
