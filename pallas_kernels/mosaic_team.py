"""Rows of few tokens on NVIDIA Hopper, each worked on by a team of eight warpgroups: one processor
alone takes long to load a row of many shares, and to compute with it.

The team is spread over the thread blocks of a cluster. They write into each other's shared memory;
a barrier there counts the bytes that arrive. Fences would wait for device memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import THREADS, launch, row_layout, store
from pallas_kernels.mosaic_units import PROCESSORS

TEAM = 8  # warpgroups
MOST_BLOCKS = 8  # a cluster of more needs leave, and some cards have no room for it
# Registers of a thread that are filled before the first is used, by the blocks of a team
LOADED = {1: 48, 2: 72, 4: 160, 8: 160}
PIECE = 4 * THREADS  # columns of 16 bits that a warpgroup gives away at once
PIECE_LAYOUT = row_layout(PIECE)
WARP = 32
ut = mgpu.utils


def blocks_of(rows: int, interpret: Any) -> int:
    """As many thread blocks for each row as the card runs at once. The interpreter has no
    clusters."""
    most = 1 if interpret is not None else min(MOST_BLOCKS, PROCESSORS // rows)
    return next(blocks for blocks in (8, 4, 2, 1) if blocks <= max(1, most))


class Team(NamedTuple):
    """The warpgroups of a row. In a kernel each calls `begin`, `ready`, `tell` or `give`, and
    `done`; what the others have told can be read after `wait`.

    Attributes:
      blocks: thread blocks that they are spread over: 1, 2, 4 or 8.
    """

    blocks: int

    def launch(
        self, kernel: Any, operands: tuple[Any, ...], rows: int, interpret: Any, **options: Any
    ) -> Any:
        """Run a kernel, which finds its row on the axis "row" and `met` in its scratch."""
        warpgroups = TEAM // self.blocks
        met: Any = plgpu.Barrier(num_arrivals=TEAM)
        if self.blocks > 1:
            options |= {"cluster": (self.blocks,), "cluster_names": ("rank",)}
            met = plgpu.SMEM((2,), jnp.int32)  # as its barrier is to count bytes
        options["scratch_types"] |= {"met": met}
        return launch(
            kernel,
            operands,
            interpret,
            # A thread reads what others have stored after `wait` alone
            {"unsafe_no_auto_barriers": True},
            grid=(rows,),
            grid_names=("row",),
            num_threads=warpgroups,
            thread_name="wg",
            **options,
        )

    def member(self) -> Array:
        """The number of this warpgroup in its team. Those of a block follow each other."""
        rank = lax.axis_index("rank") if self.blocks > 1 else jnp.int32(0)
        return rank * (TEAM // self.blocks) + lax.axis_index("wg")

    def begin(self, met: Any, told: int) -> None:
        """Expect so many bytes in this block."""
        if self.blocks > 1:
            _begin(met, told)

    def ready(self) -> None:
        """Wait until all blocks have begun."""
        if self.blocks > 1:
            _ready()

    def tell(self, ref: Any, x: Array, layout: Any, met: Any) -> None:
        """Store four float32 numbers, one of each warp as `layout` has them, in every block."""
        if self.blocks > 1:
            _tell(ref, x, layout, met, self.blocks)
        else:
            store(ref, x)

    def give(self, ref: Any, x: Array, met: Any) -> None:
        """Store a piece in the first member's block."""
        if self.blocks > 1:
            _give(ref, x, met)
        else:
            store(ref, x)

    def done(self, met: Any) -> None:
        """This warpgroup has told all."""
        if self.blocks == 1:
            plgpu.commit_smem()
            plgpu.barrier_arrive(met)

    def wait(self, met: Any) -> None:
        """Wait for the whole team."""
        if self.blocks > 1:
            _wait(met)
        else:
            plgpu.barrier_wait(met)


def _begin(met: Any, told: int) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def begin(_: Any, met: Any) -> None:
        place = ut.memref_ptr(met)
        first = ut.arith.cmpi(ut.arith.CmpIPredicate.eq, ut.thread_idx(), _i32(0))
        for code in (
            "mbarrier.init.shared::cta.b64 [$0], 1;",
            f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {told};",
        ):
            ut.inline_ptx(code, place, predicate=first, has_side_effects=True)
        ut.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)
        ut.inline_ptx("barrier.cluster.arrive.relaxed.aligned;", has_side_effects=True)

    begin(met)


def _ready() -> None:
    @plgpu.inline_mgpu()
    def ready(_: Any) -> None:
        ut.inline_ptx("barrier.cluster.wait.acquire.aligned;", has_side_effects=True)

    ready()


def _tell(ref: Any, x: Array, layout: Any, met: Any, blocks: int) -> None:
    """Each lane stores in the block with its number."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, plgpu.RefType()))
    def tell(_: Any, ref: Any, x: Any, met: Any) -> None:
        warp, lane = (of(_thread(), _i32(WARP)) for of in (ut.arith.divui, ut.arith.remui))
        place = ut.getelementptr(ut.memref_ptr(ref), [warp], ut.ir.F32Type.get())
        told = ut.vector.extract(x.registers.item(), dynamic_position=[], static_position=[0])
        has_block = ut.arith.cmpi(ut.arith.CmpIPredicate.ult, lane, _i32(blocks))
        block = ut.arith.remui(lane, _i32(blocks))
        _send("f32", place, told, met, block, predicate=has_block)

    tell(ref, x, met)


def _give(ref: Any, x: Array, met: Any) -> None:
    """Each thread stores its four numbers."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PIECE_LAYOUT, plgpu.RefType()))
    def give(_: Any, ref: Any, x: Any, met: Any) -> None:
        i64 = ut.ir.IntegerType.get_signless(64)
        place = ut.getelementptr(ut.memref_ptr(ref), [_thread()], i64)
        _send("b64", place, ut.bitcast(x.registers.item(), i64), met, _i32(0))

    give(ref, x, met)


def _wait(met: Any) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(_: Any, met: Any) -> None:
        code = (
            "{ .reg .pred all; "
            "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 all, [$0], 0; "
            "@!all bra again; }"
        )
        ut.inline_ptx(code, ut.memref_ptr(met), has_side_effects=True)

    wait(met)


def _send(type_name: str, place: Any, x: Any, met: Any, rank: Any, **options: Any) -> None:
    """Store x at this place in another block, whose barrier counts it."""
    there = [
        ut.inline_ptx(
            "mapa.shared::cluster.u32 $0, $1, $2;",
            pointer,
            rank,
            result_types=ut.ir.IntegerType.get_signless(32),
        )
        for pointer in (place, ut.memref_ptr(met))
    ]
    ut.inline_ptx(
        f"st.async.shared::cluster.mbarrier::complete_tx::bytes.{type_name} [$0], $1, [$2];",
        there[0],
        x,
        there[1],
        has_side_effects=True,
        **options,
    )


def _thread() -> Any:
    return ut.arith.remui(ut.thread_idx(), _i32(THREADS))


def _i32(value: int) -> Any:
    return ut.c(value, ut.ir.IntegerType.get_signless(32))
