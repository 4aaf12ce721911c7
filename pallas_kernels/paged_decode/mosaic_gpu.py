"""Paged decode attention for NVIDIA Hopper in Pallas Mosaic GPU: bandwidth-bound, every thread block reads an equal share of the KV.

Two kernels. `_attend` runs (lanes, K) blocks: a producer warpgroup streams (page, head) tiles through a ring of TMA copies and a consumer
warpgroup does flash attention on the tensor cores, with the query group of one KV head in the first rows of a 64-row tile (rows are
independent, so the others may hold anything). Every row segment becomes a part: normalised output and log2-sum-exp. `mosaic_combine`
merges a row's parts as one more attention step whose scores are the log-sums and whose values are the parts' outputs.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.mosaic_combine import combine
from pallas_kernels.paged_decode.mosaic_flash import ROWS, Spec, Tuning, empty, fold, zero_tail
from pallas_kernels.paged_decode.plan import DecodePlan, make_plan

LOG2E = math.log2(math.e)
# 8 x 64 elements over a warpgroup: a warp two rows, a thread 8 bytes of one.
QUERY_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


@functools.cache
def default_tuning(head_dim: int, page_size: int) -> Tuning:
    """The sizes of `tuned/` for a head dimension; 227 KB of shared memory hold the ring, the queries and the output tile."""
    del page_size  # no page size wanted other sizes
    found = json.loads((pathlib.Path(__file__).parent / "tuned" / "nvidia_h200.json").read_text())["head_dim"]
    return Tuning(**found[str(head_dim)])


def lanes_of(kv_heads: int, tuning: Tuning) -> int:
    """Lanes of the grid: one block per streaming multiprocessor over all KV heads."""
    return max(1, tuning.blocks // kv_heads)


def plan(
    lengths_B: Array, *, kv_heads: int, head_dim: int, page_size: int, window: int | None = None, tuning: Tuning | None = None
) -> DecodePlan:
    """The split plan of one step, to be computed once and passed to every layer with the same `window`."""
    tuning = tuning or default_tuning(head_dim, page_size)
    return make_plan(lengths_B, tile=tuning.tile, lanes=lanes_of(kv_heads, tuning), min_tiles=tuning.min_tiles, window=window)


def _check(q: Array, k_pages: Array, v_pages: Array) -> None:
    B, N, H = q.shape
    P, K, C, HK = k_pages.shape
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k_pages.dtype != q.dtype or v_pages.dtype != q.dtype:
        raise ValueError(f"mosaic_gpu decode takes bfloat16 or float16 throughout, got q {q.dtype}, k {k_pages.dtype}, v {v_pages.dtype}")
    if H not in (64, 128, 256) or HK != H or v_pages.shape != k_pages.shape:
        raise ValueError(f"mosaic_gpu decode takes head_dim 64, 128 or 256 and equal K and V pools, got q {q.shape}, k {k_pages.shape}")
    if C not in (16, 32, 64, 128):
        raise ValueError(f"mosaic_gpu decode takes pages of 16, 32, 64 or 128 tokens, got {C}")
    if N % K or N // K > 16:
        raise ValueError(f"mosaic_gpu decode takes 1 to 16 query heads a KV head, got {N} over {K}")


def decode_attention(
    q_BNH: Array,
    k_pages: Array,
    v_pages: Array,
    page_table_BM: Array,
    lengths_B: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    plan: DecodePlan | None = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """See `pallas_kernels.paged_decode`. `plan` is this module's `plan(lengths_B, ...)` of the same window and tuning; None makes one.

    bfloat16 or float16; head_dim 64, 128, 256; pages of 16 to 128 tokens; up to 16 query heads a KV head. Raises ValueError otherwise.
    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    _check(q_BNH, k_pages, v_pages)
    B, N, H = q_BNH.shape
    _, K, C, _ = k_pages.shape
    G = N // K
    tuning = tuning or default_tuning(H, C)
    if plan is None:
        plan = make_plan(lengths_B, tile=tuning.tile, lanes=lanes_of(K, tuning), min_tiles=tuning.min_tiles, window=window)
    spec = Spec(B, K, G, H, C, 8 if G <= 8 else 16, q_BNH.dtype, scale, window, softcap, tuning, interpret)
    q_QH = q_BNH.reshape(B * N, H)
    if B * N < spec.group:
        q_QH = jnp.pad(q_QH, ((0, spec.group - B * N), (0, 0)))
    part_o, part_lse = _attend(spec, q_QH, k_pages, v_pages, page_table_BM.astype(jnp.int32), plan)
    return combine(spec, part_o, part_lse, plan)


def _copy_tile(spec: Spec, pages_ref: Any, table_ref: Any, place: tuple[Any, ...], dst: Any, barrier: Any) -> None:
    """TMA copies of one K or V tile: tokens `first` and on of row `row`, head `h`; pages past the row's last repeat the last."""
    row, h, first, last_page = place
    tile, C = spec.tuning.tile, spec.C
    if tile <= C:
        page = table_ref[row, lax.div(first, jnp.int32(C))]
        src = pages_ref.at[page, h] if tile == C else pages_ref.at[page, h, pl.ds(pl.multiple_of(lax.rem(first, jnp.int32(C)), tile), tile)]
        plgpu.copy_gmem_to_smem(src, dst, barrier)
        return
    for j in range(tile // C):
        page = table_ref[row, jnp.minimum(lax.div(first, jnp.int32(C)) + j, last_page)]
        plgpu.copy_gmem_to_smem(pages_ref.at[page, h], dst.at[pl.ds(j * C, C)], barrier)


def _copy_queries(spec: Spec, q_ref: Any, first: Array, dst: Any) -> None:
    """Rows `first` to `first + group` of q into the first rows of a tile. By registers: tiled TMA copies begin at multiples of 8 rows."""
    rows = plgpu.load(q_ref.at[pl.ds(first, spec.group)], layout=QUERY_LAYOUT, optimized=False)
    dst.at[pl.ds(0, spec.group)][...] = rows
    plgpu.commit_smem()


def _attend(spec: Spec, q: Array, k_pages: Array, v_pages: Array, table: Array, plan: DecodePlan) -> tuple[Array, Array]:
    """Runs every lane's share. Returns parts' outputs `[K, parts * group, H]` and log2-sum-exps `[K, parts * group]`."""
    tuning, H, group = spec.tuning, spec.H, spec.group
    tile, stages = tuning.tile, tuning.stages
    lanes = plan.lanes_L4.shape[0]
    parts = lanes + spec.B + ROWS // group  # the combine kernel reads whole tiles of ROWS // group parts
    copies = max(1, tile // spec.C)

    def decode_attend(q_ref, k_ref, v_ref, table_ref, rows_ref, lanes_ref, o_ref, lse_ref, **sm):  # type: ignore[no-untyped-def]
        lane, h, wg = lax.axis_index("lane"), lax.axis_index("head"), lax.axis_index("wg")
        low, high = lanes_ref[lane, 0], lanes_ref[lane, 1]
        r0, r1 = lanes_ref[lane, 2], lanes_ref[lane, 3]

        def segment(r):  # type: ignore[no-untyped-def]
            begin, end = rows_ref[r, 1], rows_ref[r, 2]
            return jnp.maximum(low, begin), jnp.minimum(high, end), begin - rows_ref[r, 4]

        @pl.when(wg == 1)
        def _producer() -> None:
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(r0, r1)
            def _row(r):  # type: ignore[no-untyped-def]
                row, length = rows_ref[r, 0], rows_ref[r, 3]
                begin, end, zero = segment(r)
                last_page = lax.div(length - 1, jnp.int32(spec.C))

                @pl.loop(begin, end)
                def _tile(t):  # type: ignore[no-untyped-def]
                    at = lax.rem(t - low, jnp.int32(stages))

                    @pl.when(t - low >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(sm["free"].at[at])

                    place = row, h, (t - zero) * tile, last_page
                    _copy_tile(spec, k_ref, table_ref, place, sm["k"].at[at], sm["k_full"].at[at])
                    _copy_tile(spec, v_ref, table_ref, place, sm["v"].at[at], sm["v_full"].at[at])

                    @pl.when(t == begin)  # after the copies, so that they do not wait for this load
                    def _() -> None:
                        slot = lax.rem(r - r0, jnp.int32(tuning.queries))
                        pl.when(r - r0 >= tuning.queries)(lambda: plgpu.barrier_wait(sm["q_free"].at[slot]))
                        _copy_queries(spec, q_ref, spec.first_query(row, h)[0], sm["q"].at[slot])
                        plgpu.barrier_arrive(sm["q_full"].at[slot])

            # Every arrival is waited for, so that the barriers end in the phase they began in.
            @pl.loop(jnp.maximum(low, high - stages), high)
            def _(t):  # type: ignore[no-untyped-def]
                plgpu.barrier_wait(sm["free"].at[lax.rem(t - low, jnp.int32(stages))])

            @pl.loop(jnp.maximum(r0, r1 - tuning.queries), r1)
            def _(r):  # type: ignore[no-untyped-def]
                plgpu.barrier_wait(sm["q_free"].at[lax.rem(r - r0, jnp.int32(tuning.queries))])

        @pl.when(wg == 0)
        def _consumer() -> None:
            plgpu.set_max_registers(232, action="increase")

            @pl.loop(r0, r1)
            def _row(r):  # type: ignore[no-untyped-def]
                length = rows_ref[r, 3]
                begin, end, zero = segment(r)
                slot = lax.rem(r - r0, jnp.int32(tuning.queries))
                plgpu.barrier_wait(sm["q_full"].at[slot])

                def step(t, carry):  # type: ignore[no-untyped-def]
                    at = lax.rem(t - low, jnp.int32(stages))
                    first = (t - zero) * tile
                    plgpu.barrier_wait(sm["k_full"].at[at])
                    scores = _scores(spec, sm["q"].at[slot], sm["k"].at[at], tile)
                    scores = _mask(spec, scores, first, length)
                    plgpu.barrier_wait(sm["v_full"].at[at])
                    zero_tail(sm["v"].at[at], tile, H, length - first)
                    carry = fold(spec, carry, scores, sm["v"].at[at], sm.get("p"))
                    plgpu.barrier_arrive(sm["free"].at[at])
                    return carry

                acc, top, total = lax.fori_loop(begin, end, step, empty(H))
                plgpu.barrier_arrive(sm["q_free"].at[slot])
                own = spec.first_query(rows_ref[r, 0], h)[1]
                query = plgpu.broadcasted_iota(jnp.int32, acc.shape, 0, layout=plgpu.Layout.WGMMA)
                mine = jnp.logical_and(query >= own, query < own + spec.G)  # the others are neighbours' queries, perhaps NaN
                acc = jnp.where(mine, acc / lax.broadcast_in_dim(total, acc.shape, [0]), 0.0)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                sm["o"][...] = acc.astype(spec.dtype)
                sm["lse"][...] = top + jnp.log2(total)
                plgpu.commit_smem()
                part = pl.multiple_of((lane + r) * group, group)
                plgpu.copy_smem_to_gmem(sm["o"].at[pl.ds(0, group)], o_ref.at[h, pl.ds(part, group)])
                plgpu.copy_smem_to_gmem(sm["lse"].at[pl.ds(0, group)], lse_ref.at[h, pl.ds(part, group)])

            plgpu.wait_smem_to_gmem(0)

    scratch = {
        "q": plgpu.SMEM((tuning.queries, ROWS, H), spec.dtype, transforms=spec.tiled),
        "k": plgpu.SMEM((stages, tile, H), spec.dtype, transforms=spec.tiled),
        "v": plgpu.SMEM((stages, tile, H), spec.dtype, transforms=spec.tiled),
        "o": plgpu.SMEM((ROWS, H), spec.dtype, transforms=spec.tiled),
        "lse": plgpu.SMEM((ROWS,), jnp.float32),
        "q_full": plgpu.Barrier(num_barriers=tuning.queries),
        "q_free": plgpu.Barrier(num_barriers=tuning.queries),
        "k_full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "v_full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "free": plgpu.Barrier(num_barriers=stages),
    }
    if spec.interpret is not None:
        scratch["p"] = plgpu.SMEM((ROWS, tile), spec.dtype, transforms=spec.tiled)
    out = jax.ShapeDtypeStruct((spec.K, parts * group, H), spec.dtype), jax.ShapeDtypeStruct((spec.K, parts * group), jnp.float32)
    grid = {"grid": (lanes, spec.K), "grid_names": ("lane", "head"), "num_threads": 2, "thread_name": "wg"}
    run = plgpu.kernel(decode_attend, out_type=out, scratch_types=scratch, **grid, **spec.options)
    return run(q, k_pages, v_pages, table, plan.rows_B5, plan.lanes_L4)


def _scores(spec: Spec, q: Any, k: Any, tile: int) -> Array:
    """q·Kᵀ in the log2 domain, soft-capped; float32 `[ROWS, tile]`."""

    def multiply(acc):  # type: ignore[no-untyped-def]
        plgpu.wgmma(acc, q, k.T)
        return acc[...]

    raw = pl.run_scoped(multiply, plgpu.ACC((ROWS, tile), jnp.float32))
    if spec.softcap is None:
        return raw * (spec.scale * LOG2E)
    return jnp.tanh(raw * (spec.scale / spec.softcap)) * (spec.softcap * LOG2E)


def _mask(spec: Spec, scores: Array, first: Array, length: Array) -> Array:
    token = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA) + first
    seen = token < length
    if spec.window is not None:
        seen = jnp.logical_and(seen, token >= length - spec.window)
    return jnp.where(seen, scores, -jnp.inf)


jitted = functools.partial(jax.jit, static_argnames=("scale", "window", "softcap", "tuning", "interpret"))(decode_attention)
