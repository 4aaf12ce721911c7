"""Paged decode by clusters: the thread blocks of a cluster share a row's tiles and merge through
distributed shared memory.

A split of the plan is a cluster here, where it is a block in `mosaic_kernel`. Of a row's tiles in a
split, the block with rank i takes every `cluster`-th from i on. At the end of a row the blocks
meet, and each merges some columns of the queries. Only parts that cross the cuts between clusters
go through device memory and flags, one per block: rank i merges the parts of ranks i.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.lanes import sync
from pallas_kernels.mosaic_flash import ROWS
from pallas_kernels.mosaic_gpu import (
    PRODUCER_REGISTERS,
    PageTable,
    await_flag,
    drain,
    flags_buffer,
    launch,
    raise_flag,
    registers_of,
    take,
)
from pallas_kernels.paged_decode.mosaic_arithmetic import arithmetic_of
from pallas_kernels.paged_decode.mosaic_flash import TILE, Spec, Tiles
from pallas_kernels.paged_decode.mosaic_narrow import second_consumer
from pallas_kernels.paged_decode.mosaic_peers import (
    PAD,
    Unit,
    fence_cluster,
    merge_peers,
    store_zeros,
)
from pallas_kernels.paged_decode.mosaic_ring import pages_of, send_queries
from pallas_kernels.paged_decode.plan import ROW_FIELDS, SPLIT_FIELDS, DecodePlan


def attend_clusters(
    spec: Spec,
    q: Array,
    pools: tuple[Array, ...],
    rows: tuple[Array, ...],
    plan: DecodePlan,
    sinks: Array | None,
) -> Array:
    """Run the share of every cluster and return `o_BNH`. Arguments as of `mosaic_kernel.attend`.

    The interpreter has neither flags nor distributed shared memory. There every block leaves its
    parts, which are merged outside of the kernel.
    """
    merged = spec.interpret is None
    if merged:
        splits_SF = flags_buffer(plan.splits_SF)
    else:
        splits_SF = plan.splits_SF[...]
    operands = (
        q,
        *pools,
        *rows,
        plan.rows_B4,
        splits_SF,
        *(() if sinks is None else (sinks.astype(jnp.float32),)),
    )
    out = _launch(spec, splits_SF.shape[0], operands)
    if merged:
        return out[0]
    return _merge(spec, DecodePlan(plan.rows_B4, splits_SF), *out)


def _launch(spec: Spec, splits: int, operands: tuple[Array, ...]) -> tuple[Array, ...]:
    G = spec.G
    cluster = spec.tuning.cluster
    consumers = spec.tuning.consumers
    stages = spec.tuning.stages
    queries = spec.tuning.queries
    merged = spec.interpret is None
    way = arithmetic_of(spec)

    def decode_cluster(q_ref, *refs, **sm):  # type: ignore[no-untyped-def]
        pool_refs = refs[: way.pools]
        refs = refs[way.pools :]
        table_ref, page_ref, lengths_ref, rows_ref, splits_ref, *rest = refs
        *sinks_ref, o_ref, parts_o, parts_lse = rest
        rank = lax.axis_index("rank") if cluster > 1 else jnp.int32(0)
        # An owner waits for its followers, which have higher splits and so come first in the grid.
        # `splits_of` does not rely on clusters starting in that order: all fit on the chip at once.
        split = splits - 1 - lax.axis_index("split")
        h = lax.axis_index("head")
        wg = lax.axis_index("wg")
        low, high, r0, r1, *first_row, home, followers = (
            splits_ref[split, i] for i in range(SPLIT_FIELDS)
        )

        share = _Share(spec, rank, low, high, r0, r1, tuple(first_row), rows_ref)

        @pl.when(wg == 1)
        def _producer() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            table = PageTable(table_ref, page_ref[0])

            def row(r, ends, tiles, busy, live):  # type: ignore[no-untyped-def]
                last_page = lax.div(tiles.length - 1, jnp.int32(spec.C))

                @pl.loop(0, tiles.count)
                def _tile(i):  # type: ignore[no-untyped-def]
                    # Before the wait, so that they come during it
                    pages = pages_of(spec, table, r, tiles.position(i), last_page)
                    with jax.named_scope("wait for a slot"):
                        entry = take(sm["free"], tiles.entry + i, stages)
                    with jax.named_scope("copies"):
                        way.copy_tile(spec, pool_refs, pages, h, sm, entry)

                    # After the copies, so that they do not wait for this load
                    pl.when(i == 0)(lambda: send_queries(spec, q_ref, r, h, busy, sm))

            tiles, busy, _ = share.each_row(row)

            # Every arrival is waited for, so that the barriers end in the phase they began in.
            drain(sm["free"], tiles, stages)
            drain(sm["q_free"], busy, queries)

        @pl.when(wg == 0)
        def _consumer() -> None:
            plgpu.set_max_registers(registers_of(consumers), action="increase")
            sinks_G = None
            if sinks_ref:
                sinks_G = [sinks_ref[0][h * G + i] for i in range(G)]

            def row(r, ends, tiles, busy, live):  # type: ignore[no-untyped-def]
                first, last = ends
                slot = lax.rem(busy, jnp.int32(queries))
                ours = first >= low
                query_row = spec.first_query(r, h)[1]
                begins = jnp.logical_and(ours, rank == 0)

                # A block that met for the row before has merged the one before that
                buffer = lax.rem(live, jnp.int32(2))
                pl.when(tiles.count > 0)(lambda: plgpu.barrier_wait(sm["q_full"].at[slot]))
                way.attend(spec, sm, slot, tiles, (sinks_G, query_row, begins), buffer)
                pl.when(tiles.count > 0)(lambda: plgpu.barrier_arrive(sm["q_free"].at[slot]))
                if not merged:
                    place = r, h, split * cluster + rank
                    _leave(spec, sm, buffer, [ref.at[place] for ref in (o_ref, parts_o, parts_lse)])
                    return
                meet()
                unit = Unit(spec, rank, query_row, buffer)
                flag = SPLIT_FIELDS + h * cluster + rank
                waits = jnp.where(jnp.logical_and(ours, last > high), followers, 0)
                with jax.named_scope("wait for flags"):
                    pl.when(waits > 0)(lambda: await_flag(splits_ref.at[split, flag], waits))
                parts = parts_o.at[h, split, 0, 0], parts_lse.at[h, split, 0]
                with jax.named_scope("merge"):
                    merge_peers(
                        unit,
                        (sm["o"], sm["top"], sm["total"]),
                        o_ref.at[r, h * G, 0],
                        parts,
                        ours,
                        waits,
                    )
                pl.when(jnp.logical_not(ours))(lambda: raise_flag(splits_ref.at[home, flag]))

            def meet() -> None:
                with jax.named_scope("meet"):
                    sync(spec.interpret)  # one warp arrives for all
                    if cluster == 1:
                        return
                    fence_cluster()
                    plgpu.barrier_arrive(sm["met"])
                    plgpu.barrier_wait(sm["met"])
                    fence_cluster()

            share.each_row(row)
            _zero_dead_rows(
                spec,
                split * cluster + rank,
                splits * cluster,
                lengths_ref,
                lambda r: o_ref.at[r, h * G, 0],
            )
            if merged and cluster > 1:
                # A block stays while others read its part. Without fences, which would wait until
                # the results are in device memory
                sync(spec.interpret)
                plgpu.barrier_arrive(sm["met"])
                plgpu.barrier_wait(sm["met"])

        def each_with_tiles(step):  # type: ignore[no-untyped-def]
            return share.each_row(lambda r, _, tiles, busy, __: step(r, tiles, busy))[1]

        if consumers > 1:
            pl.when(wg == 2)(lambda: second_consumer(spec, sm, each_with_tiles, h))

    grid: dict[str, Any] = {
        "grid": (splits, spec.K),
        "grid_names": ("split", "head"),
    }
    if not merged:
        grid |= {"grid": (splits, spec.K, cluster), "grid_names": ("split", "head", "rank")}
    elif cluster > 1:
        grid |= {"cluster": (cluster,), "cluster_names": ("rank",)}
    return launch(
        decode_cluster,
        operands,
        spec.interpret,
        thread_name="wg",
        out_type=_outputs(spec, splits),
        scratch_types=_scratch(spec),
        num_threads=1 + consumers,
        **grid,
    )


class _Share(NamedTuple):
    """A cluster's share of the plan, as the block with this rank walks it: tiles low to high of the
    line, rows r0 to r1, and the plan's fields of row r0."""

    spec: Spec
    rank: Array
    low: Array
    high: Array
    r0: Array
    r1: Array
    first_row: tuple[Array, ...]
    rows_ref: Any

    def each_row(self, step: Callable[..., None]) -> tuple[Array, Array, Array]:
        """Run `step(row, (first, end of its tiles in the line), this block's tiles of it, rows
        before with tiles of this block, rows before)` over the share's rows in use.

        Returns the sums of the last three. The next row's fields are read meanwhile.
        """
        cluster = self.spec.tuning.cluster

        def advance(r, carry):  # type: ignore[no-untyped-def]
            next_row = jnp.minimum(r + 1, self.spec.B - 1)
            following = [self.rows_ref[next_row, i] for i in range(ROW_FIELDS)]
            first, last, length, zero, tiles, busy, live = carry
            begin = jnp.maximum(self.low, first)
            end = jnp.minimum(self.high, last)
            mine = lax.div(
                jnp.maximum(end - begin - self.rank + (cluster - 1), 0), jnp.int32(cluster)
            )
            position = (begin + self.rank - zero) * TILE
            ours = Tiles(tiles, mine, position, cluster * TILE, length)
            pl.when(end > begin)(lambda: step(r, (first, last), ours, busy, live))
            return (
                *following,
                tiles + mine,
                busy + (mine > 0).astype(jnp.int32),
                live + (end > begin).astype(jnp.int32),
            )

        none = [jnp.int32(0)] * 3
        return lax.fori_loop(self.r0, self.r1, advance, (*self.first_row, *none))[-3:]


def _outputs(spec: Spec, splits: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """`o_BNH`, and the parts that cross the cuts between clusters: outputs and log2-sum-exps. Where
    the kernel is interpreted: accumulator, maximum and sum of every row and block."""
    H = spec.H
    group = spec.group
    if spec.interpret is None:
        return (
            jax.ShapeDtypeStruct((spec.B, spec.N, H), spec.dtype),
            jax.ShapeDtypeStruct((spec.K, splits, group, H), jnp.float32),
            jax.ShapeDtypeStruct((spec.K, splits, group), jnp.float32),
        )
    blocks = (spec.B, spec.K, splits * spec.tuning.cluster)
    kept = arithmetic_of(spec).shape(spec)
    sums = jax.ShapeDtypeStruct((*blocks, arithmetic_of(spec).queries(spec)), jnp.float32)
    return jax.ShapeDtypeStruct((*blocks, *kept), jnp.float32), sums, sums


def _scratch(spec: Spec) -> dict[str, Any]:
    """Shared memory and barriers of one block."""
    stages = spec.tuning.stages
    queries = spec.tuning.queries
    merged = spec.interpret is None
    way = arithmetic_of(spec)
    scratch = {
        "o": plgpu.SMEM((2, spec.group, spec.H + PAD), jnp.float32),
        "top": plgpu.SMEM((2, ROWS), jnp.float32),
        "total": plgpu.SMEM((2, ROWS), jnp.float32),
        "q_full": plgpu.Barrier(num_barriers=queries),
        "q_free": plgpu.Barrier(num_arrivals=spec.tuning.consumers, num_barriers=queries),
        "free": plgpu.Barrier(num_barriers=stages),
    }
    if merged and spec.tuning.cluster > 1:
        scratch["met"] = plgpu.ClusterBarrier(collective_axes=("rank",))
    if not merged:
        scratch["acc"] = plgpu.SMEM(way.shape(spec), jnp.float32)
    return scratch | way.scratch(spec)


def _leave(spec: Spec, sm: dict[str, Any], buffer: Array, places: list[Any]) -> None:
    """Stores accumulator, maximum and sum in device memory, for `_merge`."""
    rows = pl.ds(0, arithmetic_of(spec).queries(spec))
    sources = sm["acc"], sm["top"].at[buffer, rows], sm["total"].at[buffer, rows]
    plgpu.commit_smem()
    for source, place in zip(sources, places, strict=True):
        plgpu.copy_smem_to_gmem(source, place)
    plgpu.wait_smem_to_gmem(0)


def _zero_dead_rows(spec: Spec, block: Array, blocks: int, lengths_ref: Any, place: Any) -> None:
    """Every `blocks`-th row from `block` on gets zeros where its length is 0."""
    if spec.interpret is not None:
        return
    for i in range(-(-spec.B // blocks)):
        r = block + i * blocks
        dead = jnp.logical_and(r < spec.B, lengths_ref[jnp.minimum(r, spec.B - 1)] == 0)
        pl.when(dead)(lambda r=r: store_zeros(spec, place(r)))


def _merge(spec: Spec, plan: DecodePlan, acc: Array, top: Array, total: Array) -> Array:
    """Merges parts `[B, K, blocks, ROWS, H]` with their maxima and sums `[B, K, blocks, ROWS]`
    outside of a kernel."""
    cluster = spec.tuning.cluster
    if spec.tuning.swapped:
        acc = jnp.swapaxes(acc, 3, 4)
    acc = acc[..., : spec.H]
    begin = jnp.maximum(plan.rows_B4[:, :1], plan.splits_SF[None, :, 0])
    end = jnp.minimum(plan.rows_B4[:, 1:2], plan.splits_SF[None, :, 1])
    left = jnp.repeat(end > begin, cluster, axis=1)[:, None, :, None]
    row, h = jnp.meshgrid(jnp.arange(spec.B), jnp.arange(spec.K), indexing="ij")
    query = spec.first_query(row, h)[1][..., None] + jnp.arange(spec.G)
    top = jnp.where(left, top, -jnp.inf)
    highest = top.max(axis=2, keepdims=True)
    weight = jnp.exp2(top - jnp.where(highest == -jnp.inf, 0, highest))
    sums = jnp.take_along_axis(jnp.where(left, weight * total, 0).sum(axis=2), query, axis=2)
    acc = jnp.where(left[..., None], weight[..., None] * acc, 0).sum(axis=2)
    out = jnp.take_along_axis(acc, query[..., None], axis=2)
    out = jnp.where(sums[..., None] > 0, out / sums[..., None], 0.0)
    return out.reshape(spec.B, spec.K * spec.G, spec.H).astype(spec.dtype)
