"""Merging among the thread blocks of a cluster, thread by thread. Operations that Pallas lacks are
written in PTX.

For each row a block keeps the weighted sums of its group's queries in shared memory, `[group, H +
PAD]` float32, with their running maxima and totals. A unit is four columns of one query. The
threads of all blocks of the cluster share the units of all queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_flash import ROWS
from pallas_kernels.paged_decode.mosaic_flash import Spec

PAD = 4  # columns between two queries' sums, so that the lanes of a store meet different banks
THREADS = 128  # of a warpgroup
SCALAR = plgpu.Layout.WG_SPLAT(())
ut = mgpu.utils


class Unit(NamedTuple):
    """Which units a block merges, and where it keeps its own sums.

    Attributes:
        rank: of the block in the cluster.
        first_row: row of the block's first query in the tile.
        buffer: buffer of the kept sums.
    """

    spec: Spec
    rank: Array
    first_row: Array
    buffer: Array


def fence_cluster() -> None:
    """Order this thread's accesses before and after: writes before the fence are visible to threads
    of the cluster that synchronise with this one afterwards, and theirs to this one."""

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        ut.inline_ptx("fence.acq_rel.cluster;", has_side_effects=True)

    fence()


def keep_group(acc: Array, kept: Any, buffer: Array) -> None:
    """Store the group's rows, which are the first of `acc` `[ROWS, H]`, in this `buffer` of `kept`
    `[2, group, H + PAD]`. The first warp holds them."""
    _, group, stride = kept.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), SCALAR))
    def keep(_: Any, acc: Any, kept: Any, buffer: Any) -> None:
        thread = _thread()
        first_warp = ut.arith.cmpi(ut.arith.CmpIPredicate.ult, thread, _i32(32))
        lane = ut.arith.remui(thread, _i32(32))
        row = ut.arith.divui(lane, _i32(4))
        column = ut.arith.muli(ut.arith.remui(lane, _i32(4)), _i32(2))
        offset = _sum(_times(_scalar(buffer), group * stride), _times(row, stride), column)
        pointer = ut.getelementptr(ut.memref_ptr(kept), [offset], _f32())
        # [columns / 8, half]: rows from 0 and from 8 of the warp's sixteen
        registers = acc.registers.reshape(-1, 2)
        for n, half in np.ndindex(registers.shape):
            if half * 8 < group:
                pair = [_element(registers[n, half], i) for i in range(2)]
                place = 4 * (half * 8 * stride + n * 8)
                ut.inline_ptx(
                    f"st.shared.v2.f32 [$0+{place}], {{$1, $2}};",
                    pointer,
                    *pair,
                    predicate=first_warp,
                    has_side_effects=True,
                )

    keep(acc, kept, buffer)


def keep_columns(acc: Array, kept: Any, buffer: Array, first: int) -> None:
    """As `keep_group`, for `acc` `[some of H, group]`, of H from `first` on. Every warp holds some
    of its rows; those that the 64 before have too are theirs to keep."""
    _, group, stride = kept.shape
    again = -first % ROWS  # whole warps have them, as they have 16 rows each

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), SCALAR))
    def keep(_: Any, acc: Any, kept: Any, buffer: Any) -> None:
        thread = _thread()
        warp = ut.arith.divui(thread, _i32(32))
        lane = ut.arith.remui(thread, _i32(32))
        row = _sum(_times(warp, 16), ut.arith.divui(lane, _i32(4)), _i32(first))
        column = _times(ut.arith.remui(lane, _i32(4)), 2)
        new = None
        if again:
            new = ut.arith.cmpi(ut.arith.CmpIPredicate.uge, warp, _i32(again // 16))
        pointer = ut.getelementptr(
            ut.memref_ptr(kept),
            [_sum(_times(_scalar(buffer), group * stride), _times(column, stride), row)],
            _f32(),
        )
        # [rows / 64, columns / 8, half]
        registers = acc.registers.reshape(acc.shape[0] // 64, group // 8, 2)
        for m, n, half in np.ndindex(registers.shape):
            for i in range(2):
                place = 4 * ((n * 8 + i) * stride + m * 64 + half * 8)
                ut.inline_ptx(
                    f"st.shared.f32 [$0+{place}], $1;",
                    pointer,
                    _element(registers[m, n, half], i),
                    predicate=new,
                    has_side_effects=True,
                )

    keep(acc, kept, buffer)


def store_zeros(spec: Spec, place: Any) -> None:
    """Store zeros for the G queries of one row and head. `place` is their first element in device
    memory."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def store(_: Any, ref: Any) -> None:
        zero = _i32(0)
        for i in range(-(-_units(spec) // THREADS)):
            unit = _sum(_thread(), _i32(i * THREADS))
            inside = ut.arith.cmpi(ut.arith.CmpIPredicate.ult, unit, _i32(_units(spec)))
            pointer = ut.getelementptr(
                ut.memref_ptr(ref), [_times(unit, 4)], ut.dtype_to_ir_type(spec.dtype)
            )
            ut.inline_ptx(
                "st.global.v2.b32 [$0], {$1, $2};",
                pointer,
                zero,
                zero,
                predicate=inside,
                has_side_effects=True,
            )

    store(place)


def merge_peers(
    unit: Unit,
    kept: tuple[Any, Any, Any],
    out: Any,
    parts: tuple[Any, Any],
    ours: Array,
    followers: Array,
) -> None:
    """Merge this block's units: the sums that the cluster's blocks kept, and the parts of the next
    `followers` splits.

    Where `ours`, the result is written from `out` on, `[G, H]` in the kernel's type. Otherwise it
    is a part and written to `parts`: outputs `[group, H]` float32 and log2-sum-exps `[group]`. The
    parts of the next split follow them.
    """
    spec = unit.spec
    cluster = spec.tuning.cluster
    group = spec.group
    H = spec.H
    scalars = unit.rank, unit.first_row, unit.buffer, ours.astype(jnp.int32), followers

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 6, *[SCALAR] * 5))
    def merge(_: Any, *operands: Any) -> None:
        sums, tops, totals, out, part_o, part_lse = (ut.memref_ptr(ref) for ref in operands[:6])
        rank, first_row, buffer, ours, followers = (_scalar(x) for x in operands[6:])
        for i in range(-(-_units(spec) // (THREADS * cluster))):
            unit = _sum(_times(rank, THREADS), _thread(), _i32(i * THREADS * cluster))
            inside = ut.arith.cmpi(ut.arith.CmpIPredicate.ult, unit, _i32(_units(spec)))
            unit = ut.arith.minui(unit, _i32(_units(spec) - 1))
            query = ut.arith.divui(unit, _i32(H // 4))
            column = _times(ut.arith.remui(unit, _i32(H // 4)), 4)
            row = _sum(first_row, query)
            place = ut.getelementptr(
                sums, [_sum(_times(_sum(_times(buffer, group), row), H + PAD), column)], _f32()
            )
            index = [_sum(_times(buffer, ROWS), row)]
            top_at, total_at = (
                ut.getelementptr(pointer, index, _f32()) for pointer in (tops, totals)
            )
            partials = [
                (_peer(top_at, p, 1)[0], _peer(total_at, p, 1)[0], _peer(place, p, 4))
                for p in range(cluster)
            ]
            state = _joined(partials)
            part = _sum(_times(query, H), column)
            state = _with_followers(
                state, followers, (part_o, part_lse), (group * H, part), (group, query)
            )
            top = state[0]
            total = state[1]
            mixed = state[2:]
            values = [ut.arith.divf(x, total, fastmath=_fast()) for x in mixed]
            is_ours = ut.arith.cmpi(ut.arith.CmpIPredicate.ne, ours, _i32(0))
            to_out = ut.arith.andi(inside, is_ours)
            to_part = ut.arith.andi(
                inside, ut.arith.xori(is_ours, ut.c(1, ut.ir.IntegerType.get_signless(1)))
            )
            pairs = [_packed(spec.dtype, values[j], values[j + 1]) for j in (0, 2)]
            pointer = ut.getelementptr(out, [part], ut.dtype_to_ir_type(spec.dtype))
            ut.inline_ptx(
                "st.global.v2.b32 [$0], {$1, $2};",
                pointer,
                *pairs,
                predicate=to_out,
                has_side_effects=True,
            )
            pointer = ut.getelementptr(part_o, [part], _f32())
            ut.inline_ptx(
                "st.global.v4.f32 [$0], {$1, $2, $3, $4};",
                pointer,
                *values,
                predicate=to_part,
                has_side_effects=True,
            )
            pointer = ut.getelementptr(part_lse, [query], _f32())
            lse = ut.arith.addf(top, _unary("lg2.approx.ftz.f32", total))
            once = ut.arith.andi(to_part, ut.arith.cmpi(ut.arith.CmpIPredicate.eq, column, _i32(0)))
            ut.inline_ptx(
                "st.global.f32 [$0], $1;", pointer, lse, predicate=once, has_side_effects=True
            )

    merge(*kept, out, *parts, *scalars)


def _joined(partials: list[tuple[Any, Any, list[Any]]]) -> list[Any]:
    """Merge the (maximum, total, four sums) of several blocks into one."""
    top = partials[0][0]
    for block_top, *_ in partials[1:]:
        top = ut.arith.maximumf(top, block_top)
    state: list[Any] = []
    for block_top, total, sums in partials:
        weight = _unary("ex2.approx.ftz.f32", ut.arith.subf(block_top, top))
        weighted = [ut.arith.mulf(weight, x) for x in (total, *sums)]
        if state:
            state = [ut.arith.addf(a, b) for a, b in zip(state, weighted, strict=True)]
        else:
            state = weighted
    return [top, *state]


def _with_followers(
    state: list[Any],
    followers: Any,
    parts: tuple[Any, Any],
    o_at: tuple[int, Any],
    lse_at: tuple[int, Any],
) -> list[Any]:
    """`state` merged with the parts of the next splits. A part is an output, which is a sum with a
    total of 1, and a log2-sum-exp, which takes the place of the maximum."""
    index = ut.ir.IndexType.get()
    loop = ut.scf.ForOp(
        ut.c(0, index), ut.arith.index_cast(index, followers), ut.c(1, index), state
    )
    with ut.ir.InsertionPoint(loop.body):
        split = _sum(
            ut.arith.index_cast(ut.ir.IntegerType.get_signless(32), loop.induction_variable),
            _i32(1),
        )
        o_ptr = ut.getelementptr(parts[0], [_sum(_times(split, o_at[0]), o_at[1])], _f32())
        lse_ptr = ut.getelementptr(parts[1], [_sum(_times(split, lse_at[0]), lse_at[1])], _f32())
        lse = _loaded("ld.global.f32 $0, [$1];", lse_ptr, 1)[0]
        values = _loaded("ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", o_ptr, 4)
        top, total, *sums = loop.inner_iter_args
        part_total = ut.c(1.0, _f32())
        ut.scf.yield_(_joined([(top, total, list(sums)), (lse, part_total, values)]))
    return list(loop.results)


def _peer(pointer: Any, rank: int, count: int) -> list[Any]:
    """Read 1 or 4 floats at this shared address in the block `rank` of the cluster."""
    names = ", ".join(f"${i}" for i in range(count))
    if count == 4:
        load = f"ld.shared::cluster.v4.f32 {{{names}}}"
    else:
        load = f"ld.shared::cluster.f32 {names}"
    code = (
        f"{{ .reg .b32 there; mapa.shared::cluster.u32 there, ${count}, {rank}; {load}, [there]; }}"
    )
    return _loaded(code, pointer, count)


def _loaded(code: str, pointer: Any, count: int) -> list[Any]:
    values = ut.inline_ptx(code, pointer, result_types=[_f32()] * count, has_side_effects=True)
    if isinstance(values, Sequence):
        return list(values)
    return [values]


def _packed(dtype: Any, low: Any, high: Any) -> Any:
    pair_type = "bf16x2" if dtype == jnp.bfloat16 else "f16x2"
    return ut.inline_ptx(
        f"cvt.rn.{pair_type}.f32 $0, $1, $2;",
        high,
        low,
        result_types=ut.ir.IntegerType.get_signless(32),
    )


def _unary(code: str, x: Any) -> Any:
    return ut.inline_ptx(f"{code} $0, $1;", x, result_types=_f32())


def _units(spec: Spec) -> int:
    return spec.G * spec.H // 4


def _thread() -> Any:
    return ut.arith.remui(ut.thread_idx(), _i32(THREADS))


def _scalar(x: Any) -> Any:
    return x.registers.item()


def _element(vector: Any, i: int) -> Any:
    return ut.vector.extract(vector, dynamic_position=[], static_position=[i])


def _i32(value: int) -> Any:
    return ut.c(value, ut.ir.IntegerType.get_signless(32))


def _f32() -> Any:
    return ut.ir.F32Type.get()


def _fast() -> Any:
    return ut.arith.FastMathFlags.fast


def _sum(first: Any, *others: Any) -> Any:
    for term in others:
        first = ut.arith.addi(first, term)
    return first


def _times(x: Any, factor: int) -> Any:
    return ut.arith.muli(x, _i32(factor))
