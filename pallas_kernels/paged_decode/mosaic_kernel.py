"""The Hopper kernel of paged decode: splits x KV heads thread blocks in one launch, each with a
producer and one or two consumer warpgroups."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_flash import ROWS, Carry, merged
from pallas_kernels.mosaic_gpu import (
    PRODUCER_REGISTERS,
    TILED,
    PageTable,
    await_flag,
    drain,
    launch,
    narrowed,
    raise_flag,
    registers_of,
    store_rows,
    take,
    tiled,
)
from pallas_kernels.paged_decode import mosaic_narrow as narrow
from pallas_kernels.paged_decode.mosaic_flash import TILE, Spec, Tiles, start
from pallas_kernels.paged_decode.mosaic_ring import (
    PartsRing,
    copy_parts,
    copy_tile,
    fold_parts,
    fold_tile,
    pages_of,
    parts_ring,
    send_queries,
)
from pallas_kernels.paged_decode.plan import ROW_FIELDS, SPLIT_FIELDS, DecodePlan


def attend(
    spec: Spec,
    q: Array,
    pools: tuple[Array, ...],
    rows: tuple[Array, ...],
    plan: DecodePlan,
    sinks: Array | None,
) -> Array:
    """Run the share of every split and return `o_BNH`.

    `q` is `[B * N, H]`, at least `spec.group` rows. `pools` are the pages of keys and of values,
    and their scales if they have some. `rows` are the page table, its first page, and the lengths.
    """
    splits = plan.splits_SF.shape[0]

    def launch(phase: str, splits_SF: Any, *parts: Array) -> tuple[Array, Array, Array]:
        if sinks is None:
            more = parts
        else:
            more = (sinks.astype(jnp.float32), *parts)
        return _launch(spec, splits, phase, (q, *pools, *rows, plan.rows_B4, splits_SF, *more))

    return merged(spec.interpret, launch, plan.splits_SF)


def _launch(
    spec: Spec, splits: int, phase: str, operands: tuple[Array, ...]
) -> tuple[Array, Array, Array]:
    """Returns `o_BNH` and the parts: outputs `[K, parts * group, H]` and log2-sum-exps.

    `operands` ends with sinks if the model has them, then with the parts to merge if `phase` is
    "merge". In phase "parts" nothing is merged; in phase "both" this launch merges its own parts.
    """
    pools = 2 if spec.kv_dtype is None else 3

    def decode_attend(q_ref, *refs, **sm):  # type: ignore[no-untyped-def]
        pool_refs = refs[:pools]
        *fixed, rows_ref, splits_ref = refs[pools : pools + 5]
        rest = refs[pools + 5 :]
        *more, o_ref, parts_o, parts_lse = rest
        merged = (parts_o, parts_lse)
        if phase == "merge":
            *more, merge_o, merge_lse = more
            merged = (merge_o, merge_lse)
        # Blocks start in the order of the grid. A row's followers have higher splits than its
        # owner, which waits for them: they start first.
        split = splits - 1 - lax.axis_index("split")
        h = lax.axis_index("head")
        wg = lax.axis_index("wg")
        low, high, r0, r1, *first_row, home, followers = (
            splits_ref[split, i] for i in range(SPLIT_FIELDS)
        )
        if phase == "parts":
            chunks = jnp.int32(0)
        else:
            chunks = lax.div(followers * spec.group + ROWS - 1, jnp.int32(ROWS))
        block = _Block(
            *(spec, phase, sm, split, h, low, high, r0, r1, tuple(first_row), home, followers),
            *(chunks, rows_ref, splits_ref),
        )

        @pl.when(wg == 1)
        def _producer() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            table_ref, page_ref, _ = fixed
            _produce(block, q_ref, pool_refs, PageTable(table_ref, page_ref[0]), merged)

        @pl.when(wg == 0)
        def _consumer() -> None:
            plgpu.set_max_registers(registers_of(spec.tuning.consumers), action="increase")
            sinks = None
            if more:
                sinks = [more[0][spec.first_head(h) + i] for i in range(spec.G)]

            def store(r: Array, begin: Array | int) -> None:
                _store_heads(spec, sm["o"], o_ref.at[r], h, begin)

            _zero_dead_rows(spec, split, splits, fixed[2], sm["o"], store)
            _consume(block, sinks, store, (parts_o, parts_lse))

        if spec.tuning.consumers > 1:
            pl.when(wg == 2)(
                lambda: narrow.second_consumer(
                    *(spec, sm),
                    lambda step: block.each_row(
                        lambda r, fields, n: step(r, block.tiles(fields), n)
                    ),
                    h,
                )
            )

    parts = splits * spec.group + ROWS  # the last owner reads full tiles of ROWS rows
    out = (
        jax.ShapeDtypeStruct((spec.B, spec.N, spec.H), spec.dtype),
        jax.ShapeDtypeStruct((spec.K, parts, spec.H), spec.dtype),
        jax.ShapeDtypeStruct((spec.K, parts), jnp.float32),
    )
    return launch(
        decode_attend,
        operands,
        spec.interpret,
        thread_name="wg",
        out_type=out,
        scratch_types=_scratch(spec),
        grid=(splits, spec.K),
        grid_names=("split", "head"),
        num_threads=1 + spec.tuning.consumers,
    )


class _Block(NamedTuple):
    """One thread block: its share of the plan, and what its warpgroups use together.

    Attributes:
        phase: see `_launch`.
        sm: shared memory and barriers, by the names in `_scratch`.
        low, high: first and end tile of the share in the line; r0, r1: first and end row.
        first_row: the plan's fields of row r0.
        home: the split that owns row r0.
        followers: splits that hand parts of this split's last row to it.
        chunks: tiles of `ROWS` rows that those parts fill.
    """

    spec: Spec
    phase: str
    sm: dict[str, Any]
    split: Array
    h: Array
    low: Array
    high: Array
    r0: Array
    r1: Array
    first_row: tuple[Array, ...]
    home: Array
    followers: Array
    chunks: Array
    rows_ref: Any
    splits_ref: Any

    @property
    def ring(self) -> PartsRing:
        return parts_ring(self.spec, self.low, self.high)

    @property
    def flag(self) -> Any:
        """The flag that followers raise for this block."""
        return self.splits_ref.at[self.split, SPLIT_FIELDS + self.h]

    def tiles(self, fields: tuple[Array, ...]) -> Tiles:
        """The block's tiles of a row with these fields of `each_row`."""
        _, _, length, zero, begin, end = fields
        return Tiles(begin - self.low, end - begin, (begin - zero) * TILE, TILE, length)

    def each_row(self, step: Callable[..., Array]) -> Array:
        """Run `step(row, fields, rows in use before it)` over the share. The next row's fields are
        read during the step of this one."""

        def advance(r: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            last = self.spec.B - 1
            following = [self.rows_ref[jnp.minimum(r + 1, last), i] for i in range(ROW_FIELDS)]
            begin, end, length, zero, n = carry
            share = jnp.maximum(self.low, begin), jnp.minimum(self.high, end)
            step(r, (begin, end, length, zero, *share), n)
            return (*following, n + (end > begin).astype(jnp.int32))

        return lax.fori_loop(self.r0, self.r1, advance, (*self.first_row, jnp.int32(0)))[-1]


def _produce(
    block: _Block, q_ref: Any, pool_refs: Any, table: PageTable, merged: tuple[Any, Any]
) -> None:
    """The producer warpgroup: copies of queries, of tiles of keys and values, and of the parts
    `merged` that followers left."""
    spec = block.spec
    sm = block.sm
    ring = block.ring
    stages = spec.tuning.stages
    queries = spec.tuning.queries
    first_part = (block.split + 1) * spec.group

    def row(r, fields, n):  # type: ignore[no-untyped-def]
        _, _, length, zero, begin, end = fields
        last_page = lax.div(length - 1, jnp.int32(spec.C))

        @pl.loop(begin, end)
        def _tile(t):  # type: ignore[no-untyped-def]
            # Before the wait, so that they come during it
            pages = pages_of(spec, table, r, (t - zero) * TILE, last_page)
            entry = take(sm["free"], t - block.low, stages)
            copy = copy_tile if spec.kv_dtype is None else narrow.copy_tile
            copy(spec, pool_refs, pages, spec.kv_head(block.h), sm, entry)

            # After the copies, so that they do not wait for this load
            pl.when(t == begin)(lambda: send_queries(spec, q_ref, r, block.h, n, sm))

    rows = block.each_row(row)
    if block.phase == "both":
        with jax.named_scope("wait for flags"):
            pl.when(block.followers > 0)(lambda: await_flag(block.flag, block.followers))

    @pl.loop(0, block.chunks)
    def _parts(c):  # type: ignore[no-untyped-def]
        entry = take(sm[ring.free], ring.entry(c), ring.slots)
        copy_parts(spec, ring, merged, (block.h, first_part + c * ROWS), sm, entry)

    # Every arrival is waited for, so that the barriers end in the phase they began in.
    if spec.kv_dtype is None:
        tiles = ring.entry(block.chunks)
    else:
        tiles = block.high - block.low
    drain(sm["free"], tiles, stages)
    if spec.kv_dtype is not None:
        drain(sm["part_free"], block.chunks, ring.slots)
    drain(sm["q_free"], rows, queries)


def _consume(
    block: _Block,
    sinks: list[Array] | None,
    store: Callable[[Array, Array | int], None],
    parts: tuple[Any, Any],
) -> None:
    """The consumer warpgroup: attention over the share. An owner stores the row with `store(row,
    first query)`; a follower leaves its part in `parts` and raises the owner's flag."""
    spec = block.spec
    sm = block.sm
    ring = block.ring
    stages = jnp.int32(spec.tuning.stages)

    def row(r, fields, n):  # type: ignore[no-untyped-def]
        row_begin, row_end, length, zero, begin, end = fields
        slot = lax.rem(n, jnp.int32(spec.tuning.queries))
        ours = row_begin >= block.low
        first_row = spec.first_query(r, block.h)[1]

        def before() -> Carry:
            return start(spec.H, sinks, first_row, ours)

        def step(t, carry):  # type: ignore[no-untyped-def]
            entry = lax.rem(t - block.low, stages)
            return fold_tile(spec, sm, slot, entry, (t - zero) * TILE, length, carry)

        def merge(c, carry):  # type: ignore[no-untyped-def]
            entry = lax.rem(ring.entry(c), jnp.int32(ring.slots))
            left = block.followers - c * (ROWS // spec.group)
            return fold_parts(spec, ring, sm, entry, left, carry)

        @pl.when(end > begin)
        def _() -> None:
            plgpu.barrier_wait(sm["q_full"].at[slot])
            if spec.kv_dtype is None:
                carry = lax.fori_loop(begin, end, step, before())
            else:
                carry = narrow.attend(spec, sm, slot, block.tiles(fields), first_row, before)
            plgpu.barrier_arrive(sm["q_free"].at[slot])
            merges = jnp.where(jnp.logical_and(ours, row_end > block.high), block.chunks, 0)
            with jax.named_scope("merge"):
                carry = lax.fori_loop(0, merges, merge, carry)
            _keep(spec, sm, first_row, carry)
            pl.when(ours)(lambda: store(r, first_row))

            @pl.when(jnp.logical_not(ours))
            def _() -> None:
                _leave_part(block, parts)
                if block.phase == "both":
                    raise_flag(block.splits_ref.at[block.home, SPLIT_FIELDS + block.h])

    block.each_row(row)
    with jax.named_scope("wait for output to leave"):
        plgpu.wait_smem_to_gmem(0)


def _keep(spec: Spec, sm: dict[str, Any], first_row: Array, carry: Carry) -> None:
    """Normalised outputs and log2-sum-exps of a row's queries into shared memory."""
    acc, top, total = carry
    query = plgpu.broadcasted_iota(jnp.int32, acc.shape, 0, layout=plgpu.Layout.WGMMA) - first_row
    mine = jnp.logical_and(query >= 0, query < spec.G)  # neighbours' queries may be NaN
    acc = jnp.where(mine, acc * lax.broadcast_in_dim(1 / total, acc.shape, [0]), 0.0)
    acc = narrowed(acc, spec.dtype, plgpu.Layout.WGMMA, spec.interpret)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for c in range(spec.H // spec.width):
        store_rows(sm["o"].at[c], acc[:, c * spec.width : (c + 1) * spec.width], spec.interpret)
    sm["lse_out"][...] = top + jnp.log2(total)
    plgpu.commit_smem()


def _store_heads(spec: Spec, o: Any, to: Any, h: Array, begin: Array | int) -> None:
    """The outputs `o` of block `h`, whose first query is row `begin`, to a row of the batch. Each
    head is stored by one block."""

    def store(skip: int) -> None:
        row, head = ((x + skip if skip else x) for x in (begin, spec.first_head(h)))
        for c, column in enumerate(spec.columns):
            source = o.at[c, pl.ds(row, spec.G - skip)]
            plgpu.copy_smem_to_gmem(source, to.at[pl.ds(head, spec.G - skip), column])

    if not spec.overlap:
        store(0)
        return
    pl.when(spec.is_last(h))(lambda: store(spec.overlap))
    pl.when(jnp.logical_not(spec.is_last(h)))(lambda: store(0))


def _leave_part(block: _Block, parts: tuple[Any, Any]) -> None:
    """A follower's part into device memory, visible when this returns."""
    outputs, lse = parts
    group = block.spec.group
    sm = block.sm
    part = pl.ds(pl.multiple_of(block.split * group, group), group)
    plgpu.copy_smem_to_gmem(sm["lse_out"].at[pl.ds(0, group)], lse.at[block.h, part])
    for c, column in enumerate(block.spec.columns):
        plgpu.copy_smem_to_gmem(sm["o"].at[c, pl.ds(0, group)], outputs.at[block.h, part, column])
    with jax.named_scope("wait for parts to leave"):
        plgpu.wait_smem_to_gmem(0)


def _scratch(spec: Spec) -> dict[str, Any]:
    """Shared memory and barriers of one block."""
    stages = spec.tuning.stages
    queries = spec.tuning.queries
    scratch = {
        "o": plgpu.SMEM((spec.H // spec.width, ROWS, spec.width), spec.dtype),
        "lse_out": plgpu.SMEM((ROWS,), jnp.float32),
        "q_full": plgpu.Barrier(num_barriers=queries),
        "q_free": plgpu.Barrier(num_arrivals=spec.tuning.consumers, num_barriers=queries),
        "free": plgpu.Barrier(num_barriers=stages),
    }
    if spec.kv_dtype is not None:
        scratch |= narrow.scratch(spec) | narrow.parts_scratch(spec)
    else:
        scratch |= {
            "q": plgpu.SMEM((queries, ROWS, spec.H), spec.dtype, transforms=tiled(spec.H)),
            "k": plgpu.SMEM((stages, TILE, spec.H), spec.dtype, transforms=tiled(spec.H)),
            "v": plgpu.SMEM((stages, TILE, spec.H), spec.dtype, transforms=tiled(spec.H)),
            "lse_in": plgpu.SMEM((stages, ROWS), jnp.float32),
            "k_full": plgpu.Barrier(num_arrivals=spec.copies, num_barriers=stages),
            "v_full": plgpu.Barrier(num_arrivals=spec.copies, num_barriers=stages),
            "lse_full": plgpu.Barrier(num_barriers=stages),
        }
    if spec.interpret is not None:
        scratch["p"] = plgpu.SMEM((ROWS, TILE), spec.dtype, transforms=TILED)
    return scratch


def _zero_dead_rows(
    spec: Spec,
    split: Array,
    splits: int,
    lengths_ref: Any,
    o: Any,
    store: Callable[[Array, int], None],
) -> None:
    """Store zeros for rows of length 0 among every `splits`-th row from `split` on. The lengths are
    read at once, while the first tile comes."""
    rows = [split + i * splits for i in range(-(-spec.B // splits))]
    dead = [
        jnp.logical_and(row < spec.B, lengths_ref[jnp.minimum(row, spec.B - 1)] == 0)
        for row in rows
    ]

    @pl.when(functools.reduce(jnp.logical_or, dead))
    def _() -> None:
        zeros = plgpu.layout_cast(jnp.full(o.shape[1:], 0.0, spec.dtype), plgpu.Layout.WGMMA)
        for c in range(o.shape[0]):
            store_rows(o.at[c], zeros, spec.interpret)
        plgpu.commit_smem()
        for row, is_dead in zip(rows, dead, strict=True):
            pl.when(is_dead)(lambda row=row: store(row, 0))
