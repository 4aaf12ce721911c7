"""Attention within segments for NVIDIA Hopper in Pallas Mosaic GPU.

A unit is one tile of 128 queries of one head, and the tiles of keys that it meets. Each of n thread
blocks takes every n-th unit. Its producer warpgroup copies queries, keys and values by TMA, ahead
of its two compute warpgroups and across units; those do flash attention, 64 queries each. Keys that
every query of a tile sees need no mask, and come first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.mosaic_flash import ROWS, AttentionSpec, finish, fold, product, start
from pallas_kernels.mosaic_gpu import (
    PRODUCER_REGISTERS,
    TILED,
    drain,
    launch,
    registers_of,
    take,
    tiled,
)
from pallas_kernels.segment_attention.plan import SIZE, SegmentPlan
from pallas_kernels.segment_attention.plan import plan as plan
from pallas_kernels.segment_attention.segments import Segments

BLOCKS = 132  # at most, one a processor
GROUPS = SIZE // ROWS  # compute warpgroups
QUERIES = 2  # slots of queries
STAGES = {64: 4, 96: 3, 128: 2}  # slots of keys and of values, by the width of a head
# Of a thread of the producer, and of a compute warpgroup
REGISTERS = PRODUCER_REGISTERS, registers_of(GROUPS)


@dataclass(frozen=True, kw_only=True)
class Spec(AttentionSpec):
    """What one compiled kernel is specialised to; T is a multiple of a tile."""

    T: int
    blocks: int

    @property
    def N(self) -> int:
        """Query heads."""
        return self.K * self.G

    @property
    def units(self) -> int:
        return self.T // SIZE * self.N

    @property
    def stages(self) -> int:
        return STAGES[self.H]


class Unit(NamedTuple):
    """A tile of queries of one head.

    Attributes:
        row, head: its first query, and its query head.
        low, full_low, full_high, high: as in `SegmentPlan.tiles_I4`.
        number, done: units before it in its block, and tiles of keys before it.
    """

    row: Array
    head: Array
    low: Array
    full_low: Array
    full_high: Array
    high: Array
    number: Array
    done: Array

    @property
    def full(self) -> Array:
        """Tiles that need no mask."""
        return self.full_high - self.full_low

    @property
    def tiles(self) -> Array:
        return self.high - self.low

    def tile(self, j: Array) -> Array:
        """The j-th tile of keys that it meets: those without a mask, then those around them."""
        before = self.low + j - self.full
        around = jnp.where(before < self.full_low, before, self.low + j)
        return jnp.where(j < self.full, self.full_low + j, around)


def head_dims(stored: DTypeLike) -> tuple[int, ...]:
    """Widths of heads that the kernel takes, ascending."""
    return tuple(STAGES)


def check(q_TNH: Any, k_TKH: Any, v_TKH: Any) -> None:
    """Raise ValueError for shapes and types that the kernel does not take."""
    if any(x.dtype not in (jnp.bfloat16, jnp.float16) for x in (q_TNH, k_TKH, v_TKH)):
        raise ValueError(
            "mosaic_gpu segment_attention takes bfloat16 or float16, "
            f"got q {q_TNH.dtype}, k {k_TKH.dtype}, v {v_TKH.dtype}"
        )
    _, N, H = q_TNH.shape
    _, K, HK = k_TKH.shape
    if H not in STAGES or HK != H or v_TKH.shape != k_TKH.shape or N % K:
        raise ValueError(
            "mosaic_gpu segment_attention takes head_dim 64, 96 or 128 and equally many heads of "
            f"keys and values, which divide the query heads, got q {q_TNH.shape}, k {k_TKH.shape}, "
            f"v {v_TKH.shape}"
        )


def segment_attention(
    q_TNH: Array,
    k_TKH: Array,
    v_TKH: Array,
    segments: Segments,
    *,
    scale: float,
    window: int | None = None,
    plan: SegmentPlan | None = None,
    interpret: Any = None,
) -> Array:
    """See `pallas_kernels.segment_attention`. Raises what `check` raises.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    check(q_TNH, k_TKH, v_TKH)
    planned = plan or _plan(segments, window=window)
    tokens, N, H = q_TNH.shape
    rest = -tokens % SIZE
    K = k_TKH.shape[1]
    whole = [jnp.pad(x, ((0, rest), (0, 0), (0, 0))) for x in (q_TNH, k_TKH, v_TKH)]
    spec = Spec(
        K=K,
        G=N // K,
        H=H,
        dtype=q_TNH.dtype,
        scale=scale,
        softcap=None,
        interpret=interpret,
        T=tokens + rest,
        blocks=min(BLOCKS, (tokens + rest) // SIZE * N),
    )
    return _launch(spec, planned, *whole)[:tokens]


_plan = plan  # the option has the same name


def _launch(spec: Spec, plan: SegmentPlan, *qkv: Array) -> Array:
    def kernel(begin_ref, end_ref, tiles_ref, q_ref, k_ref, v_ref, o_ref, **sm):  # type: ignore[no-untyped-def]
        wg = lax.axis_index("wg")
        each_unit = functools.partial(_each_unit, spec, tiles_ref)

        @pl.when(wg == GROUPS)
        def _producer() -> None:
            plgpu.set_max_registers(REGISTERS[0], action="decrease")
            units, tiles = each_unit(lambda unit: _produce(spec, unit, (q_ref, k_ref, v_ref), sm))
            drain(sm["q_free"], units, QUERIES)
            drain(sm["k_free"], tiles, spec.stages)
            drain(sm["v_free"], tiles, spec.stages)

        @pl.when(wg < GROUPS)
        def _consumer() -> None:
            plgpu.set_max_registers(REGISTERS[1], action="increase")
            each_unit(lambda unit: _consume(spec, unit, wg, (begin_ref, end_ref), o_ref, sm))
            plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = f"segment_attention_{spec.N}x{spec.H}"  # for profiles
    return launch(
        kernel,
        (*plan, *qkv),
        spec.interpret,
        out_type=jax.ShapeDtypeStruct((spec.T, spec.N, spec.H), spec.dtype),
        scratch_types=_scratch(spec),
        grid=(spec.blocks,),
        grid_names=("block",),
        num_threads=GROUPS + 1,
        thread_name="wg",
        # Rows are reduced within a warp: no memory for reductions across warps
        compiler={"reduction_scratch_bytes": 0},
    )


def _scratch(spec: Spec) -> dict[str, Any]:
    """Shared memory and barriers of one block."""

    def tiles(slots: int, rows: int) -> Any:
        return plgpu.SMEM((slots, rows, spec.H), spec.dtype, transforms=tiled(spec.H))

    scratch = {
        "q": tiles(QUERIES, SIZE),
        "k": tiles(spec.stages, SIZE),
        "v": tiles(spec.stages, SIZE),
        "o": tiles(GROUPS, ROWS),
    }
    for name, slots in (("q", QUERIES), ("k", spec.stages), ("v", spec.stages)):
        scratch[f"{name}_full"] = plgpu.Barrier(num_barriers=slots)
        scratch[f"{name}_free"] = plgpu.Barrier(num_arrivals=GROUPS, num_barriers=slots)
    if spec.interpret is not None:
        scratch["p"] = plgpu.SMEM((GROUPS, ROWS, SIZE), spec.dtype, transforms=TILED)
    return scratch


def _each_unit(spec: Spec, tiles_ref: Any, run: Callable[[Unit], None]) -> tuple[Array, Array]:
    """Call `run` for each of the block's units; returns how many units and tiles of keys it has."""
    block = lax.axis_index("block")
    N = jnp.int32(spec.N)

    def body(i: Array, done: Array) -> Array:
        index = block + i * spec.blocks
        tile = lax.div(index, N)
        low, full_low, full_high, high = (tiles_ref[tile, field] for field in range(4))
        row = pl.multiple_of(tile * SIZE, SIZE)
        unit = Unit(row, lax.rem(index, N), low, full_low, full_high, high, i, done)
        run(unit)
        return done + unit.tiles

    units = lax.div(spec.units - block + (spec.blocks - 1), jnp.int32(spec.blocks))
    return units, lax.fori_loop(0, units, body, jnp.int32(0))


def _produce(spec: Spec, unit: Unit, refs: tuple[Any, Any, Any], sm: dict[str, Any]) -> None:
    """Copy a unit's queries, and its keys and values."""
    q_ref, *pairs = refs

    def copy(name: str, entry: Array, slots: int, source: Any) -> None:
        slot = take(sm[f"{name}_free"], entry, slots)
        plgpu.copy_gmem_to_smem(source, sm[name].at[slot], sm[f"{name}_full"].at[slot])

    copy("q", unit.number, QUERIES, q_ref.at[pl.ds(unit.row, SIZE), unit.head])
    head = lax.div(unit.head, jnp.int32(spec.G))

    @pl.loop(0, unit.tiles)
    def _(j):  # type: ignore[no-untyped-def]
        rows = pl.ds(pl.multiple_of(unit.tile(j) * SIZE, SIZE), SIZE)
        for name, ref in zip("kv", pairs, strict=True):
            copy(name, unit.done + j, spec.stages, ref.at[rows, head])


def _consume(
    spec: Spec, unit: Unit, wg: Array, bounds: tuple[Any, Any], o_ref: Any, sm: dict[str, Any]
) -> None:
    """Attention of one warpgroup's queries of a unit."""
    slot_rows = pl.ds(pl.multiple_of(wg * ROWS, ROWS), ROWS)
    rows = pl.ds(pl.multiple_of(unit.row + wg * ROWS, ROWS), ROWS)
    place = lax.rem(unit.number, jnp.int32(QUERIES))
    plgpu.barrier_wait(sm["q_full"].at[place])
    q = sm["q"].at[place, slot_rows]
    p_sm = sm["p"].at[wg] if "p" in sm else None

    def step(j, carry, masked):  # type: ignore[no-untyped-def]
        slot = lax.rem(unit.done + j, jnp.int32(spec.stages))
        mask = None
        if masked:
            mask = functools.partial(_mask, bounds, rows, unit.tile(j))
        plgpu.barrier_wait(sm["k_full"].at[slot])
        scores = product(q, sm["k"].at[slot].T, (ROWS, SIZE), lambda: None)
        plgpu.barrier_arrive(sm["k_free"].at[slot])

        def ready() -> Any:
            plgpu.barrier_wait(sm["v_full"].at[slot])
            return sm["v"].at[slot]

        carry = fold(spec, carry, scores, mask, ready, p_sm)
        plgpu.barrier_arrive(sm["v_free"].at[slot])
        return carry

    carry = lax.fori_loop(0, unit.full, lambda j, c: step(j, c, False), start(spec.H))
    carry = lax.fori_loop(unit.full, unit.tiles, lambda j, c: step(j, c, True), carry)
    plgpu.barrier_arrive(sm["q_free"].at[place])
    out, _ = finish(carry)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    sm["o"].at[wg][...] = out.astype(spec.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(sm["o"].at[wg], o_ref.at[rows, unit.head])


def _mask(bounds: tuple[Any, Any], rows: Any, tile: Array, scores: Array) -> Array:
    """-inf where a row does not see a key of the tile."""
    begin, end = (
        plgpu.load(ref.at[rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False) - tile * SIZE
        for ref in bounds
    )
    key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    seen = jnp.logical_and(
        key >= lax.broadcast_in_dim(begin, scores.shape, [0]),
        key < lax.broadcast_in_dim(end, scores.shape, [0]),
    )
    return jnp.where(seen, scores, -jnp.inf)
