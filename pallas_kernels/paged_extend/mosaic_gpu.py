"""Paged attention of ragged prompt chunks for NVIDIA Hopper in Pallas Mosaic GPU: causal after a cached prefix, compute-bound.

One block per (query tile, query head): a producer warpgroup walks the row's page table and fills a ring of K and V tiles by TMA; one or
two compute warpgroups of 64 queries each do flash attention and take turns on the tensor cores: one multiplies while the other does its
softmax.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_extend.plan import ExtendPlan, make_plan

ROWS = 64  # queries of one warpgroup
NEVER = -1e30  # running maximum before any key: finite, so that exp2(-inf - it) is 0 and not NaN
LOG2E = math.log2(math.e)


class Tuning(NamedTuple):
    """Sizes that change speed alone: keys of a tile, ring slots, compute warpgroups."""

    keys: int = 128
    stages: int = 2
    groups: int = 2


class _Spec(NamedTuple):
    """What one compiled kernel is specialised to."""

    T: int
    K: int
    G: int
    H: int
    C: int
    dtype: Any
    scale: float
    window: int | None
    softcap: float | None
    tuning: Tuning
    interpret: Any

    @property
    def tiled(self) -> tuple[Any, ...]:
        return plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)

    @property
    def width(self) -> int:
        """Columns of one plain buffer: layout inference of JAX 0.12 does not end on 256."""
        return min(self.H, 128)

    @property
    def copies(self) -> int:
        return max(1, self.tuning.keys // self.C)


@functools.cache
def default_tuning(head_dim: int) -> Tuning:
    """The sizes of `tuned/` for a head dimension; 227 KB of shared memory hold queries twice and the ring."""
    found = json.loads((pathlib.Path(__file__).parent / "tuned" / "nvidia_h200.json").read_text())["head_dim"]
    return Tuning(**found[str(head_dim)])


def plan(starts_R: Array, lengths_R: Array, kv_lengths_R: Array, *, tokens: int, head_dim: int, tuning: Tuning | None = None) -> ExtendPlan:
    """The work list of one step over `tokens` tokens, to be computed once and passed to every layer."""
    queries = ROWS * (tuning or default_tuning(head_dim)).groups
    return make_plan(starts_R, lengths_R, kv_lengths_R, tokens=max(tokens, queries), queries=queries)


def check(q: Array, k_pages: Array, v_pages: Array) -> None:
    """Raise ValueError for shapes and types that the kernel does not take."""
    T, N, H = q.shape
    P, K, C, HK = k_pages.shape
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k_pages.dtype != q.dtype or v_pages.dtype != q.dtype:
        raise ValueError(f"mosaic_gpu extend takes bfloat16 or float16 throughout, got q {q.dtype}, k {k_pages.dtype}, v {v_pages.dtype}")
    if H not in (64, 128, 256) or HK != H or v_pages.shape != k_pages.shape:
        raise ValueError(f"mosaic_gpu extend takes head_dim 64, 128 or 256 and equal K and V pools, got q {q.shape}, k {k_pages.shape}")
    if C not in (16, 32, 64, 128):
        raise ValueError(f"mosaic_gpu extend takes pages of 16, 32, 64 or 128 tokens, got {C}")
    if N % K:
        raise ValueError(f"mosaic_gpu extend takes a whole number of query heads a KV head, got {N} over {K}")


def extend_attention(
    q_TNH: Array,
    k_pages: Array,
    v_pages: Array,
    page_table_RM: Array,
    starts_R: Array,
    lengths_R: Array,
    kv_lengths_R: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    plan: ExtendPlan | None = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """See `pallas_kernels.paged_extend`. `plan` is this module's `plan(...)` for the same rows and tuning; None makes one.

    bfloat16 or float16; head_dim 64, 128, 256; pages of 16 to 128 tokens. Raises ValueError otherwise. `interpret` is a
    `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    check(q_TNH, k_pages, v_pages)
    T, N, H = q_TNH.shape
    _, K, C, _ = k_pages.shape
    tuning = tuning or default_tuning(H)
    queries = ROWS * tuning.groups
    padded = max(T, queries)
    if plan is None:
        plan = make_plan(starts_R, lengths_R, kv_lengths_R, tokens=padded, queries=queries)
    q = jnp.pad(q_TNH, ((0, padded - T), (0, 0), (0, 0)))
    spec = _Spec(padded, K, N // K, H, C, q.dtype, scale, window, softcap, tuning, interpret)
    return _attend(spec, q, k_pages, v_pages, page_table_RM.astype(jnp.int32), plan)[:T]


def _attend(spec: _Spec, q: Array, k_pages: Array, v_pages: Array, table: Array, plan: ExtendPlan) -> Array:
    """Launches one block per item and head; grid order keeps the heads of one item together, so that they share K and V in L2."""
    tuning, H = spec.tuning, spec.H

    def kernel(q_ref, k_ref, v_ref, table_ref, items_ref, o_ref, **sm):  # type: ignore[no-untyped-def]
        i, n, wg = lax.axis_index("item"), lax.axis_index("head"), lax.axis_index("wg")
        at, low, high, row, position, keys = (items_ref[i, c] for c in range(6))
        first = jnp.int32(0)
        if spec.window is not None:
            first = lax.div(jnp.maximum(position + low - at - spec.window + 1, 0), jnp.int32(tuning.keys))
        end = lax.div(keys + (tuning.keys - 1), jnp.int32(tuning.keys))

        @pl.when(high > low)
        def _item() -> None:
            @pl.when(wg == tuning.groups)
            def _() -> None:
                plgpu.set_max_registers(40, action="decrease")
                _produce(spec, k_ref, v_ref, table_ref, (row, lax.div(n, jnp.int32(spec.G)), keys, first, end), sm)

            @pl.when(wg < tuning.groups)
            def _() -> None:
                plgpu.set_max_registers(232, action="increase")
                io = sm["io"].at[wg]
                _load_queries(spec, q_ref.at[pl.ds(at + wg * ROWS, ROWS), n], io, sm["q"].at[wg], sm["q_full"].at[wg])
                acc, total = _consume(spec, sm, wg, position + wg * ROWS, (first, position + low - at, end))
                total = jnp.where(total > 0, total, 1.0)  # a gap has no keys and gives zeros
                out = (acc / lax.broadcast_in_dim(total, acc.shape, [0])).astype(spec.dtype)
                for c in range(H // spec.width):
                    io.at[c][...] = out[:, c * spec.width : (c + 1) * spec.width]
                plgpu.commit_smem()
                own = jnp.maximum(low - at - wg * ROWS, 0)
                _store_rows(spec, io, o_ref, at + wg * ROWS, n, own, jnp.minimum(high - at - wg * ROWS, ROWS) - own)

    rings = tuning.stages
    scratch = {
        "io": plgpu.SMEM((tuning.groups, H // spec.width, ROWS, spec.width), spec.dtype),
        "q": plgpu.SMEM((tuning.groups, ROWS, H), spec.dtype, transforms=spec.tiled),
        "k": plgpu.SMEM((rings, tuning.keys, H), spec.dtype, transforms=spec.tiled),
        "v": plgpu.SMEM((rings, tuning.keys, H), spec.dtype, transforms=spec.tiled),
        "q_full": plgpu.Barrier(num_arrivals=H // spec.width, num_barriers=tuning.groups),
        "k_full": plgpu.Barrier(num_arrivals=spec.copies, num_barriers=rings),
        "v_full": plgpu.Barrier(num_arrivals=spec.copies, num_barriers=rings),
        "k_free": plgpu.Barrier(num_arrivals=tuning.groups, num_barriers=rings),
        "v_free": plgpu.Barrier(num_arrivals=tuning.groups, num_barriers=rings),
        "tail": plgpu.Barrier(num_arrivals=spec.copies),
        "turn": plgpu.Barrier(num_arrivals=tuning.groups),
    }
    if spec.interpret is not None:
        scratch["p"] = plgpu.SMEM((tuning.groups, ROWS, tuning.keys), spec.dtype, transforms=spec.tiled)
    items = plan.items_I6.shape[0]
    given = {} if spec.interpret is None else {"interpret": spec.interpret}
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=scratch,
        grid=(spec.K * spec.G, items),
        grid_names=("head", "item"),
        num_threads=tuning.groups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **given,
    )
    return run(q, k_pages, v_pages, table, plan.items_I6)


def _produce(spec: _Spec, k_ref: Any, v_ref: Any, table_ref: Any, span: tuple[Any, ...], sm: dict[str, Any]) -> None:
    """Fills the ring with tiles `first` to `end` of a row's keys and values of KV head `h`."""
    row, h, keys, first, end = span
    size, stages, C = spec.tuning.keys, jnp.int32(spec.tuning.stages), spec.C
    last_page = lax.div(keys - 1, jnp.int32(C))

    def copy(ref: Any, t: Array, dst: Any, barrier: Any) -> None:
        if size < C:
            page = table_ref[row, lax.div(t * size, jnp.int32(C))]
            offset = pl.multiple_of(lax.rem(t * size, jnp.int32(C)), size)
            plgpu.copy_gmem_to_smem(ref.at[page, h, pl.ds(offset, size)], dst, barrier)
            return
        for j in range(size // C):  # pages past the last that is seen repeat it
            page = table_ref[row, jnp.minimum(t * (size // C) + j, last_page)]
            plgpu.copy_gmem_to_smem(ref.at[page, h], dst.at[pl.ds(j * C, C)], barrier)

    @pl.loop(first, end)
    def _(t):  # type: ignore[no-untyped-def]
        at = lax.rem(t - first, stages)
        pl.when(t - first >= stages)(lambda: plgpu.barrier_wait(sm["k_free"].at[at]))
        copy(k_ref, t, sm["k"].at[at], sm["k_full"].at[at])
        pl.when(t - first >= stages)(lambda: plgpu.barrier_wait(sm["v_free"].at[at]))
        whole = (t + 1) * size <= keys

        @pl.when(whole)
        def _() -> None:
            copy(v_ref, t, sm["v"].at[at], sm["v_full"].at[at])

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            copy(v_ref, t, sm["v"].at[at], sm["tail"])
            plgpu.barrier_wait(sm["tail"])
            _zero_tail(sm["v"].at[at], size, spec.H, keys - t * size)
            for _ in range(spec.copies):
                plgpu.barrier_arrive(sm["v_full"].at[at])

    @pl.loop(jnp.maximum(first, end - stages), end)
    def _(t):  # type: ignore[no-untyped-def]
        plgpu.barrier_wait(sm["k_free"].at[lax.rem(t - first, stages)])
        plgpu.barrier_wait(sm["v_free"].at[lax.rem(t - first, stages)])


def _zero_tail(v: Any, size: int, H: int, count: Array) -> None:
    """Zeroes the values from token `count` on: they get weight 0, but 0 · NaN is NaN and a page may hold anything."""
    columns = H // 64

    @pl.loop(0, (size // 64) * columns)
    def _(i):  # type: ignore[no-untyped-def]
        # Small pieces, since the producer has few registers; a loop, since layout inference is slow on many pieces.
        base = pl.multiple_of(lax.div(i, jnp.int32(columns)) * 64, 64)
        piece = v.at[pl.ds(base, 64), pl.ds(pl.multiple_of(lax.rem(i, jnp.int32(columns)) * 64, 64), 64)]
        token = plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=plgpu.Layout.WGMMA)
        values = plgpu.load(piece, layout=plgpu.Layout.WGMMA)
        piece[...] = jnp.where(token < count - base, values, jnp.zeros_like(values))

    plgpu.commit_smem()


def _load_queries(spec: _Spec, src: Any, io: Any, q: Any, barrier: Any) -> None:
    """Queries begin at any token, and tiled copies only at multiples of 8: so they pass through plain buffers."""
    columns = [pl.ds(c * spec.width, spec.width) for c in range(spec.H // spec.width)]
    for c, column in enumerate(columns):
        plgpu.copy_gmem_to_smem(src.at[:, column], io.at[c], barrier)
    plgpu.barrier_wait(barrier)
    for c, column in enumerate(columns):
        q.at[:, column][...] = plgpu.load(io.at[c], layout=plgpu.Layout.WGMMA, optimized=False)
    plgpu.commit_smem()


def _store_rows(spec: _Spec, io: Any, o_ref: Any, token: Array, n: Array, own: Array, count: Array) -> None:
    """Writes rows `own` to `own + count` of `io`: copies have fixed sizes, so a part of the tile is written as powers of two."""

    def store(begin: Array | int, size: int) -> None:
        for c in range(spec.H // spec.width):
            dst = o_ref.at[pl.ds(token + begin, size), n, pl.ds(c * spec.width, spec.width)]
            plgpu.copy_smem_to_gmem(io.at[c, pl.ds(begin, size)], dst)

    pl.when(count == ROWS)(lambda: store(0, ROWS))

    @pl.when(jnp.logical_and(count > 0, count < ROWS))
    def _() -> None:
        for size in (32, 16, 8, 4, 2, 1):
            begin = own + lax.bitwise_and(count, jnp.int32(ROWS - 2 * size))
            pl.when(lax.bitwise_and(count, jnp.int32(size)) != 0)(lambda size=size, begin=begin: store(begin, size))

    plgpu.wait_smem_to_gmem(0)


def _consume(spec: _Spec, sm: dict[str, Any], wg: Array, position: Array, span: tuple[Array, ...]) -> tuple[Array, Array]:
    """Flash attention of one warpgroup: its first query is at `position`. Returns weighted values and the sum of weights.

    All warpgroups take the same tiles: those before the first own query of the block need no mask, the others get one.
    """
    first, lowest, end = span
    size, stages = spec.tuning.keys, jnp.int32(spec.tuning.stages)
    row = plgpu.Layout.WGMMA.reduce(1)
    two = spec.tuning.groups == 2

    def turn() -> None:
        if two:
            plgpu.barrier_arrive(sm["turn"])
            plgpu.barrier_wait(sm["turn"])

    def step(t, carry, masked):  # type: ignore[no-untyped-def]
        acc, top, total = carry
        at = lax.rem(t - first, stages)
        plgpu.barrier_wait(sm["k_full"].at[at])

        def multiply(scores_ref):  # type: ignore[no-untyped-def]
            plgpu.wgmma(scores_ref, sm["q"].at[wg], sm["k"].at[at].T)
            turn()
            return scores_ref[...]

        scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, size), jnp.float32))
        plgpu.barrier_arrive(sm["k_free"].at[at])
        factor = spec.scale * LOG2E
        if spec.softcap is not None:
            scores = jnp.tanh(scores * (spec.scale / spec.softcap))
            factor = spec.softcap * LOG2E
        if masked:
            scores = _mask(spec, scores, position, t * size)
        new_top = jnp.maximum(top, scores.max(axis=1) * factor)
        decay = jnp.exp2(top - new_top)
        p = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
        total = total * decay + p.sum(axis=1)
        p16 = p.astype(spec.dtype)
        acc, total, new_top, p16 = lax.optimization_barrier((acc, total, new_top, p16))
        turn()
        plgpu.barrier_wait(sm["v_full"].at[at])
        acc = _weigh(spec, acc, p16, sm["v"].at[at], None if spec.interpret is None else sm["p"].at[wg])
        plgpu.barrier_arrive(sm["v_free"].at[at])
        return acc, new_top, total

    start = (
        plgpu.layout_cast(jnp.full((ROWS, spec.H), 0.0, jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), NEVER, jnp.float32), row),
        plgpu.layout_cast(jnp.full((ROWS,), 0.0, jnp.float32), row),
    )
    pl.when(wg == 1)(turn)
    middle = first if spec.window is not None else jnp.clip(lax.div(lowest + 1, jnp.int32(size)), first, end)
    carry = start
    if spec.window is None:
        carry = lax.fori_loop(first, middle, lambda t, c: step(t, c, False), carry)
    acc, _, total = lax.fori_loop(middle, end, lambda t, c: step(t, c, True), carry)
    pl.when(wg == 0)(turn)
    return acc, total


def _mask(spec: _Spec, scores: Array, position: Array, first: Array) -> Array:
    query = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA) + position
    key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA) + first
    seen = key <= query
    if spec.window is not None:
        seen = jnp.logical_and(seen, key > query - spec.window)
    return jnp.where(seen, scores, -jnp.inf)


def _weigh(spec: _Spec, acc: Array, p16: Array, v: Any, p_sm: Any) -> Array:
    """acc + p·V on the tensor cores; the interpreter takes operands from shared memory alone."""

    def multiply(acc_ref):  # type: ignore[no-untyped-def]
        plgpu.wgmma(acc_ref, p16, v)

    def interpreted(acc_ref):  # type: ignore[no-untyped-def]
        plgpu.wgmma(acc_ref, p_sm, v)
        return acc_ref[...]

    if p_sm is None:
        return pl.run_state(multiply)(plgpu.ACC.init(acc))
    p_sm[...] = p16
    plgpu.commit_smem()
    return acc + pl.run_scoped(interpreted, plgpu.ACC(acc.shape, jnp.float32))
