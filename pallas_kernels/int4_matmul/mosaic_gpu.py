"""Products with 4-bit weights for NVIDIA Hopper in Pallas Mosaic GPU.

The weight's rows are the 64-row operand of the tensor cores, taken from registers; the tokens are
the other one, from shared memory, whose width can be any multiple of 8. A lane finds the numbers
that it needs of 64 x 64 weights in 16 bytes, so it makes its operand without any exchange.

A unit is a block of rows times a tile of tokens over a share of the columns. A producer warpgroup
fills a ring of TMA copies across units; each of the others converts and multiplies 64 rows.
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
from pallas_kernels.int4_matmul.packed import CHUNK, ROWS, SLOT, WORDS, Int4, dequantised
from pallas_kernels.int4_matmul.plan import PROCESSORS, STAGED, Tuning, tuning_of
from pallas_kernels.mosaic_gpu import TILED, drain, launch, store, take

PRODUCER_REGISTERS = 40
REGISTERS = {1: 232, 2: 232, 3: 152, 4: 112}  # multiplying warpgroups → registers of their threads


class _Spec(NamedTuple):
    """Static parameters of a compiled kernel: shapes, type and sizes."""

    T: int
    O: int  # noqa: E741
    I: int  # noqa: E741
    group: int
    dtype: Any
    form: str  # "symmetric", "zeros" or "offsets"
    tuning: Tuning
    interpret: Any

    @property
    def K(self) -> int:
        """Columns of a slot."""
        return self.tuning.columns

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
    def whole(self) -> int:
        """Blocks of rows, of all bands, that a processor computes over all columns: as many as fill
        the card. The columns of the others are shared out."""
        blocks = self.down * self.bands
        if self.tuning.shares == 1:
            return blocks
        return blocks // PROCESSORS * PROCESSORS if self.bands == 1 else 0

    @property
    def units(self) -> int:
        return self.whole + (self.down * self.bands - self.whole) * self.tuning.shares

    @property
    def results(self) -> list[jax.ShapeDtypeStruct]:
        """Of blocks that are computed whole, then sums of the shares of the others."""
        width, tuning = self.bands * self.tuning.tokens, self.tuning
        rest = (self.down - self.whole) * self.height if self.bands == 1 else self.down * self.height
        whole = jax.ShapeDtypeStruct((self.T, self.O), self.dtype)
        shared = jax.ShapeDtypeStruct((tuning.shares, rest, width), jnp.float32)
        return ([whole] if self.whole else []) + ([shared] if tuning.shares > 1 else [])

    @property
    def scales(self) -> int:
        """Groups that a slot's columns touch."""
        return max(1, self.K // self.group)


class _Unit(NamedTuple):
    """What a block computes next: its block of rows, its tokens, its share of the columns."""

    block: Array
    token: Array
    share: Array
    first: Array
    steps: Array


def check(x: Any, w: Int4) -> None:
    """Raise ValueError unless x, scales and offsets are of one 16-bit type, and the group is 16,
    32, 64 or a multiple of 128."""
    if x.ndim != 2 or -(-x.shape[1] // CHUNK) > w.words.shape[1] or not x.shape[0]:
        raise ValueError(
            f"mosaic_gpu int4_matmul takes x [T, I] and words of I columns, got {x.shape} and "
            f"{w.words.shape}"
        )
    if x.dtype not in (jnp.bfloat16, jnp.float16) or w.scales.dtype != x.dtype:
        raise ValueError(
            "mosaic_gpu int4_matmul takes x and scales of one type, bfloat16 or float16, "
            f"got x {x.dtype}, scales {w.scales.dtype}"
        )
    if w.words.shape[1] % 2 or x.shape[1] % 8:
        raise ValueError(
            f"mosaic_gpu int4_matmul takes I a multiple of 8, and an even number of chunks of "
            f"columns, got x {x.shape}, words {w.words.shape}"
        )
    if w.group not in (16, 32, 64) and w.group % SLOT:
        raise ValueError(
            f"mosaic_gpu int4_matmul takes groups of 16, 32, 64 or a multiple of {SLOT}, got {w.group}"
        )


def int4_matmul(
    x_TI: Array, w: Int4, *, tuning: Tuning | None = None, interpret: Any = None
) -> Array:
    """See `pallas_kernels.int4_matmul`. Raises what `check` raises.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    check(x_TI, w)
    T, I = x_TI.shape  # noqa: E741
    if T > 8 and T % 8:  # rows beyond x read as zeros, but copies have tiles of eight full rows
        x_TI = jnp.pad(x_TI, ((0, -T % 8), (0, 0)))
    O = w.words.shape[0] * ROWS  # noqa: E741
    form = "zeros" if w.zeros is not None else "offsets" if w.offsets is not None else "symmetric"
    spec = _Spec(
        x_TI.shape[0], O, I, w.group, x_TI.dtype, form, tuning or tuning_of(T, O, I), interpret
    )
    return _multiply(spec, x_TI, w)[:T, : w.rows]


def _multiply(spec: _Spec, x: Array, w: Int4) -> Array:
    tuning = spec.tuning
    warpgroups, stages = tuning.warpgroups, tuning.stages
    blocks, inputs = min(PROCESSORS, spec.units), 3 + (spec.form != "symmetric")
    extra = [part for part in (w.zeros, w.offsets) if part is not None]

    def kernel(*refs, **sm):  # type: ignore[no-untyped-def]
        given, made = refs[:inputs], refs[inputs:]
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
    parts = (stages, warpgroups, spec.scales, ROWS)
    scratch = {
        "x": plgpu.SMEM((stages, tuning.tokens, spec.K), spec.dtype, transforms=TILED),
        "w": plgpu.SMEM((stages, warpgroups, spec.K // CHUNK, *WORDS), jnp.int32),
        "s": plgpu.SMEM(parts, spec.dtype),
        "full": plgpu.Barrier(num_arrivals=inputs, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    }
    if extra:
        scratch["extra"] = plgpu.SMEM(parts, spec.dtype)
    if spec.whole:
        scratch["y"] = plgpu.SMEM((warpgroups, min(tuning.tokens, STAGED), ROWS), spec.dtype, transforms=TILED)
    if spec.interpret is not None:  # its tensor cores know operands in shared memory alone
        scratch["a"] = plgpu.SMEM((warpgroups, ROWS, spec.K), spec.dtype, transforms=TILED)
    results = launch(
        kernel,
        (x, w.words, w.scales, *extra),
        spec.interpret,
        out_type=spec.results,
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="wg",
    )
    if spec.tuning.shares == 1:
        return results[0]
    shared = jnp.sum(results[-1], axis=0).T.astype(spec.dtype)[: spec.T]
    if not spec.whole:
        return shared
    return jnp.concatenate([results[0][:, : spec.whole * spec.height], shared], axis=1)


def _unit_of(spec: _Spec, unit: Array) -> _Unit:
    """Units of the same rows and columns are neighbours, so that they share the weight in the L2
    cache."""
    shares, bands, steps = spec.tuning.shares, jnp.int32(spec.bands), spec.steps
    beyond = jnp.maximum(unit - spec.whole, 0)
    of_shared = spec.whole + lax.div(beyond, shares * bands) * bands + lax.rem(beyond, bands)
    share = lax.rem(lax.div(beyond, bands), jnp.int32(shares))
    is_whole = unit < spec.whole
    place = jnp.where(is_whole, unit, of_shared)
    first = jnp.where(is_whole, 0, lax.div(share * steps, jnp.int32(shares)))
    last = jnp.where(is_whole, steps, lax.div((share + 1) * steps, jnp.int32(shares)))
    token = pl.multiple_of(lax.rem(place, bands) * spec.tuning.tokens, 8)
    return _Unit(lax.div(place, bands), token, share, first, last - first)


def _fill(
    spec: _Spec, given: tuple[Any, ...], unit: _Unit, done: Array, sm: dict[str, Any]
) -> None:
    """Fill the ring with one unit's words, scales, zero points or offsets, and rows of x."""
    x_ref, words, *parts = given
    blocks = pl.ds(unit.block * spec.tuning.warpgroups, spec.tuning.warpgroups)

    @pl.loop(0, unit.steps)
    def _(t):  # type: ignore[no-untyped-def]
        slot, step = take(sm["free"], done + t, spec.tuning.stages), unit.first + t
        full = sm["full"].at[slot]
        chunks = pl.ds(step * (spec.K // CHUNK), spec.K // CHUNK)
        plgpu.copy_gmem_to_smem(words.at[blocks, chunks], sm["w"].at[slot], full)
        groups = pl.ds(lax.div(step * spec.K, jnp.int32(spec.group)), spec.scales)
        for name, part in zip(("s", "extra"), parts, strict=False):
            plgpu.copy_gmem_to_smem(part.at[blocks, groups], sm[name].at[slot], full)
        rows = pl.ds(unit.token, spec.tuning.tokens)
        columns = pl.ds(pl.multiple_of(step * spec.K, spec.K), spec.K)
        plgpu.copy_gmem_to_smem(x_ref.at[rows, columns], sm["x"].at[slot], full)


def _product(spec: _Spec, unit: _Unit, done: Array, wg: Array, sm: dict[str, Any]) -> Array:
    """One warpgroup's rows of the weight times the unit's tokens, `[ROWS, tokens]`. A slot is
    released one step late, while the next product runs."""
    stages = jnp.int32(spec.tuning.stages)

    def multiply(acc):  # type: ignore[no-untyped-def]
        @pl.loop(0, unit.steps)
        def _(t):  # type: ignore[no-untyped-def]
            slot = lax.rem(done + t, stages)
            plgpu.barrier_wait(sm["full"].at[slot])
            plgpu.wgmma(acc, _weights(spec, slot, wg, sm), sm["x"].at[slot].T)
            plgpu.wgmma_wait(1)
            pl.when(t > 0)(
                lambda: plgpu.barrier_arrive(sm["free"].at[lax.rem(done + t - 1, stages)])
            )

        return acc[...]

    y = pl.run_scoped(multiply, plgpu.ACC((ROWS, spec.tuning.tokens), jnp.float32))
    plgpu.barrier_arrive(sm["free"].at[lax.rem(done + unit.steps - 1, stages)])
    return y


def _store(
    spec: _Spec, y: Array, unit: _Unit, wg: Array, sm: dict[str, Any], made: tuple[Any, ...]
) -> None:
    """Write `[ROWS, tokens]` of products as rows of tokens, or as a share that is added later."""
    tokens = pl.ds(unit.token, spec.tuning.tokens)
    row = pl.multiple_of(unit.block * spec.height + wg * ROWS, ROWS)
    is_whole = True if spec.tuning.shares == 1 else unit.block < (spec.whole if spec.bands == 1 else 0)

    @pl.when(jnp.logical_and(is_whole, row < spec.O))
    def _() -> None:
        if not spec.whole:
            return
        staged, some = sm["y"].at[wg], min(spec.tuning.tokens, STAGED)
        for first in range(0, spec.tuning.tokens, some):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged.T[...] = y[:, first : first + some].astype(spec.dtype)
            plgpu.commit_smem()
            own = pl.ds(pl.multiple_of(unit.token + first, 8), some)
            plgpu.copy_smem_to_gmem(staged, made[0].at[own, pl.ds(row, ROWS)])

    if spec.tuning.shares > 1:
        first = spec.whole * spec.height if spec.bands == 1 else 0

        @pl.when(jnp.logical_not(is_whole))
        def _() -> None:
            store(made[-1].at[unit.share, pl.ds(row - first, ROWS), tokens], y)


def _weights(spec: _Spec, slot: Array, wg: Array, sm: dict[str, Any]) -> Any:
    """A warpgroup's weights of a slot, `[ROWS, K]` in registers."""
    refs = [sm[name].at[slot, wg] for name in ("w", "s", "extra") if name in sm]
    if spec.interpret is not None:
        a = sm["a"].at[wg]
        words, scales, *extra = (ref[...][None] for ref in refs)
        given = {spec.form: extra[0]} if extra else {}
        none = {"zeros": None, "offsets": None} | given
        own = Int4(words, scales, rows=ROWS, group=min(spec.group, spec.K), **none)
        a[...] = dequantised(own, spec.K, spec.dtype)
        plgpu.commit_smem()
        return a

    @plgpu.inline_mgpu(
        arg_types=tuple(plgpu.RefType(()) for _ in refs),
        return_type=plgpu.ShapeDtypeStruct((ROWS, spec.K), spec.dtype, layout=plgpu.Layout.WGMMA),
    )
    def converted(_: Any, *refs: Any) -> Any:
        i32 = mgpu.utils.dtype_to_ir_type(jnp.int32)
        layout = plgpu.Layout.WGMMA.to_mgpu()
        shape = layout.registers_shape((ROWS, spec.K))
        made = mgpu.utils.inline_ptx(
            conversion(spec.K, min(spec.group, spec.K), jnp.dtype(spec.dtype).name, spec.form),
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
