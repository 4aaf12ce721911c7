"""The Hopper kernel of latent decode: splits x tiles of 64 query heads thread blocks in one launch.

A producer warpgroup streams tiles of 64 tokens through a ring of two slots. The output of 64 heads,
512 numbers each, is more than a warpgroup's registers hold: two consumers have half of its columns
each (`mosaic_flash`). The columns of values are the first of the same slot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.latent_decode.mosaic_flash import BLOCK, LSE, Spec, fold, keep, merge, start
from pallas_kernels.mosaic_flash import ROWS, merged, zero_from
from pallas_kernels.mosaic_gpu import (
    PRODUCER_REGISTERS,
    TILED,
    PageTable,
    await_flag,
    drain,
    launch,
    raise_flag,
    registers_of,
    take,
)
from pallas_kernels.paged_decode.plan import ROW_FIELDS, SPLIT_FIELDS, DecodePlan

STAGES = 2  # slots of the ring


def attend(spec: Spec, q: Array, pages: Array, rows: tuple[Array, ...], plan: DecodePlan) -> Array:
    """Run the share of every split and return `o_BNV`. `rows` are the page table, its first page,
    and the lengths."""
    splits = plan.splits_SF.shape[0]

    def run(phase: str, splits_SF: Any, *parts: Array) -> tuple[Array, ...]:
        return _launch(spec, splits, phase, (q, pages, *rows, plan.rows_B4, splits_SF, *parts))

    return merged(spec.interpret, run, plan.splits_SF)


def _launch(spec: Spec, splits: int, phase: str, operands: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns `o_BNV` and the parts of followers: outputs and log2-sum-exps.

    In phase "parts" nothing is merged, in "merge" the parts at the end of `operands` are, and in
    "both" this launch's own.
    """

    def kernel(  # type: ignore[no-untyped-def]
        q_ref, pages_ref, table_ref, page_ref, lengths_ref, rows_ref, splits_ref, *rest, **sm
    ):
        *input_parts, o_ref, parts_o, parts_lse = rest
        # Owners wait for their followers, which have higher splits: those start first
        split = splits - 1 - lax.axis_index("split")
        tile = lax.axis_index("tile")
        low, high, r0, r1, *first_row, home, followers = (
            splits_ref[split, i] for i in range(SPLIT_FIELDS)
        )
        followers = jnp.int32(0) if phase == "parts" else followers
        flags = [splits_ref.at[s, SPLIT_FIELDS + tile] for s in (split, home)]
        block = _Block(
            *(spec, phase, sm, split, tile, low, high, r0, r1, tuple(first_row), followers),
            *(flags, rows_ref),
        )
        outputs = (o_ref, parts_o, parts_lse)
        parts = tuple(input_parts) or (parts_o, parts_lse)

        @pl.when(lax.axis_index("wg") == 2)
        def _() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            table = PageTable(table_ref, page_ref[0])
            _produce(block, q_ref, pages_ref, table)

        for side in range(2):

            @pl.when(lax.axis_index("wg") == side)
            def _(side: int = side) -> None:
                plgpu.set_max_registers(registers_of(2), action="increase")
                _consume(block, side, outputs, parts)
                if side == 0:
                    _zero_dead_rows(block, splits, lengths_ref, o_ref)

    out = (
        jax.ShapeDtypeStruct((spec.B, spec.N, spec.V), spec.dtype),
        jax.ShapeDtypeStruct((spec.tiles, splits, ROWS, spec.V), spec.dtype),
        jax.ShapeDtypeStruct((spec.tiles, splits, ROWS), jnp.float32),
    )
    return launch(
        kernel,
        operands,
        spec.interpret,
        thread_name="wg",
        out_type=out,
        scratch_types=_scratch(spec),
        grid=(splits, spec.tiles),
        grid_names=("split", "tile"),
        num_threads=3,
        # Rows are reduced within a warp: no memory for reductions across warps
        compiler={"reduction_scratch_bytes": 0},
    )


def _scratch(spec: Spec) -> dict[str, Any]:
    """Shared memory and barriers of one block."""
    return {
        "q": plgpu.SMEM((spec.W // BLOCK, ROWS, BLOCK), spec.dtype, transforms=TILED),
        "k": plgpu.SMEM((STAGES, ROWS, spec.W), spec.dtype, transforms=TILED),
        "p": plgpu.SMEM((ROWS, ROWS), spec.dtype, transforms=TILED),
        # Two factors, and log2-sum-exps. In one array, since each begins at a multiple of 1,024
        # bytes, and there are few left.
        "sums": plgpu.SMEM((LSE + 1, ROWS), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=spec.W // BLOCK),
        "q_free": plgpu.Barrier(),
        "full": plgpu.Barrier(num_arrivals=spec.copies, num_barriers=STAGES),
        "tail": plgpu.Barrier(num_arrivals=spec.copies),
        "free": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "told": plgpu.Barrier(num_barriers=1),
        "heard": plgpu.Barrier(num_barriers=1),
        "met": plgpu.Barrier(num_arrivals=2),
    }


class _Block(NamedTuple):
    """One thread block: its share of the plan, and what its warpgroups use together.

    Attributes:
        low, high: first and end tile of the share in the line; r0, r1: first and end row.
        first_row: the plan's fields of row r0.
        followers: splits whose parts of this split's last row it merges.
        flags: the flag of this block, and that of the owner of row r0.
    """

    spec: Spec
    phase: str
    sm: dict[str, Any]
    split: Array
    tile: Array
    low: Array
    high: Array
    r0: Array
    r1: Array
    first_row: tuple[Array, ...]
    followers: Array
    flags: list[Any]
    rows_ref: Any

    @property
    def heads(self) -> Any:
        """The query heads of this block."""
        return pl.ds(pl.multiple_of(self.tile * self.spec.heads, 8), self.spec.heads)

    def each_row(self, step: Callable[..., None]) -> Array:
        """Run `step(row, fields, rows in use before it)` for the share's rows in use, and count
        them. The next row's fields are read meanwhile."""

        def advance(r: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            next_row = jnp.minimum(r + 1, self.spec.B - 1)
            following = [self.rows_ref[next_row, i] for i in range(ROW_FIELDS)]
            first, last, length, zero, n = carry
            begin = jnp.maximum(self.low, first)
            end = jnp.minimum(self.high, last)
            fields = (first, last, length, zero, begin, end)
            pl.when(end > begin)(lambda: step(r, fields, n))
            return (*following, n + (end > begin).astype(jnp.int32))

        return lax.fori_loop(self.r0, self.r1, advance, (*self.first_row, jnp.int32(0)))[-1]


def _produce(block: _Block, q_ref: Any, pages_ref: Any, table: PageTable) -> None:
    """The producer warpgroup: copies of queries and of tiles."""
    spec = block.spec
    sm = block.sm

    def row(r, fields, n):  # type: ignore[no-untyped-def]
        _, _, length, zero, begin, end = fields

        @pl.loop(begin, end)
        def _tile(t):  # type: ignore[no-untyped-def]
            first = (t - zero) * ROWS
            slot = take(sm["free"], t - block.low, STAGES)
            full = first + ROWS <= length
            copy = functools.partial(_copy_tile, spec, pages_ref, table, (r, first, length))
            pl.when(full)(lambda: copy(sm["k"].at[slot], sm["full"].at[slot]))

            @pl.when(jnp.logical_not(full))
            def _tail() -> None:
                copy(sm["k"].at[slot], sm["tail"])
                plgpu.barrier_wait(sm["tail"])
                zero_from(sm["k"].at[slot], ROWS, spec.W, length - first)
                for _copy in range(spec.copies):
                    plgpu.barrier_arrive(sm["full"].at[slot])

            @pl.when(t == begin)
            def _queries() -> None:
                pl.when(n > 0)(lambda: plgpu.barrier_wait(sm["q_free"]))
                for j, column in enumerate(spec.blocks(spec.W)):
                    to = sm["q"].at[j, pl.ds(0, spec.heads)]
                    plgpu.copy_gmem_to_smem(q_ref.at[r, block.heads, column], to, sm["q_full"])

    rows = block.each_row(row)
    # Every arrival is waited for, so that the barriers end in the phase they began in.
    drain(sm["free"], block.high - block.low, STAGES)
    pl.when(rows > 0)(lambda: plgpu.barrier_wait(sm["q_free"]))


def _copy_tile(
    spec: Spec, pages_ref: Any, table: PageTable, place: tuple[Array, ...], to: Any, barrier: Any
) -> None:
    """TMA copies of the tile of a row from token `first` on; pages past the last repeat it."""
    row, first, length = place
    C = jnp.int32(spec.C)
    if spec.C >= ROWS:
        page = pages_ref.at[table[row, lax.div(first, C)]]
        within = pl.ds(pl.multiple_of(lax.rem(first, C), ROWS), ROWS)
        plgpu.copy_gmem_to_smem(page.at[within] if spec.C > ROWS else page, to, barrier)
        return
    last_page = lax.div(length - 1, C)
    for j in range(spec.copies):
        page = table[row, jnp.minimum(lax.div(first, C) + j, last_page)]
        plgpu.copy_gmem_to_smem(pages_ref.at[page], to.at[pl.ds(j * spec.C, spec.C)], barrier)


def _consume(
    block: _Block, side: int, outputs: tuple[Any, Any, Any], parts: tuple[Any, Any]
) -> None:
    """A consumer warpgroup: its columns of the outputs of the share's rows. `parts` are those that
    followers left."""
    spec = block.spec
    sm = block.sm

    def row(r, fields, n):  # type: ignore[no-untyped-def]
        first, last, length, zero, begin, end = fields
        ours = first >= block.low
        merges = jnp.where(jnp.logical_and(ours, last > block.high), block.followers, 0)
        told = end - block.low + n  # events of tiles and rows before the merges
        if side == 0:
            plgpu.barrier_wait(sm["q_full"])

        def step(t, carry):  # type: ignore[no-untyped-def]
            slot = lax.rem(t - block.low, jnp.int32(STAGES))
            plgpu.barrier_wait(sm["full"].at[slot])
            place = (t - block.low + n, length - (t - zero) * ROWS)
            carry = fold(spec, sm, side, sm["k"].at[slot], place, carry)
            plgpu.barrier_arrive(sm["free"].at[slot])
            return carry

        def add(c, carry):  # type: ignore[no-untyped-def]
            part = [ref.at[block.tile, block.split + 1 + c] for ref in parts]
            return merge(spec, sm, side, part, told + c, carry)

        carry = lax.fori_loop(begin, end, step, start(spec))
        if side == 0 and block.phase == "both":
            pl.when(merges > 0)(lambda: await_flag(block.flags[0], merges))
        carry = lax.fori_loop(0, merges, add, carry)
        keep(spec, sm, side, told + merges, carry)
        plgpu.barrier_arrive(sm["met"])
        if side == 0:
            plgpu.barrier_wait(sm["met"])
            _store(block, outputs, r, ours)
            plgpu.barrier_arrive(sm["q_free"])

    rows = block.each_row(row)
    if side == 0:
        drain(sm["heard"], block.high - block.low + rows + block.followers, 1)


def _store(block: _Block, outputs: tuple[Any, Any, Any], r: Array, ours: Array) -> None:
    """An owner's row into the output; a follower's part into device memory, with a flag."""
    o_ref, parts_o, parts_lse = outputs
    lse = block.sm["sums"].at[LSE]

    @pl.when(ours)
    def _() -> None:
        _copy_out(block, o_ref.at[r, block.heads])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(jnp.logical_not(ours))
    def _() -> None:
        place = block.tile, block.split
        _copy_out(block, parts_o.at[(*place, pl.ds(0, block.spec.heads))])
        plgpu.copy_smem_to_gmem(lse, parts_lse.at[place])
        plgpu.wait_smem_to_gmem(0)
        if block.phase == "both":
            raise_flag(block.flags[1])


def _copy_out(block: _Block, to: Any) -> None:
    """TMA copies of the heads' outputs from the buffer of queries."""
    for j, column in enumerate(block.spec.blocks(block.spec.V)):
        source = block.sm["q"].at[j, pl.ds(0, block.spec.heads)]
        plgpu.copy_smem_to_gmem(source, to.at[:, column])


def _zero_dead_rows(block: _Block, splits: int, lengths_ref: Any, o_ref: Any) -> None:
    """Store zeros for rows of length 0 among every `splits`-th row. The buffer of queries is free
    for them at the end."""
    spec = block.spec
    rows = [block.split + i * splits for i in range(-(-spec.B // splits))]
    dead = [
        jnp.logical_and(row < spec.B, lengths_ref[jnp.minimum(row, spec.B - 1)] == 0)
        for row in rows
    ]

    @pl.when(functools.reduce(jnp.logical_or, dead))
    def _() -> None:
        zeros = jnp.full((ROWS, BLOCK), 0.0, spec.dtype)
        for j in range(spec.V // BLOCK):
            block.sm["q"].at[j][...] = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        for row, is_dead in zip(rows, dead, strict=True):
            pl.when(is_dead)(lambda row=row: _copy_out(block, o_ref.at[row, block.heads]))
        plgpu.wait_smem_to_gmem(0)
