"""The scaled product for NVIDIA Hopper in Pallas Mosaic GPU: numbers of 8 bits on the tensor cores.

The weight's rows are the 64-row operand and the tokens are the other one, whose width can be any
multiple of 8, so few tokens cost few products. A producer warpgroup fills a ring of TMA copies
across units; each of the others multiplies 64 rows.

Tensor cores add products of 8-bit floats with fewer bits than float32 has. So sums of 128 columns
are added up in float32, where registers hold both sums; scales of groups of 128 columns need it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import PRODUCER_REGISTERS, drain, launch, registers_of, take
from pallas_kernels.mosaic_units import ROWS
from pallas_kernels.mosaic_units.split import Split, Unit
from pallas_kernels.parts import Parts, Product, whole
from pallas_kernels.scaled_matmul import mosaic_converted, mosaic_rounding
from pallas_kernels.scaled_matmul.plan import PROMOTED, SCALES, K, Tuning, is_faster, tuning_of
from pallas_kernels.scaled_matmul.plan import room_of as room_of
from pallas_kernels.scaled_matmul.reference import product_of
from pallas_kernels.scaled_matmul.rounding import IN_16_BITS, Inputs, RoundedRows, rounded_inputs

NUMBERS = (jnp.float8_e4m3fn, jnp.int8)
# How the tensor cores read an operand of 8-bit numbers in shared memory
TILED = plgpu.TilingTransform((8, K)), plgpu.SwizzleTransform(K)
WGMMA = plgpu.Layout.WGMMA


class _Spec(NamedTuple):
    """Static parameters of a compiled kernel: shapes, types and sizes."""

    T: int
    O: int
    I: int
    dtype: Any
    numbers: Any
    grouped: bool
    tuning: Tuning
    interpret: Any

    @property
    def split(self) -> Split:
        # Copies of results are of 64 columns
        tuning = self.tuning
        steps = self.I // K
        rows = -(-self.O // ROWS) * ROWS
        return Split(
            self.T, rows, self.dtype, steps, tuning.warpgroups, tuning.tokens, tuning.shares
        )

    @property
    def sums(self) -> Any:
        """The type that the tensor cores add up in."""
        if self.numbers == jnp.int8:
            return jnp.int32
        return jnp.float32

    @property
    def promoted(self) -> bool:
        """Whether sums of a slot's columns are added up in float32."""
        small = self.tuning.tokens <= PROMOTED
        return self.grouped or (small and self.numbers != jnp.int8)


class Scales(NamedTuple):
    """Float32 scales: of the weight `[O]` or `[O, G]`, of tokens `[T]`, or in the ring."""

    weight: Any
    tokens: Any


def check(x: Any, w: Any, scale: Any, group: int, inputs: str) -> None:
    """Raise ValueError unless x is of 16 bits, O is a multiple of 8 and I of 128, and groups are of
    all columns or of 128; for inputs that are not 8 bits what `mosaic_converted.check` says."""
    if inputs in IN_16_BITS:
        return mosaic_converted.check(x, w, scale, group)
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1] or not x.shape[0]:
        raise ValueError(
            f"mosaic_gpu scaled_matmul takes x [T, I] and w [O, I], got {x.shape} and {w.shape}"
        )
    if x.dtype not in (jnp.bfloat16, jnp.float16) or w.dtype not in NUMBERS:
        raise ValueError(
            "mosaic_gpu scaled_matmul takes x of bfloat16 or float16 and w of float8_e4m3fn or "
            f"int8, got x {x.dtype}, w {w.dtype}"
        )
    if w.shape[0] % 8 or w.shape[1] % K or 0 in w.shape:
        raise ValueError(
            f"mosaic_gpu scaled_matmul takes O a multiple of 8 and I of {K}, got w {w.shape}"
        )
    if scale.shape[1] > 1 and group != K:
        raise ValueError(f"mosaic_gpu scaled_matmul takes groups of {K} columns, got {group}")


def scaled_matmul(
    x_TI: Inputs,
    w_OI: Array,
    scale_OG: Array,
    group: int,
    inputs: str,
    input_scale: Array | None = None,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """See `pallas_kernels.scaled_matmul`, and `scaled_parts`."""
    return whole(
        scaled_parts(
            x_TI, w_OI, scale_OG, group, inputs, input_scale, tuning=tuning, interpret=interpret
        )
    )


def scaled_parts(
    x_TI: Inputs,
    w_OI: Array,
    scale_OG: Array,
    group: int,
    inputs: str,
    input_scale: Array | None = None,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Product:
    """See `pallas_kernels.scaled_matmul`. Raises what `check` raises.

    Without a `tuning` the product is XLA's where `plan.is_faster` says so. `interpret` is a
    `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    check(x_TI, w_OI, scale_OG, group, inputs)
    if inputs == "plain":
        assert isinstance(x_TI, Array)
        return mosaic_converted.scaled_parts(x_TI, w_OI, scale_OG, group, interpret=interpret)
    if inputs == "shifted":
        numbers, scale = rounded_inputs(x_TI, w_OI.dtype, group, inputs)
        sums = mosaic_converted.scaled_sums(numbers, w_OI, scale_OG, group, interpret=interpret)
        return (sums * scale).astype(x_TI.dtype)
    T, I = x_TI.shape
    O, G = scale_OG.shape
    dtype = x_TI.dtype
    sizes = tuning or tuning_of(T, O, I, G > 1)
    in_kernel = tuning is not None or is_faster(T, G > 1)
    # Rows beyond x are not written, but copies have tiles of eight full rows
    if T <= 8:
        rows = T
    else:
        rows = T + -T % 8
    spec = _Spec(rows, O, I, dtype, w_OI.dtype.type, G > 1, sizes, interpret)
    if in_kernel:
        room = spec.split.bands * sizes.tokens
    else:
        room = T
    if G == 1 and inputs in ("token", "group") and mosaic_rounding.takes(x_TI, w_OI.dtype):
        x_TI = mosaic_rounding.rounded_rows(x_TI, room, interpret=interpret)
    if isinstance(x_TI, RoundedRows):
        own_rows = x_TI.sized(room)
        numbers = own_rows.numbers
        scale = own_rows.scale[:, None]
    else:
        numbers, scale = rounded_inputs(x_TI, w_OI.dtype, group, inputs, input_scale)
        scale = jnp.broadcast_to(scale, (T, scale.shape[1]))
        numbers, scale = (jnp.pad(part, ((0, room - T), (0, 0))) for part in (numbers, scale))
    if not in_kernel:
        # Sums of 16 bits, where these have float32's range, are half of what XLA writes and reads
        if dtype == jnp.bfloat16:
            held = jnp.bfloat16
        else:
            held = jnp.float32
        sums = product_of(numbers, w_OI, dtype, held)[None]
        return Parts(sums, (scale[:, 0], scale_OG[:, 0]), (T, O), dtype)
    weight = jnp.pad(scale_OG, ((0, -O % ROWS), (0, 0)))
    tokens = jnp.broadcast_to(scale.T, (G, room))
    if G > 1:
        scales = Scales(weight, tokens)
    else:
        scales = Scales(weight[:, 0], tokens[0])
    return spec.split.parts(_multiply(spec, numbers, w_OI, scales), T, O)


def scaled_sums(
    x_TI: Inputs,
    w_OI: Array,
    scale_OG: Array,
    group: int,
    inputs: str,
    *,
    interpret: Any = None,
) -> Array:
    """See `pallas_kernels.scaled_matmul`. Raises ValueError for inputs that are not "plain", and
    what `check` raises."""
    if inputs != "plain":
        raise ValueError(f"mosaic_gpu scaled_sums takes plain inputs, got {inputs!r}")
    assert isinstance(x_TI, Array)
    return mosaic_converted.scaled_sums(x_TI, w_OI, scale_OG, group, interpret=interpret)


def _multiply(spec: _Spec, x: Array, w: Array, scales: Scales) -> list[Array]:
    split = spec.split
    tuning = spec.tuning

    def kernel(x_ref, w_ref, rows_ref, tokens_ref, *made, **sm):  # type: ignore[no-untyped-def]
        block = lax.axis_index("block")
        wg = lax.axis_index("wg")
        scales = Scales(rows_ref, tokens_ref)

        @pl.when(wg == tuning.warpgroups)
        def _producer() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            input_refs = (x_ref, w_ref, tokens_ref)
            done = split.each(block, lambda unit, done: _fill(spec, input_refs, unit, done, sm))
            drain(sm["free"], done, tuning.stages)

        @pl.when(wg < tuning.warpgroups)
        def _consumer() -> None:
            plgpu.set_max_registers(registers_of(tuning.warpgroups), action="increase")

            def product(unit: Unit, done: Array) -> None:
                y = _product(spec, unit, done, wg, scales, sm)
                split.store(y, unit, wg, sm, made, spec.interpret)

            split.each(block, product)
            plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = f"scaled_matmul_{spec.T}x{spec.O}x{spec.I}"  # for profiles
    return launch(
        kernel,
        (x, w, *scales),
        spec.interpret,
        out_type=split.results,
        scratch_types=_scratch(spec),
        grid=(split.blocks,),
        grid_names=("block",),
        num_threads=tuning.warpgroups + 1,
        thread_name="wg",
    )


def _scratch(spec: _Spec) -> dict[str, Any]:
    """The ring, and results before they are written."""
    tokens, warpgroups, stages, _ = spec.tuning
    ring = {
        "x": plgpu.SMEM((stages, tokens, K), spec.numbers, transforms=TILED),
        "w": plgpu.SMEM((stages, warpgroups * ROWS, K), spec.numbers, transforms=TILED),
        "full": plgpu.Barrier(num_arrivals=2 + spec.grouped, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    }
    if spec.grouped:
        ring["scales"] = plgpu.SMEM((stages, max(tokens, SCALES)), jnp.float32)
    return ring | spec.split.staged


def _fill(
    spec: _Spec, input_refs: tuple[Any, ...], unit: Unit, done: Array, sm: dict[str, Any]
) -> None:
    """Fill the ring with one unit's rows of the weight, its tokens, and scales of groups."""
    x_ref, w_ref, scales_ref = input_refs
    height = spec.split.height
    rows = pl.ds(pl.multiple_of(unit.block * height, height), height)
    tokens = pl.ds(unit.token, spec.tuning.tokens)

    @pl.loop(0, unit.steps)
    def _(t):  # type: ignore[no-untyped-def]
        slot = take(sm["free"], done + t, spec.tuning.stages)
        step = unit.first + t
        full = sm["full"].at[slot]
        columns = pl.ds(pl.multiple_of(step * K, K), K)
        plgpu.copy_gmem_to_smem(w_ref.at[rows, columns], sm["w"].at[slot], full)
        plgpu.copy_gmem_to_smem(x_ref.at[tokens, columns], sm["x"].at[slot], full)
        if spec.grouped:
            scales = sm["scales"].at[slot, pl.ds(0, spec.tuning.tokens)]
            plgpu.copy_gmem_to_smem(scales_ref.at[step, tokens], scales, full)


def _product(
    spec: _Spec, unit: Unit, done: Array, wg: Array, scales: Scales, sm: dict[str, Any]
) -> Array:
    """One warpgroup's rows of the weight times the unit's tokens, scaled, `[ROWS, tokens]`."""
    # A warpgroup may lie beyond the last row
    last = spec.split.O - ROWS
    rows = pl.ds(jnp.minimum(spec.split.row(unit, wg), last), ROWS)
    if spec.grouped:
        group_scales = Scales(scales.weight.at[rows], None)
        return _promoted(spec, unit, done, wg, group_scales, sm)
    if spec.promoted:
        y = _promoted(spec, unit, done, wg, None, sm)
    else:
        y = _summed(spec, unit, done, wg, sm)
    return _scaled(y, scales.weight.at[rows], scales.tokens.at[pl.ds(unit.token, y.shape[1])])


def _promoted(
    spec: _Spec, unit: Unit, done: Array, wg: Array, group_scales: Scales | None, sm: dict[str, Any]
) -> Array:
    """Sums of slots, scaled where columns have scales of their own, added up in float32."""
    shape = (ROWS, spec.tuning.tokens)

    def step(t: Array, total: Array) -> Array:
        slot = lax.rem(done + t, jnp.int32(spec.tuning.stages))
        rows = None
        if group_scales is not None:
            rows = load(group_scales.weight.at[:, unit.first + t], 1)
        plgpu.barrier_wait(sm["full"].at[slot])

        def multiply(acc: Any) -> Array:
            plgpu.wgmma(acc, *_operands(slot, wg, sm))
            return acc[...]

        part = pl.run_scoped(multiply, plgpu.ACC(shape, spec.sums)).astype(jnp.float32)
        if rows is not None:
            own_tokens = sm["scales"].at[slot, pl.ds(0, spec.tuning.tokens)]
            part = times(part, rows, load(own_tokens, 0))
            plgpu.commit_smem()  # the next copy comes after this read
        plgpu.barrier_arrive(sm["free"].at[slot])
        return total + part

    zeros = plgpu.layout_cast(jnp.full(shape, 0.0, jnp.float32), WGMMA)
    return lax.fori_loop(0, unit.steps, step, zeros)


def _summed(spec: _Spec, unit: Unit, done: Array, wg: Array, sm: dict[str, Any]) -> Array:
    """Sums of all columns in the tensor cores. A slot is released one step late, while the next
    product runs."""
    stages = jnp.int32(spec.tuning.stages)

    def multiply(acc):  # type: ignore[no-untyped-def]
        @pl.loop(0, unit.steps)
        def _(t):  # type: ignore[no-untyped-def]
            slot = lax.rem(done + t, stages)
            plgpu.barrier_wait(sm["full"].at[slot])
            plgpu.wgmma(acc, *_operands(slot, wg, sm))
            plgpu.wgmma_wait(1)
            pl.when(t > 0)(
                lambda: plgpu.barrier_arrive(sm["free"].at[lax.rem(done + t - 1, stages)])
            )

        return acc[...]

    y = pl.run_scoped(multiply, plgpu.ACC((ROWS, spec.tuning.tokens), spec.sums))
    plgpu.barrier_arrive(sm["free"].at[lax.rem(done + unit.steps - 1, stages)])
    return y.astype(jnp.float32)


def _operands(slot: Array, wg: Array, sm: dict[str, Any]) -> tuple[Any, Any]:
    """A warpgroup's rows of a slot, and the slot's tokens."""
    return sm["w"].at[slot, pl.ds(wg * ROWS, ROWS)], sm["x"].at[slot].T


def load(ref: Any, axis: int) -> Array:
    """A vector along the rows (1) or the tokens (0) of a product."""
    return plgpu.load(ref, layout=WGMMA.reduce(axis), optimized=False)


def _scaled(y: Array, rows: Any, tokens: Any) -> Array:
    return times(y, load(rows, 1), load(tokens, 0))


def times(y: Array, rows: Array, tokens: Array) -> Array:
    """y times the scales of its rows and of its tokens."""
    across, down = (
        lax.broadcast_in_dim(scales, y.shape, [axis]) for axis, scales in enumerate((rows, tokens))
    )
    return y * down * across
