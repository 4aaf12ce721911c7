"""The Hopper kernel of paged decode for few rows: a cluster of thread blocks shares one row's KV head and merges in shared memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.mosaic_flash import ROWS, TILE, Spec, fold, scores_of, start, zero_tail
from pallas_kernels.paged_decode.mosaic_kernel import _copy_queries as copy_queries
from pallas_kernels.paged_decode.mosaic_kernel import _copy_tile as copy_tile

THREADS = 128  # of a warpgroup


def attend_clusters(spec: Spec, cluster: int, q: Array, k_pages: Array, v_pages: Array, table: Array, lengths: Array, sinks: Array | None) -> Array:
    """Returns `o_BNH`. q is `[B * N, H]`, at least `spec.group` rows. Block `rank` of a cluster takes every `cluster`-th tile of the row.

    The interpreter has no shared memory of neighbours: there the parts go to device memory and are merged outside.
    """
    given = (q, k_pages, v_pages, table, lengths, *(() if sinks is None else (sinks,)))
    B, K, G, H = spec.B, spec.K, spec.G, spec.H
    stages, merged = spec.tuning.stages, spec.interpret is None

    def decode_split(q_ref, k_ref, v_ref, table_ref, lengths_ref, *rest, **sm):  # type: ignore[no-untyped-def]
        *sinks_ref, o_ref = rest[: len(rest) if merged else -2]
        row, h, rank, wg = (lax.axis_index(name) for name in ("row", "head", "rank", "wg"))
        length = lengths_ref[row]
        skipped = jnp.int32(0) if spec.window is None else lax.div(jnp.maximum(length - spec.window, 0), jnp.int32(TILE))
        low = skipped + rank
        steps = lax.div(jnp.maximum(lax.div(length + (TILE - 1), jnp.int32(TILE)) - low + (cluster - 1), 0), jnp.int32(cluster))

        @pl.when(wg == 1)
        def _producer() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def pages(i):  # type: ignore[no-untyped-def]
                """Of the block's tile number i; read before `length` is known where pages are not smaller than tiles."""
                first = (low + i * cluster) * TILE
                last = table_ref.shape[1] - 1 if spec.copies == 1 else jnp.maximum(lax.div(length - 1, jnp.int32(spec.C)), 0)
                return [table_ref[row, jnp.minimum(lax.div(first, jnp.int32(spec.C)) + j, last)] for j in range(spec.copies)]

            def tile(i, page):  # type: ignore[no-untyped-def]
                at = lax.rem(i, jnp.int32(stages))
                following = pages(i + 1)
                pl.when(i >= stages)(lambda: plgpu.barrier_wait(sm["free"].at[at]))
                within = lax.rem((low + i * cluster) * TILE, jnp.int32(spec.C)) if spec.C > TILE else None
                places = [(p, within) for p in page]
                copy_tile(spec, k_ref, places, h, sm["k"].at[at], sm["k_full"].at[at])
                copy_tile(spec, v_ref, places, h, sm["v"].at[at], sm["v_full"].at[at])
                return following

            lax.fori_loop(0, steps, tile, pages(jnp.int32(0)))

            # Every arrival is waited for, so that the barriers end in the phase they began in.
            @pl.loop(jnp.maximum(0, steps - stages), steps)
            def _free(i):  # type: ignore[no-untyped-def]
                plgpu.barrier_wait(sm["free"].at[lax.rem(i, jnp.int32(stages))])

        @pl.when(wg == 0)
        def _consumer() -> None:
            plgpu.set_max_registers(232, action="increase")
            first_query, own = spec.first_query(row, h)
            copy_queries(spec, q_ref, first_query, sm["q"])
            sinks_G = [sinks_ref[0][h * G + i] for i in range(G)] if sinks_ref else None

            def step(i, carry):  # type: ignore[no-untyped-def]
                at = lax.rem(i, jnp.int32(stages))
                first = (low + i * cluster) * TILE
                plgpu.barrier_wait(sm["k_full"].at[at])
                scores = scores_of(spec, sm["q"], sm["k"].at[at], first, length)
                plgpu.barrier_wait(sm["v_full"].at[at])
                zero_tail(sm["v"].at[at], H, length - first)
                carry = fold(spec, carry, scores, sm["v"].at[at], sm.get("p"))
                plgpu.barrier_arrive(sm["free"].at[at])
                return carry

            acc, top, total = lax.fori_loop(0, steps, step, start(H, sinks_G, own, rank == 0))
            for c in range(H // spec.width):
                sm["o"].at[c][...] = acc[:, c * spec.width : (c + 1) * spec.width]
            sm["top"][...] = top
            sm["total"][...] = total
            if not merged:
                plgpu.commit_smem()
                parts = rest[-3:]
                plgpu.copy_smem_to_gmem(sm["o"], parts[0].at[row, h, rank])
                plgpu.copy_smem_to_gmem(sm["top"], parts[1].at[row, h, rank])
                plgpu.copy_smem_to_gmem(sm["total"], parts[2].at[row, h, rank])
                plgpu.wait_smem_to_gmem(0)
                return
            meet()
            # Query j of the group is merged by block j modulo the cluster.
            for i in range(-(-G // cluster)):
                j = rank + i * cluster

                @pl.when(j < G)
                def _(j=j) -> None:  # type: ignore[no-untyped-def]
                    tops = [of_peer(sm["top"].at[pl.ds(own + j, 1)], p, spec.width) for p in range(cluster)]
                    totals = [of_peer(sm["total"].at[pl.ds(own + j, 1)], p, spec.width) for p in range(cluster)]
                    top = tops[0]
                    for other in tops[1:]:
                        top = jnp.maximum(top, other)
                    weights = [jnp.exp2(t - top) for t in tops]
                    total = sum(w * t for w, t in zip(weights[1:], totals[1:], strict=True)) + weights[0] * totals[0]
                    scale = jnp.where(total > 0, 1.0 / total, 0.0)
                    for c in range(H // spec.width):
                        accs = [of_peer(sm["o"].at[c, own + j], p, spec.width) for p in range(cluster)]
                        acc = accs[0] * weights[0]
                        for w, a in zip(weights[1:], accs[1:], strict=True):
                            acc = acc + w * a
                        o_ref.at[row, h * G + j, pl.ds(c * spec.width, spec.width)][...] = (acc * scale).astype(spec.dtype)

            meet()  # nobody leaves while others read its part

    scratch = {
        "q": plgpu.SMEM((ROWS, H), spec.dtype, transforms=spec.tiled),
        "k": plgpu.SMEM((stages, TILE, H), spec.dtype, transforms=spec.tiled),
        "v": plgpu.SMEM((stages, TILE, H), spec.dtype, transforms=spec.tiled),
        "o": plgpu.SMEM((H // spec.width, ROWS, spec.width), jnp.float32),
        "top": plgpu.SMEM((ROWS,), jnp.float32),
        "total": plgpu.SMEM((ROWS,), jnp.float32),
        "k_full": plgpu.Barrier(num_arrivals=spec.copies, num_barriers=stages),
        "v_full": plgpu.Barrier(num_arrivals=spec.copies, num_barriers=stages),
        "free": plgpu.Barrier(num_barriers=stages),
    }
    threads = {"num_threads": 2, "thread_name": "wg"}
    if merged:
        out = jax.ShapeDtypeStruct((B, K * G, H), spec.dtype)
        grid = {"grid": (B, K), "grid_names": ("row", "head"), "cluster": (cluster,), "cluster_names": ("rank",)}
        return plgpu.kernel(decode_split, out_type=out, scratch_types=scratch, **grid, **threads, **spec.options)(*given)
    scratch["p"] = plgpu.SMEM((ROWS, TILE), spec.dtype, transforms=spec.tiled)
    shapes = (B, K, cluster, H // spec.width, ROWS, spec.width), (B, K, cluster, ROWS), (B, K, cluster, ROWS)
    parts = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    grid = {"grid": (B, K, cluster), "grid_names": ("row", "head", "rank")}
    run = plgpu.kernel(decode_split, out_type=parts, scratch_types=scratch, **grid, **threads, **spec.options)
    return _merge(spec, *run(*given))


def _merge(spec: Spec, acc: Array, top: Array, total: Array) -> Array:
    """Merges parts `[B, K, cluster, columns, ROWS, width]` with their maxima and sums `[B, K, cluster, ROWS]` outside of a kernel."""
    row, h = jnp.meshgrid(jnp.arange(spec.B), jnp.arange(spec.K), indexing="ij")
    own = spec.first_query(row, h)[1][..., None] + jnp.arange(spec.G)
    weight = jnp.exp2(top - top.max(axis=2, keepdims=True))
    sums = jnp.take_along_axis((weight * total).sum(axis=2), own, axis=2)
    acc = jnp.moveaxis(acc, 3, 4).reshape(*acc.shape[:3], ROWS, spec.H)
    out = jnp.take_along_axis((weight[..., None] * acc).sum(axis=2), own[..., None], axis=2)
    out = jnp.where(sums[..., None] > 0, out / sums[..., None], 0.0)
    return out.reshape(spec.B, spec.K * spec.G, spec.H).astype(spec.dtype)


def meet() -> None:
    """All blocks of the cluster wait for each other; what they wrote to shared memory before is visible to all after."""

    @plgpu.inline_mgpu()
    def both(_: Any) -> None:
        mgpu.utils.inline_ptx("barrier.cluster.arrive.release.aligned;", has_side_effects=True)
        mgpu.utils.inline_ptx("barrier.cluster.wait.acquire.aligned;", has_side_effects=True)

    both()


def of_peer(ref: Any, peer: int, width: int) -> Array:
    """`[width]` of float32 from the shared memory of block `peer` of the cluster; of one element, that element everywhere."""
    same = ref.shape[0] == 1
    shape = plgpu.ShapeDtypeStruct(shape=(width,), dtype=jnp.float32, layout=plgpu.Layout.WG_STRIDED((width,), vec_size=1))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=shape)
    def load(_: Any, ref: Any) -> Any:
        ir, arith = mgpu.utils.ir, mgpu.utils.arith
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        pointer = mgpu.utils.memref_ptr(ref)
        if not same:
            thread = arith.remui(mgpu.utils.thread_idx(), mgpu.utils.c(THREADS, i32))
            pointer = mgpu.utils.getelementptr(pointer, [thread], f32)
        code = "{ .reg .b32 there; mapa.shared::cluster.u32 there, $1, $2; ld.shared::cluster.f32 $0, [there]; }"
        value = mgpu.utils.inline_ptx(code, pointer, mgpu.utils.c(peer, i32), result_types=f32, has_side_effects=True)
        register = mgpu.utils.vector.broadcast(ir.VectorType.get((1,), f32), value)
        layout = mgpu.WGStridedFragLayout(shape=(width,), vec_size=1)
        return mgpu.FragmentedArray(_registers=np.asarray([register], dtype=object), _layout=layout, _is_signed=None)

    return load(ref)
