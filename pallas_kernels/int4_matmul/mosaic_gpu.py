"""Products with 4-bit weights for NVIDIA Hopper in Pallas Mosaic GPU.

The weight's rows are the 64-row operand of the tensor cores, taken from registers; the tokens are
the other one, from shared memory, whose width can be any multiple of 8. A lane finds the numbers
that it needs of 64 x 64 weights in 16 bytes, so it makes its operand without any exchange.

A unit is a block of rows times a tile of tokens over all columns or a share of them. A producer
warpgroup fills a ring of TMA copies across units; each of the others converts and multiplies 64
rows. One converts while another multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_matmul.mosaic_dense import dense
from pallas_kernels.int4_matmul.mosaic_operand import (
    Blocks,
    Place,
    Rows,
    Spec,
    Weight,
    Words,
)
from pallas_kernels.int4_matmul.mosaic_operand import check as check
from pallas_kernels.int4_matmul.packed import CHUNK, ROWS, Int4
from pallas_kernels.int4_matmul.plan import Tuning, is_dense, tuning_of
from pallas_kernels.mosaic_gpu import (
    PRODUCER_REGISTERS,
    TILED,
    drain,
    launch,
    padded,
    registers_of,
    take,
)
from pallas_kernels.mosaic_units.split import Unit
from pallas_kernels.parts import Product, whole


class Source(NamedTuple):
    """Where a unit's operands lie.

    Attributes:
      firsts: the first block of 64 rows of each part of the weight.
      row: the first row of x.
      at_width: calls its argument with the number of rows of x that there are.
    """

    firsts: tuple[Array, ...]
    row: Array
    at_width: Callable[[Callable[[int], None]], None]


def int4_matmul(
    x_TI: Array, w: Int4, *, tuning: Tuning | None = None, interpret: Any = None
) -> Array:
    """See `pallas_kernels.int4_matmul`, and `int4_parts`."""
    return whole(int4_parts(x_TI, w, tuning=tuning, interpret=interpret))


def int4_parts(
    x_TI: Array, w: Int4, *, tuning: Tuning | None = None, interpret: Any = None
) -> Product:
    """See `pallas_kernels.int4_matmul`. Raises what `check` raises.

    Without a `tuning` the product is XLA's, of the whole weight, where `plan.is_dense` says so.
    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    check(x_TI, w)
    T, I = x_TI.shape
    O = w.words.shape[0] * ROWS
    if tuning is None and is_dense(T):
        weight = dense(w, x_TI, interpret=interpret)
        return lax.dot_general(x_TI, weight, (((1,), (1,)), ((), ())))
    return parts_of(x_TI, held(w), tuning or tuning_of(T, O, I, w.group), interpret)


def held(w: Int4) -> Weight:
    """The weight as the kernel takes any in few bits."""
    parts = (w.words, w.scales, w.zeros, w.offsets)
    return Weight(Words(w.group, w.form), tuple(p for p in parts if p is not None), w.rows)


def parts_of(x_TI: Array, w: Weight, sizes: Tuning, interpret: Any, made: Any = None) -> Product:
    """x times any weight, of whole chunks; of the type `made`, by default x's."""
    T = x_TI.shape[0]
    O = -(-w.rows // ROWS) * ROWS
    x_TI = padded(x_TI, CHUNK)
    shape = x_TI.shape[0], O, x_TI.shape[1]
    spec = Spec(*shape, w.numbers, x_TI.dtype, sizes, interpret, made=made)
    return spec.split.parts(_multiply(spec, x_TI, w.arrays), T, w.rows)


def _multiply(spec: Spec, x: Array, arrays: tuple[Array, ...]) -> list[Array]:
    split = spec.split
    warpgroups = spec.tuning.warpgroups

    def kernel(*refs, **sm):  # type: ignore[no-untyped-def]
        input_refs = refs[: 1 + len(arrays)]
        made = refs[1 + len(arrays) :]
        block = lax.axis_index("block")
        wg = lax.axis_index("wg")

        @pl.when(wg == warpgroups)
        def _producer() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def own(unit: Unit, done: Array) -> None:
                source = Source(
                    (unit.block * warpgroups,), unit.token, lambda run: run(split.tokens)
                )
                fill(spec, input_refs, source, unit, done, sm)

            done = split.each(block, own)
            drain(sm["free"], done, spec.tuning.stages)

        @pl.when(wg < warpgroups)
        def _consumer() -> None:
            plgpu.set_max_registers(registers_of(warpgroups), action="increase")

            def multiply(unit: Unit, done: Array) -> None:
                y = product(spec, Rows(input_refs[1:], split.row(unit, wg)), unit, done, wg, sm)
                split.store(y, unit, wg, sm, made, spec.interpret)

            def own(unit: Unit, done: Array) -> None:
                if not split.joined:
                    return multiply(unit, done)
                has_rows = split.row(unit, wg) < split.O
                pl.when(has_rows)(partial(multiply, unit, done))
                pl.when(jnp.logical_not(has_rows))(partial(pass_by, spec, unit, done, sm))

            split.each(block, own)
            plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = f"{spec.numbers.name}_matmul_{spec.T}x{spec.O}x{spec.I}"  # for profiles
    return launch(
        kernel,
        (x, *arrays),
        spec.interpret,
        out_type=split.results,
        scratch_types=scratch(spec),
        grid=(split.blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="wg",
    )


def scratch(spec: Spec) -> dict[str, Any]:
    """The ring and what is staged."""
    tokens, warpgroups, K, stages, *_ = spec.tuning
    dtype = spec.dtype
    copies = 1 + spec.parts * spec.numbers.copies
    scratch = {
        "x": plgpu.SMEM((stages, tokens, K), dtype, transforms=TILED),
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    }
    scratch |= spec.numbers.scratch(spec) | spec.split.staged
    if spec.interpret is not None:  # its tensor cores know operands in shared memory alone
        scratch["a"] = plgpu.SMEM((warpgroups, ROWS, spec.operand), dtype, transforms=TILED)
    return scratch


def fill(
    spec: Spec,
    input_refs: tuple[Any, ...],
    source: Source,
    unit: Unit,
    done: Array,
    sm: dict[str, Any],
) -> None:
    """Fill the ring with one unit's weights and rows of x."""
    x_ref, *refs = input_refs
    held = spec.tuning.warpgroups // spec.parts

    @pl.loop(0, unit.steps)
    def _(t):  # type: ignore[no-untyped-def]
        slot = take(sm["free"], done + t, spec.tuning.stages)
        step = unit.first + t
        for part, first in enumerate(source.firsts):
            blocks = Blocks(first, held, part * held)
            spec.numbers.copy(spec, tuple(refs), blocks, step, slot, sm)
        columns = pl.ds(pl.multiple_of(step * spec.K, spec.K), spec.K)

        def copy(width: int) -> None:
            x = x_ref.at[pl.ds(source.row, width), columns]
            target = sm["x"].at[slot, pl.ds(0, width)]
            plgpu.copy_gmem_to_smem(x, target, sm["full"].at[slot])

        source.at_width(copy)


def pass_by(spec: Spec, unit: Unit, done: Array, sm: dict[str, Any]) -> None:
    """A warpgroup without rows: leave the unit's slots to the others."""

    @pl.loop(0, unit.steps)
    def _(t):  # type: ignore[no-untyped-def]
        slot = lax.rem(done + t, jnp.int32(spec.tuning.stages))
        plgpu.barrier_wait(sm["full"].at[slot])
        plgpu.barrier_arrive(sm["free"].at[slot])


def product(
    spec: Spec,
    rows: Rows,
    unit: Unit,
    done: Array,
    wg: Array,
    sm: dict[str, Any],
    width: int | None = None,
) -> Array:
    """One warpgroup's rows of the weight times the unit's tokens, or `width` of these, `[ROWS,
    tokens]`."""
    tokens = width or spec.tuning.tokens
    stages = spec.tuning.stages
    running = spec.running
    together = spec.together

    def release(slot: Array) -> None:
        plgpu.barrier_arrive(sm["free"].at[slot])

    def multiply(acc):  # type: ignore[no-untyped-def]
        def step(t: Array, slot: Array) -> Array:
            scales = spec.numbers.scales(spec, rows, unit.first + t)
            plgpu.barrier_wait(sm["full"].at[slot])
            for first in range(0, spec.K, spec.operand):
                x = sm["x"].at[slot, pl.ds(0, tokens), pl.ds(first, spec.operand)]
                weights = spec.numbers.operand(spec, Place(slot, wg, first), scales, sm)
                plgpu.wgmma(acc, weights, x.T)
                plgpu.wgmma_wait(running)
                if running and first == 0:
                    before = lax.select(slot == 0, jnp.int32(stages - 1), slot - 1)
                    pl.when(t > 0)(partial(release, before))
            if not running:
                release(slot)
            return lax.select(slot == stages - 1, jnp.int32(0), slot + 1)

        def turn(i: Array, slot: Array) -> Array:
            for offset in range(together):
                slot = step(i * together + offset, slot)
            return slot

        # Not a remainder for each slot, which takes up to an eighth of the instructions
        slot = lax.rem(done, jnp.int32(stages))
        whole = lax.div(unit.steps, jnp.int32(together))
        slot = lax.fori_loop(0, whole, turn, slot)
        if together > 1 and (spec.split.steps % together or spec.tuning.shares > 1):

            def last(t: Array, slot: Array) -> Array:
                slot = step(t, slot)
                plgpu.wgmma_wait(0)  # a loop has one set of registers
                return slot

            lax.fori_loop(whole * together, unit.steps, last, slot)
        return acc[...]

    y = pl.run_scoped(multiply, plgpu.ACC((ROWS, tokens), jnp.float32))
    if running:
        release(lax.rem(done + unit.steps - 1, jnp.int32(stages)))
    return spec.numbers.finished(spec, rows, y)
