"""Products with 4-bit weights for NVIDIA Hopper in Pallas Mosaic GPU.

The weight's rows are the 64-row operand of the tensor cores, taken from registers; the tokens are
the other one, from shared memory, whose width can be any multiple of 8. A lane finds the numbers
that it needs of 64 x 64 weights in 16 bytes, so it makes its operand without any exchange.

A unit is a block of rows times a tile of tokens over all columns or a share of them. A producer
warpgroup fills a ring of TMA copies across units; each of the others converts and multiplies 64
rows. One converts while another multiplies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_matmul.conversion import conversion
from pallas_kernels.int4_matmul.packed import CHUNK, FORMS, ROWS, WORDS, Int4, dequantised
from pallas_kernels.int4_matmul.plan import PROCESSORS, STAGED, Tuning, tuning_of
from pallas_kernels.mosaic_gpu import TILED, drain, launch, store, take

PRODUCER_REGISTERS = 40
REGISTERS = {1: 232, 2: 232, 3: 152, 4: 112}  # multiplying warpgroups → registers of their threads
# The layout of a product with single numbers, which a transposed store needs
SINGLE = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,))),
    warp_dims=(-8,),
    lane_dims=(-4, -3),
    vector_dim=-1,
)
OPERAND = 128  # columns that are converted at once


class _Spec(NamedTuple):
    """Static parameters of a compiled kernel: shapes, type and sizes."""

    T: int
    O: int  # noqa: E741
    I: int  # noqa: E741
    group: int
    dtype: Any
    form: str
    tuning: Tuning
    interpret: Any

    @property
    def K(self) -> int:
        """Columns of a slot."""
        return self.tuning.columns

    @property
    def operand(self) -> int:
        """Columns that are converted at once."""
        return min(self.K, OPERAND)

    @property
    def height(self) -> int:
        """Rows of the weight in a block."""
        return self.tuning.warpgroups * ROWS

    @property
    def down(self) -> int:
        """Blocks of rows."""
        return -(-self.O // self.height)

    @property
    def bands(self) -> int:
        """Tiles of tokens."""
        return -(-self.T // self.tuning.tokens)

    @property
    def steps(self) -> int:
        """Slots that cover the columns."""
        return -(-self.I // self.K)

    @property
    def groups(self) -> int:
        """Groups that a slot's columns touch."""
        return max(1, self.K // self.group)

    @property
    def whole(self) -> int:
        """Blocks of rows whose columns are not shared out: as many as fill the card."""
        if self.tuning.shares == 1:
            return self.down
        return self.down // PROCESSORS * PROCESSORS if self.bands == 1 else 0

    @property
    def units(self) -> int:
        return (self.whole + (self.down - self.whole) * self.tuning.shares) * self.bands

    @property
    def results(self) -> list[jax.ShapeDtypeStruct]:
        """Of whole blocks of rows, and the sums of the shares of others; of both what there is."""
        rest, width = (self.down - self.whole) * self.height, self.bands * self.tuning.tokens
        whole = jax.ShapeDtypeStruct((self.T, self.O), self.dtype)
        shared = jax.ShapeDtypeStruct((self.tuning.shares, width, rest), jnp.float32)
        return ([whole] if self.whole else []) + ([shared] if rest else [])


class _Unit(NamedTuple):
    """What a block computes next: its block of rows, its first token, its share of the columns, and
    the slots of that."""

    block: Array
    token: Array
    share: Array
    first: Array
    steps: Array


def check(x: Any, w: Int4) -> None:
    """Raise ValueError unless x and scales are of one 16-bit type, the words cover I, and the group
    is 16, 32, 64 or a multiple of 128."""
    if x.ndim != 2 or not x.shape[0] or -(-x.shape[1] // CHUNK) > w.words.shape[1]:
        raise ValueError(
            f"mosaic_gpu int4_matmul takes x [T, I] and words of I columns, got {x.shape} and "
            f"{w.words.shape}"
        )
    if x.dtype not in (jnp.bfloat16, jnp.float16) or w.scales.dtype != x.dtype:
        raise ValueError(
            "mosaic_gpu int4_matmul takes x and scales of one type, bfloat16 or float16, "
            f"got x {x.dtype}, scales {w.scales.dtype}"
        )
    if w.group not in (16, 32, 64) and w.group % OPERAND:
        raise ValueError(
            f"mosaic_gpu int4_matmul takes groups of 16, 32, 64 or a multiple of {OPERAND}, "
            f"got {w.group}"
        )


def int4_matmul(
    x_TI: Array, w: Int4, *, tuning: Tuning | None = None, interpret: Any = None
) -> Array:
    """See `pallas_kernels.int4_matmul`. Raises what `check` raises.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    check(x_TI, w)
    (T, I), O = x_TI.shape, w.words.shape[0] * ROWS  # noqa: E741
    # What lies beyond x reads as zeros, but copies have tiles of 8 full rows and 64 columns
    if (T > 8 and T % 8) or I % CHUNK:
        x_TI = jnp.pad(x_TI, ((0, -T % 8 if T > 8 else 0), (0, -I % CHUNK)))
    sizes = tuning or tuning_of(T, O, I, w.group)
    spec = _Spec(x_TI.shape[0], O, x_TI.shape[1], w.group, x_TI.dtype, w.form, sizes, interpret)
    *whole, shared = results = _multiply(spec, x_TI, w)
    if spec.whole < spec.down:
        rest = jnp.sum(shared, axis=0).astype(spec.dtype)[: spec.T]
        results = [*(y[:, : spec.whole * spec.height] for y in whole), rest]
    return jnp.concatenate(results, axis=1)[:T, : w.rows]


def _multiply(spec: _Spec, x: Array, w: Int4) -> list[Array]:
    tuning = spec.tuning
    warpgroups, stages = tuning.warpgroups, tuning.stages
    arrays = [part for part in (x, w.words, w.scales, w.zeros, w.offsets) if part is not None]
    blocks = min(PROCESSORS, spec.units)

    def kernel(*refs, **sm):  # type: ignore[no-untyped-def]
        given, made = refs[: len(arrays)], refs[len(arrays) :]
        block, wg = lax.axis_index("block"), lax.axis_index("wg")

        def each_unit(run):  # type: ignore[no-untyped-def]
            """Call `run(unit, steps done before)` for each own unit; returns the steps done."""

            def body(i, done):  # type: ignore[no-untyped-def]
                unit = _unit_of(spec, block + i * blocks)
                run(unit, done)
                return done + unit.steps

            count = lax.div(spec.units - 1 - block, jnp.int32(blocks)) + 1
            return lax.fori_loop(0, count, body, jnp.int32(0))

        @pl.when(wg == warpgroups)
        def _producer() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            done = each_unit(lambda unit, done: _fill(spec, given, unit, done, sm))
            drain(sm["free"], done, stages)

        @pl.when(wg < warpgroups)
        def _consumer() -> None:
            plgpu.set_max_registers(REGISTERS[warpgroups], action="increase")
            each_unit(
                lambda unit, done: _store(
                    spec, _product(spec, unit, done, wg, sm), unit, wg, sm, made
                )
            )
            plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = f"int4_matmul_{spec.T}x{spec.O}x{spec.I}"  # for profiles
    return launch(
        kernel,
        tuple(arrays),
        spec.interpret,
        out_type=spec.results,
        scratch_types=_scratch(spec, len(arrays)),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="wg",
    )


def _scratch(spec: _Spec, inputs: int) -> dict[str, Any]:
    """The ring and what is staged; the kernel has so many `inputs`."""
    (tokens, warpgroups, K, stages, _), dtype = spec.tuning, spec.dtype
    values = (stages, warpgroups, spec.groups, ROWS)
    scratch = {
        "x": plgpu.SMEM((stages, tokens, K), dtype, transforms=TILED),
        "w": plgpu.SMEM((stages, warpgroups, K // CHUNK, *WORDS), jnp.int32),
        "scales": plgpu.SMEM(values, dtype),
        "full": plgpu.Barrier(num_arrivals=inputs, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    }
    if spec.form != "symmetric":
        scratch["others"] = plgpu.SMEM(values, dtype)
    if spec.whole:
        staged = (warpgroups, min(tokens, STAGED), ROWS)
        scratch["y"] = plgpu.SMEM(staged, dtype, transforms=TILED)
    if spec.interpret is not None:  # its tensor cores know operands in shared memory alone
        scratch["a"] = plgpu.SMEM((warpgroups, ROWS, spec.operand), dtype, transforms=TILED)
    return scratch


def _unit_of(spec: _Spec, unit: Array) -> _Unit:
    """Units of the same rows and columns are neighbours, so that they share the weight in the L2
    cache."""
    shares, steps = jnp.int32(spec.tuning.shares), spec.steps
    place, band = lax.div(unit, jnp.int32(spec.bands)), lax.rem(unit, jnp.int32(spec.bands))
    beyond = jnp.maximum(place - spec.whole, 0)
    block = jnp.minimum(place, spec.whole) + lax.div(beyond, shares)
    share = lax.rem(beyond, shares)
    is_whole = place < spec.whole
    first = jnp.where(is_whole, 0, lax.div(share * steps, shares))
    last = jnp.where(is_whole, steps, lax.div((share + 1) * steps, shares))
    token = pl.multiple_of(band * spec.tuning.tokens, 8)
    return _Unit(block, token, share, first, last - first)


def _fill(
    spec: _Spec, given: tuple[Any, ...], unit: _Unit, done: Array, sm: dict[str, Any]
) -> None:
    """Fill the ring with one unit's words, scales, zero points or offsets, and rows of x."""
    x_ref, words, *values = given
    blocks = pl.ds(unit.block * spec.tuning.warpgroups, spec.tuning.warpgroups)
    rows = pl.ds(unit.token, spec.tuning.tokens)

    @pl.loop(0, unit.steps)
    def _(t):  # type: ignore[no-untyped-def]
        slot, step = take(sm["free"], done + t, spec.tuning.stages), unit.first + t
        full = sm["full"].at[slot]
        chunks = pl.ds(step * (spec.K // CHUNK), spec.K // CHUNK)
        plgpu.copy_gmem_to_smem(words.at[blocks, chunks], sm["w"].at[slot], full)
        groups = pl.ds(lax.div(step * spec.K, jnp.int32(spec.group)), spec.groups)
        for name, part in zip(("scales", "others"), values, strict=False):
            plgpu.copy_gmem_to_smem(part.at[blocks, groups], sm[name].at[slot], full)
        columns = pl.ds(pl.multiple_of(step * spec.K, spec.K), spec.K)
        plgpu.copy_gmem_to_smem(x_ref.at[rows, columns], sm["x"].at[slot], full)


def _product(spec: _Spec, unit: _Unit, done: Array, wg: Array, sm: dict[str, Any]) -> Array:
    """One warpgroup's rows of the weight times the unit's tokens, `[ROWS, tokens]`."""

    def multiply(acc):  # type: ignore[no-untyped-def]
        @pl.loop(0, unit.steps)
        def _(t):  # type: ignore[no-untyped-def]
            slot = lax.rem(done + t, jnp.int32(spec.tuning.stages))
            plgpu.barrier_wait(sm["full"].at[slot])
            for first in range(0, spec.K, spec.operand):
                x = sm["x"].at[slot, :, pl.ds(first, spec.operand)]
                plgpu.wgmma(acc, _operand(spec, slot, wg, first, sm), x.T)
                plgpu.wgmma_wait(0)  # the next conversion writes the same registers
            plgpu.barrier_arrive(sm["free"].at[slot])

        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, spec.tuning.tokens), jnp.float32))


def _operand(spec: _Spec, slot: Array, wg: Array, first: int, sm: dict[str, Any]) -> Any:
    """A warpgroup's weights of a slot from column `first` on, `[ROWS, operand]` in registers."""
    K, group = spec.operand, min(spec.group, spec.operand)
    groups = pl.ds(first // spec.group, K // group)
    values = [sm[name].at[slot, wg, groups] for name in ("scales", "others") if name in sm]
    refs = [sm["w"].at[slot, wg, pl.ds(first // CHUNK, K // CHUNK)], *values]
    if spec.interpret is not None:
        words, scales, *others = (ref[...][None] for ref in refs)
        zeros, offsets = (others[0] if spec.form == form else None for form in FORMS[1:])
        a = sm["a"].at[wg]
        own = Int4(words, scales, zeros, offsets, rows=ROWS, group=group)
        a[...] = dequantised(own, K, spec.dtype)
        plgpu.commit_smem()
        return a

    @plgpu.inline_mgpu(
        arg_types=tuple(plgpu.RefType(()) for _ in refs),
        return_type=plgpu.ShapeDtypeStruct((ROWS, K), spec.dtype, layout=plgpu.Layout.WGMMA),
    )
    def converted(_: Any, *refs: Any) -> Any:
        i32 = mgpu.utils.dtype_to_ir_type(jnp.int32)
        layout = plgpu.Layout.WGMMA.to_mgpu()
        shape = layout.registers_shape((ROWS, K))
        made = mgpu.utils.inline_ptx(
            conversion(K, group, jnp.dtype(spec.dtype).name, spec.form),
            *(mgpu.utils.memref_ptr(ref) for ref in refs),
            result_types=[i32] * int(np.prod(shape)),
            has_side_effects=True,
        )
        pair = layout.registers_element_type(mgpu.utils.dtype_to_ir_type(spec.dtype))
        registers = np.array([mgpu.utils.bitcast(x, pair) for x in made], dtype=object)
        return mgpu.FragmentedArray(
            _registers=registers.reshape(shape), _layout=layout, _is_signed=None
        )

    return converted(*refs)


def _store(
    spec: _Spec, y: Array, unit: _Unit, wg: Array, sm: dict[str, Any], made: tuple[Any, ...]
) -> None:
    """Write `[ROWS, tokens]` of products as rows of tokens, or as a share that is added later."""
    row = pl.multiple_of(unit.block * spec.height + wg * ROWS, ROWS)
    if spec.whole:
        pl.when(jnp.logical_and(unit.block < spec.whole, row < spec.O))(
            lambda: _store_whole(spec, y, unit, row, sm["y"].at[wg], made[0])
        )
    if spec.whole < spec.down:
        own = pl.ds(row - spec.whole * spec.height, ROWS)
        tokens = pl.ds(unit.token, spec.tuning.tokens)
        pl.when(unit.block >= spec.whole)(
            lambda: store(made[-1].at[unit.share, tokens, own].T, _single(spec, y))
        )


def _single(spec: _Spec, y: Array) -> Array:
    """y with its pairs of numbers as single ones; each lane keeps its own."""
    if spec.interpret is not None:
        return y

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(y.shape, jnp.float32, layout=SINGLE),
    )
    def apart(_: Any, y: Any) -> Any:
        layout = SINGLE.to_mgpu()
        i32, i64 = (mgpu.utils.dtype_to_ir_type(np.dtype(own)) for own in ("int32", "int64"))
        one = layout.registers_element_type(mgpu.utils.dtype_to_ir_type(jnp.float32))
        both = [
            mgpu.utils.inline_ptx(
                "mov.b64 {$0, $1}, $2;", mgpu.utils.bitcast(pair, i64), result_types=[i32] * 2
            )
            for pair in y.registers.flat
        ]
        each = [mgpu.utils.bitcast(x, one) for pair in both for x in pair]
        registers = np.array(each, dtype=object).reshape(layout.registers_shape(y.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return apart(y)


def _store_whole(spec: _Spec, y: Array, unit: _Unit, row: Array, staged: Any, y_ref: Any) -> None:
    """Write the products of some tokens after the other through shared memory."""
    some = min(spec.tuning.tokens, STAGED)
    for first in range(0, spec.tuning.tokens, some):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged.T[...] = y[:, first : first + some].astype(spec.dtype)
        plgpu.commit_smem()
        tokens = pl.ds(pl.multiple_of(unit.token + first, 8), some)
        plgpu.copy_smem_to_gmem(staged, y_ref.at[tokens, pl.ds(row, ROWS)])
