"""The gated product of some hundred tokens for NVIDIA Hopper: the units, ring and products of
`matmul`, where tiles of tokens can fill the card, with gate and up in one launch.

The 64 rows of the weight that a warpgroup multiplies are eight of gate and eight of up in turn. So
a thread has both sums of each of its outputs, and gates them without any exchange. One copy brings
them in that order, from a view `[2, F / 8, 8, I]` of the weight.
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

from pallas_kernels.gated_matmul.gating import Gating, in_kernels
from pallas_kernels.int4_matmul.mosaic_gpu import Source, fill, product, scratch
from pallas_kernels.int4_matmul.mosaic_operand import Blocks, Place, Rows, Spec
from pallas_kernels.int4_matmul.plan import Tuning, best_of
from pallas_kernels.matmul.plan import MOST_STAGES, SHARED_BYTES, TILES, K
from pallas_kernels.mosaic_gpu import (
    PRODUCER_REGISTERS,
    drain,
    launch,
    padded,
    registers_of,
    tiled,
)
from pallas_kernels.mosaic_units import ROWS, STAGED, Unit

STRIP = 8  # rows of gate, or of up, that lie together
PAIRS = ROWS // (2 * STRIP)  # strips of gate and of up of a warpgroup
OUTPUTS = ROWS // 2  # of a warpgroup
# How a warpgroup holds half of its rows: a warp had 16 of them, and has 8
HALF = plgpu.Layout.TILED(
    plgpu.Tiling(((OUTPUTS, 8), (8, 8), (2,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


class Alternating(NamedTuple):
    """A weight of gate and up, of x's type, `[2, F / STRIP, STRIP, I]`. See
    `int4_matmul.mosaic_operand.Numbers`."""

    @property
    def name(self) -> str:
        return "alternating"

    @property
    def copies(self) -> int:
        return 1

    def tuning(self, shape: tuple[int, int, int], tile: tuple[int, int], kept: int) -> Tuning:
        assert not kept, "a whole weight is multiplied, by a kernel that keeps nothing"
        return tuning_with(*tile)

    def scratch(self, spec: Spec) -> dict[str, Any]:
        shape = spec.tuning.stages, spec.tuning.warpgroups * PAIRS, 2, STRIP, spec.K
        tiles = plgpu.TilingTransform((1, 1, STRIP, spec.K)), plgpu.SwizzleTransform(2 * spec.K)
        return {"w": plgpu.SMEM(shape, spec.dtype, transforms=tiles)}

    def copy(
        self, spec: Spec, refs: tuple[Any, ...], rows: Blocks, step: Array, slot: Array, sm: Any
    ) -> None:
        pairs = pl.ds(rows.first * PAIRS, rows.height * PAIRS)
        columns = pl.ds(pl.multiple_of(step * spec.K, spec.K), spec.K)
        place = sm["w"].at[slot, pl.ds(rows.own * PAIRS, rows.height * PAIRS)]
        own = refs[0].at[:, pairs, :, columns]
        plgpu.copy_gmem_to_smem(own, place.transpose((1, 0, 2, 3)), sm["full"].at[slot])

    def scales(self, spec: Spec, rows: Rows, step: Array) -> list[Array]:
        return []

    def operand(self, spec: Spec, place: Place, scales: list[Array], sm: dict[str, Any]) -> Any:
        """A warpgroup's rows where they lie."""
        assert spec.operand == spec.K and not place.column
        own = sm["w"].at[place.slot, pl.ds(place.wg * PAIRS, PAIRS)]
        if spec.interpret is None:
            return own.reshape(ROWS, spec.K)
        a = sm["a"].at[place.wg]  # the interpreter knows no other shape of a reference
        a[...] = own[...].reshape(ROWS, spec.K)
        plgpu.commit_smem()
        return a

    def finished(self, spec: Spec, rows: Rows, y: Array) -> Array:
        return y


def tuning_of(T: int, O: int, I: int) -> Tuning:  # noqa: E741
    """Sizes for x `[T, I]` and a weight `[O, I]`."""
    return best_of((T, O, I), tuning_with, TILES)


def tuning_with(tokens: int, warpgroups: int) -> Tuning:
    """The same with a given tile. No columns are shared out: large weights fill the card."""
    staged = 2 * min(tokens, STAGED) * OUTPUTS * warpgroups
    stages = (SHARED_BYTES - staged) // _slot_bytes(tokens, warpgroups)
    return Tuning(tokens, warpgroups, K, min(MOST_STAGES, stages), 1)


def staged_of(sizes: Tuning) -> int:
    """Tokens whose results are staged at once: all, or even parts of as many as fit beside the
    ring. A part waits for the one before it, but what it stores is made before."""
    ring = sizes.stages * _slot_bytes(sizes.tokens, sizes.warpgroups)
    most = (SHARED_BYTES - ring) // (2 * OUTPUTS * sizes.warpgroups) // 8 * 8
    parts = -(-sizes.tokens // most)
    return -(-sizes.tokens // (8 * parts)) * 8


def _slot_bytes(tokens: int, warpgroups: int) -> int:
    return 2 * K * (tokens + warpgroups * ROWS)


def gated_matmul(
    x_TI: Array,
    w_OI: Array,
    gating: Gating,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """See `pallas_kernels.gated_matmul`; takes what `mosaic_gpu.check` lets through.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    (T, I), F = x_TI.shape, w_OI.shape[0] // 2  # noqa: E741
    O = -(-F // OUTPUTS) * ROWS  # noqa: E741
    x_TI = padded(x_TI)
    sizes = tuning or tuning_of(T, O, I)
    spec = Spec(x_TI.shape[0], O, I, Alternating(), x_TI.dtype, sizes, interpret)
    return _multiply(spec, gating, x_TI, w_OI.reshape(2, F // STRIP, STRIP, I))[:T, :F]


def _multiply(spec: Spec, gating: Gating, x: Array, w: Array) -> Array:
    split, warpgroups = spec.split, spec.tuning.warpgroups

    def kernel(x_ref, w_ref, y_ref, **sm):  # type: ignore[no-untyped-def]
        block, wg = lax.axis_index("block"), lax.axis_index("wg")

        @pl.when(wg == warpgroups)
        def _producer() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def own(unit: Unit, done: Array) -> None:
                first = unit.block * warpgroups
                source = Source((first,), unit.token, lambda run: run(split.tokens))
                fill(spec, (x_ref, w_ref), source, unit, done, sm)

            done = split.each(block, own)
            drain(sm["free"], done, spec.tuning.stages)

        @pl.when(wg < warpgroups)
        def _consumer() -> None:
            plgpu.set_max_registers(registers_of(warpgroups), action="increase")

            def own(unit: Unit, done: Array) -> None:
                row = split.row(unit, wg)
                y = product(spec, Rows((w_ref,), row), unit, done, wg, sm)
                staged = sm["y"].at[wg]
                pl.when(row < split.O)(lambda: _store(spec, gating, y, unit, row, staged, y_ref))

            split.each(block, own)
            plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = f"gated_matmul_{spec.T}x{spec.O}x{spec.I}"  # for profiles
    shape = warpgroups, staged_of(spec.tuning), OUTPUTS
    return launch(
        kernel,
        (x, w),
        spec.interpret,
        out_type=jax.ShapeDtypeStruct((spec.T, spec.O // 2), spec.dtype),
        scratch_types=scratch(spec)
        | {"y": plgpu.SMEM(shape, spec.dtype, transforms=tiled(OUTPUTS))},
        grid=(split.blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="wg",
    )


def _store(
    spec: Spec, gating: Gating, y: Array, unit: Unit, row: Array, staged: Any, y_ref: Any
) -> None:
    """Gate the products `[ROWS, tokens]` and write `OUTPUTS` columns of rows of tokens, some tokens
    after the other through shared memory."""
    columns = pl.ds(pl.multiple_of(lax.div(row, jnp.int32(2)), OUTPUTS), OUTPUTS)
    width, at_once = y.shape[1], staged.shape[0]
    for first in range(0, width, at_once):
        some = min(width - first, at_once)
        gate, up = _apart(y[:, first : first + some], spec.interpret)
        made = in_kernels(gating)(gate, up).astype(spec.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        own = staged.at[pl.ds(0, some)]
        own.T[...] = made
        plgpu.commit_smem()
        tokens = pl.ds(pl.multiple_of(unit.token + first, 8), some)
        plgpu.copy_smem_to_gmem(own, y_ref.at[tokens, columns])


def _apart(y: Array, interpret: Any) -> tuple[Array, Array]:
    """Gate and up, `[OUTPUTS, tokens]`, of rows that are theirs in turn; each lane keeps its
    own."""
    width = y.shape[1]
    if interpret is not None:
        gate, up = (y.reshape(PAIRS, 2, STRIP, width)[:, part] for part in range(2))
        return gate.reshape(OUTPUTS, width), up.reshape(OUTPUTS, width)
    made = plgpu.ShapeDtypeStruct((OUTPUTS, width), jnp.float32, layout=HALF)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=(made, made))
    def apart(_: Any, y: Any) -> tuple[Any, Any]:
        gate, up = registers_apart(y.registers)
        layout = HALF.to_mgpu()
        return tuple(
            mgpu.FragmentedArray(_registers=part, _layout=layout, _is_signed=None)
            for part in (gate, up)
        )

    return apart(y)


def registers_apart(registers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Registers of gate and of up, in the layout `HALF`, of those of the product. A thread has two
    numbers of a row and of the eighth row below for each eight tokens."""
    pairs = registers.reshape(-1, 2)
    shape = HALF.to_mgpu().registers_shape((OUTPUTS, 8 * len(pairs)))
    return pairs[:, 0].reshape(shape), pairs[:, 1].reshape(shape)
