"""Products of tokens with the 8-bit weights of the experts that they chose, for NVIDIA Hopper: the
units of `grouped_matmul`, with operands of 8 bits and their scales.

Sums of 128 columns are added up in float32, as `mosaic_gpu` says, except of full tiles with a scale
a row, whose sums leave no registers for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_matmul.gating import Gating
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.grouped_matmul.mosaic_gpu import Spec as Units
from pallas_kernels.grouped_matmul.mosaic_gpu import (
    Unit,
    at_width,
    check_units,
    copy_tokens,
    copy_weight,
    each_unit,
    finish,
    fits_units,
    row_of_x,
)
from pallas_kernels.grouped_matmul.plan import PROCESSORS, widths_of
from pallas_kernels.mosaic_gpu import PRODUCER_REGISTERS, drain, launch, registers_of, take
from pallas_kernels.mosaic_gpu import TILED as TILED_Y
from pallas_kernels.mosaic_units import ROWS
from pallas_kernels.scaled_matmul import mosaic_converted
from pallas_kernels.scaled_matmul import mosaic_gpu as one
from pallas_kernels.scaled_matmul.expert_rows import Rows, expert_rows
from pallas_kernels.scaled_matmul.experts import ScaledExperts
from pallas_kernels.scaled_matmul.plan import SCALES, K, expert_tile, expert_tuning, takes_group


class _Spec(NamedTuple):
    """Static parameters of a compiled kernel: the units, and the type and scales of numbers."""

    units: Units
    numbers: Any
    grouped: bool

    @property
    def sums(self) -> Any:
        """The type that the tensor cores add up in."""
        if self.numbers == jnp.int8:
            return jnp.int32
        return jnp.float32

    @property
    def promoted(self) -> bool:
        """Whether sums of a slot's columns are added up in float32."""
        small = self.units.tile <= expert_tile(self.units.tile, True)
        return self.grouped or (small and self.numbers != jnp.int8)


def fits(rows: int, columns: int, gated: bool, group: int | None, inputs: str) -> bool:
    """Whether experts of so many rows, gate's and up's where `gated`, and columns are taken, with
    inputs rounded this way and `group` columns that share a scale, None: all."""
    if inputs == "shifted":
        return False
    if inputs == "plain":
        return takes_group(group) and mosaic_converted.fits(rows, columns)
    return group in (None, K) and fits_units(rows, columns, gated, K)


def check(x: Any, w: ScaledExperts, groups: Groups, gating: Any) -> None:
    """Raise ValueError for inputs that are shifted, and unless inputs are plain and
    `mosaic_converted.check_experts` allows them, or one expert's product is one that
    `mosaic_gpu.check` allows, and units are such that `grouped_matmul` takes them."""
    if w.inputs == "shifted":
        raise ValueError("mosaic_gpu grouped_scaled_matmul takes no inputs with zero points")
    if w.inputs == "plain":
        return mosaic_converted.check_experts(x, w)
    values, scale = (jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in (w.values, w.scale))
    one.check(x, values, scale, w.group, w.inputs)
    check_units(w.values, groups, gating, K)


def grouped_scaled_matmul(
    x_PI: Array,
    w: ScaledExperts,
    groups: Groups,
    bias_EO: Array | None = None,
    gating: Gating | None = None,
    *,
    warpgroups: int | None = None,
    interpret: Any = None,
) -> Array:
    """Each row of `groups`' tiles times the weight of its expert, see
    `pallas_kernels.grouped_matmul`. Raises what `check` raises.

    `warpgroups` multiply in a block, if not as many as the plan says. `interpret` is a
    `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    check(x_PI, w, groups, gating)
    if w.inputs == "plain":
        return mosaic_converted.grouped_matmul(x_PI, w, groups, bias_EO, gating, interpret)
    grouped = w.scale.shape[2] > 1
    rows = expert_rows(x_PI, w.values.dtype, groups, w.inputs, w.input_scale, w.group, interpret)
    tile = expert_tile(groups.tile, grouped)
    expert_W, used, rows_W = _cut(groups, groups.tile // tile)
    (tiles,) = expert_W.shape
    _, O, I = w.values.shape
    shared = rows.numbers.shape[0] < tiles * tile
    units = Units(
        tiles,
        tile,
        groups.shared,
        shared,
        O,
        I,
        gating,
        x_PI.dtype,
        expert_tuning(tile, groups.tile, grouped, warpgroups),
        interpret,
    )
    spec = _Spec(units, w.values.dtype.type, grouped)
    if grouped:
        scale = w.scale
    else:
        scale = w.scale[:, :, 0]
    plan = (expert_W, used, *(() if groups.shared else (rows_W,)))
    return _multiply(spec, plan, rows, (w.values, scale), bias_EO)


def _cut(groups: Groups, parts: int) -> tuple[Array, Array, Array]:
    """The tiles' experts, the number of those in use and their rows, of tiles cut into parts. A
    part without tokens is computed as if it had one."""
    if parts == 1:
        return groups.expert_W, groups.used, groups.rows_W
    height = groups.tile // parts
    rows_WQ = groups.rows_W[:, None] - height * jnp.arange(parts, dtype=jnp.int32)
    return (
        jnp.repeat(groups.expert_W, parts),
        groups.used * parts,
        jnp.clip(rows_WQ, 1, height).reshape(-1),
    )


def _multiply(
    spec: _Spec,
    plan: tuple[Array, ...],
    rows: Rows,
    weight: tuple[Array, Array],
    bias_EO: Array | None,
) -> Array:
    units = spec.units
    tuning = spec.units.tuning
    blocks = min(PROCESSORS, units.tiles * units.across)
    groups = weight[1].shape[-1]
    room = rows.scales.shape[1]
    if spec.grouped:
        scales = jnp.broadcast_to(rows.scales, (groups, room))
    else:
        scales = rows.scales[0]
    operands = (*plan, rows.numbers, *weight, scales, *(() if bias_EO is None else (bias_EO,)))

    def kernel(expert_ref, used_ref, *rest, **sm):  # type: ignore[no-untyped-def]
        rows_ref = rest[0]
        refs = rest[units.rows is None :]
        x_ref, w_ref, scale_ref, tokens_ref, *out_refs = refs
        block = lax.axis_index("block")
        wg = lax.axis_index("wg")

        def own_units(run: Callable[[Unit, Array], None]) -> Array:
            return each_unit(units, (expert_ref, used_ref, rows_ref), (block, blocks), run)

        @pl.when(wg == tuning.warpgroups)
        def _producer() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            copied = (x_ref, w_ref, tokens_ref)
            done = own_units(lambda unit, done: _fill(spec, copied, unit, done, sm))
            drain(sm["free"], done, tuning.stages)

        @pl.when(wg < tuning.warpgroups)
        def _consumer() -> None:
            plgpu.set_max_registers(registers_of(tuning.warpgroups), action="increase")
            scales = one.Scales(scale_ref, tokens_ref)

            def consume(unit: Unit, done: Array) -> None:
                def product(width: int) -> None:
                    both = _product(spec, width, unit, done, wg, scales, sm)
                    finish(units, unit, both, wg, sm, tuple(out_refs))

                at_width(widths_of(units.tile), unit.rows, product)

            own_units(consume)
            plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = f"grouped_scaled_{units.tile}x{units.O}x{units.I}"  # for profiles
    y: Array = launch(
        kernel,
        operands,
        units.interpret,
        out_type=jax.ShapeDtypeStruct((units.tiles * units.tile, units.F), units.dtype),
        scratch_types=_scratch(spec),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=tuning.warpgroups + 1,
        thread_name="wg",
    )
    return y


def _scratch(spec: _Spec) -> dict[str, Any]:
    """The ring, and results on their way out."""
    units = spec.units
    warpgroups, stages, _ = spec.units.tuning
    scratch = {
        "x": plgpu.SMEM((stages, units.tile, K), spec.numbers, transforms=one.TILED),
        "w": plgpu.SMEM((stages, 2 * units.half, K), spec.numbers, transforms=one.TILED),
        "y": plgpu.SMEM((warpgroups, units.tile, ROWS), units.dtype, transforms=TILED_Y),
        "full": plgpu.Barrier(num_arrivals=3 + spec.grouped, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    }
    if spec.grouped:
        scratch["scales"] = plgpu.SMEM((stages, max(units.tile, SCALES)), jnp.float32)
    return scratch


def _fill(
    spec: _Spec, input_refs: tuple[Any, ...], unit: Unit, done: Array, sm: dict[str, Any]
) -> None:
    """Fill the ring with one unit's rows of the weight and of x, and with scales of groups."""
    x_ref, w_ref, scales_ref = input_refs
    units = spec.units
    row = row_of_x(unit.row, units.shared)

    @pl.loop(0, units.steps)
    def _(t):  # type: ignore[no-untyped-def]
        slot = take(sm["free"], done + t, units.tuning.stages)
        copy_weight(units, w_ref, unit, t, slot, sm)
        copy_tokens(units, x_ref, unit, t, slot, sm)
        if spec.grouped:
            scales = sm["scales"].at[slot, pl.ds(0, units.tile)]
            source = scales_ref.at[t, pl.ds(row, units.tile)]
            plgpu.copy_gmem_to_smem(source, scales, sm["full"].at[slot])


def _product(
    spec: _Spec,
    width: int,
    unit: Unit,
    done: Array,
    wg: Array,
    scales: one.Scales,
    sm: dict[str, Any],
) -> list[Array]:
    """Both parts of a warpgroup's rows of the weight times `width` tokens, scaled."""
    units = spec.units
    last = spec.units.O - ROWS
    first = unit.column + wg * ROWS
    # Rows beyond the weight are never stored, but plain loads must stay within the array
    places = (jnp.minimum(first + part * units.apart, last) for part in range(2))
    rows = [
        scales.weight.at[unit.expert].at[pl.ds(pl.multiple_of(place, ROWS), ROWS)]
        for place in places
    ]
    if spec.grouped:
        return _promoted(spec, width, done, wg, rows, sm)
    own_rows = [one.load(ref, 1) for ref in rows]
    row = row_of_x(unit.row, units.shared)
    tokens = one.load(scales.tokens.at[pl.ds(row, width)], 0)
    both = (_promoted if spec.promoted else _summed)(spec, width, done, wg, [], sm)
    return [one.times(y, row_scales, tokens) for y, row_scales in zip(both, own_rows, strict=True)]


def _promoted(
    spec: _Spec, width: int, done: Array, wg: Array, rows: list[Any], sm: dict[str, Any]
) -> list[Array]:
    """Sums of slots, scaled where columns have scales of their own, added up in float32; `rows` are
    the scales of both parts' groups."""
    units = spec.units

    def scales_at(t: Array) -> list[Array]:
        return [one.load(ref.at[:, t], 1) for ref in rows]

    def step(t: Array, carry: Any) -> Any:
        totals, own_rows = carry
        slot = lax.rem(done + t, jnp.int32(units.tuning.stages))
        following = scales_at(jnp.minimum(t + 1, units.steps - 1))  # arrives while we multiply
        plgpu.barrier_wait(sm["full"].at[slot])

        def multiply(*parts: Any) -> tuple[Array, ...]:
            _wgmma(spec, width, slot, wg, parts, sm)
            return tuple(acc[...] for acc in parts)

        acc = plgpu.ACC((ROWS, width), spec.sums)
        both = [y.astype(jnp.float32) for y in pl.run_scoped(multiply, acc, acc)]
        if rows:
            tokens = one.load(sm["scales"].at[slot, pl.ds(0, width)], 0)
            both = [
                one.times(y, row_scales, tokens)
                for y, row_scales in zip(both, own_rows, strict=True)
            ]
            plgpu.commit_smem()  # the next copy comes after this read
        plgpu.barrier_arrive(sm["free"].at[slot])
        return [total + y for total, y in zip(totals, both, strict=True)], following

    zeros = plgpu.layout_cast(jnp.full((ROWS, width), 0.0, jnp.float32), one.WGMMA)
    start = ([zeros, zeros], scales_at(jnp.int32(0)))
    totals, _ = lax.fori_loop(0, units.steps, step, start)
    return list(totals)


def _summed(
    spec: _Spec, width: int, done: Array, wg: Array, _: list[Any], sm: dict[str, Any]
) -> list[Array]:
    """Sums of all columns in the tensor cores. A slot is released one step late, while the next
    products run."""
    units = spec.units
    stages = jnp.int32(spec.units.tuning.stages)

    def multiply(*parts):  # type: ignore[no-untyped-def]
        @pl.loop(0, units.steps)
        def _(t):  # type: ignore[no-untyped-def]
            slot = lax.rem(done + t, stages)
            plgpu.barrier_wait(sm["full"].at[slot])
            _wgmma(spec, width, slot, wg, parts, sm)
            plgpu.wgmma_wait(2)
            pl.when(t > 0)(
                lambda: plgpu.barrier_arrive(sm["free"].at[lax.rem(done + t - 1, stages)])
            )

        return tuple(acc[...] for acc in parts)

    acc = plgpu.ACC((ROWS, width), spec.sums)
    both = pl.run_scoped(multiply, acc, acc)
    plgpu.barrier_arrive(sm["free"].at[lax.rem(done + units.steps - 1, stages)])
    return [y.astype(jnp.float32) for y in both]


def _wgmma(spec: _Spec, width: int, slot: Array, wg: Array, parts: Any, sm: dict[str, Any]) -> None:
    """Add a slot's products to both sums."""
    x = sm["x"].at[slot, pl.ds(0, width)].T
    for part, acc in enumerate(parts):
        rows = pl.ds(part * spec.units.half + wg * ROWS, ROWS)
        plgpu.wgmma(acc, sm["w"].at[slot, rows], x)
