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
from pallas_kernels.int4_matmul.mosaic_operand import OPERAND, Spec, operand
from pallas_kernels.int4_matmul.packed import CHUNK, FORMS, ROWS, WORDS, Int4
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
from pallas_kernels.mosaic_units import Unit
from pallas_kernels.parts import Product, whole


class Place(NamedTuple):
    """Where a unit's operands lie.

    Attributes:
      firsts: the first block of 64 rows of each part of the weight.
      row: the first row of x.
      at_width: calls its argument with the number of rows of x that there are.
    """

    firsts: tuple[Array, ...]
    row: Array
    at_width: Callable[[Callable[[int], None]], None]


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
    (T, I), O = x_TI.shape, w.words.shape[0] * ROWS  # noqa: E741
    if tuning is None and is_dense(T):
        weight = dense(w, x_TI, interpret=interpret)
        return lax.dot_general(x_TI, weight, (((1,), (1,)), ((), ())))
    x_TI = padded(x_TI, CHUNK)
    sizes = tuning or tuning_of(T, O, I, w.group)
    spec = Spec(x_TI.shape[0], O, x_TI.shape[1], w.group, x_TI.dtype, w.form, sizes, interpret)
    return spec.split.parts(_multiply(spec, x_TI, w), T, w.rows)


def _multiply(spec: Spec, x: Array, w: Int4) -> list[Array]:
    split, warpgroups = spec.split, spec.tuning.warpgroups
    arrays = [part for part in (x, w.words, w.scales, w.zeros, w.offsets) if part is not None]

    def kernel(*refs, **sm):  # type: ignore[no-untyped-def]
        given, made = refs[: len(arrays)], refs[len(arrays) :]
        block, wg = lax.axis_index("block"), lax.axis_index("wg")

        @pl.when(wg == warpgroups)
        def _producer() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def own(unit: Unit, done: Array) -> None:
                place = Place((unit.block * warpgroups,), unit.token, lambda run: run(split.tokens))
                fill(spec, given, place, unit, done, sm)

            done = split.each(block, own)
            drain(sm["free"], done, spec.tuning.stages)

        @pl.when(wg < warpgroups)
        def _consumer() -> None:
            plgpu.set_max_registers(registers_of(warpgroups), action="increase")
            split.each(
                block,
                lambda unit, done: split.store(
                    product(spec, unit, done, wg, sm), unit, wg, sm, made, spec.interpret
                ),
            )
            plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = f"int4_matmul_{spec.T}x{spec.O}x{spec.I}"  # for profiles
    return launch(
        kernel,
        tuple(arrays),
        spec.interpret,
        out_type=split.results,
        scratch_types=scratch(spec, len(arrays)),
        grid=(split.blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="wg",
    )


def scratch(spec: Spec, inputs: int) -> dict[str, Any]:
    """The ring and what is staged; the kernel has so many `inputs`."""
    (tokens, warpgroups, K, stages, _), dtype = spec.tuning, spec.dtype
    values = (stages, warpgroups, spec.groups, ROWS)
    scratch = {
        "x": plgpu.SMEM((stages, tokens, K), dtype, transforms=TILED),
        "w": plgpu.SMEM((stages, warpgroups, K // CHUNK, *WORDS), jnp.int32),
        "scales": plgpu.SMEM(values, dtype),
        "full": plgpu.Barrier(num_arrivals=1 + spec.parts * (inputs - 1), num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    }
    if spec.form in FORMS[1:]:
        scratch["others"] = plgpu.SMEM(values, dtype)
    scratch |= spec.split.staged
    if spec.interpret is not None:  # its tensor cores know operands in shared memory alone
        scratch["a"] = plgpu.SMEM((warpgroups, ROWS, spec.operand), dtype, transforms=TILED)
    return scratch


def fill(
    spec: Spec,
    given: tuple[Any, ...],
    place: Place,
    unit: Unit,
    done: Array,
    sm: dict[str, Any],
) -> None:
    """Fill the ring with one unit's words, scales, zero points or offsets, and rows of x."""
    (x_ref, words, *values), held = given, spec.tuning.warpgroups // spec.parts

    @pl.loop(0, unit.steps)
    def _(t):  # type: ignore[no-untyped-def]
        slot, step = take(sm["free"], done + t, spec.tuning.stages), unit.first + t
        full = sm["full"].at[slot]
        chunks = pl.ds(step * (spec.K // CHUNK), spec.K // CHUNK)
        groups = pl.ds(lax.div(step * spec.K, jnp.int32(spec.group)), spec.groups)
        for part, first in enumerate(place.firsts):
            blocks, own = pl.ds(first, held), pl.ds(part * held, held)
            plgpu.copy_gmem_to_smem(words.at[blocks, chunks], sm["w"].at[slot, own], full)
            for name, ref in zip(("scales", "others"), values, strict=False):
                plgpu.copy_gmem_to_smem(ref.at[blocks, groups], sm[name].at[slot, own], full)
        columns = pl.ds(pl.multiple_of(step * spec.K, spec.K), spec.K)

        def copy(width: int) -> None:
            x = x_ref.at[pl.ds(place.row, width), columns]
            plgpu.copy_gmem_to_smem(x, sm["x"].at[slot, pl.ds(0, width)], full)

        place.at_width(copy)


def product(
    spec: Spec, unit: Unit, done: Array, wg: Array, sm: dict[str, Any], width: int | None = None
) -> Array:
    """One warpgroup's rows of the weight times the unit's tokens, or `width` of these, `[ROWS,
    tokens]`."""
    tokens, stages = width or spec.tuning.tokens, spec.tuning.stages
    running, together = spec.running, spec.together

    def release(slot: Array) -> None:
        plgpu.barrier_arrive(sm["free"].at[slot])

    def multiply(acc):  # type: ignore[no-untyped-def]
        def step(t: Array, slot: Array) -> Array:
            plgpu.barrier_wait(sm["full"].at[slot])
            for first in range(0, spec.K, spec.operand):
                x = sm["x"].at[slot, pl.ds(0, tokens), pl.ds(first, spec.operand)]
                plgpu.wgmma(acc, operand(spec, slot, wg, first, sm), x.T)
                plgpu.wgmma_wait(running)
                if running and first == 0:
                    before = lax.select(slot == 0, jnp.int32(stages - 1), slot - 1)
                    pl.when(t > 0)(partial(release, before))
            if not running:
                release(slot)
            return lax.select(slot == stages - 1, jnp.int32(0), slot + 1)

        def turn(i: Array, slot: Array) -> Array:
            for own in range(together):
                slot = step(i * together + own, slot)
            return slot

        # Not a remainder for each slot, which takes up to an eighth of the instructions
        slot, whole = lax.rem(done, jnp.int32(stages)), lax.div(unit.steps, jnp.int32(together))
        slot = lax.fori_loop(0, whole, turn, slot)
        if together > 1 and (spec.split.steps % together or spec.tuning.shares > 1):

            def last(t: Array, slot: Array) -> Array:
                slot = step(t, slot)
                plgpu.wgmma_wait(0)  # a loop has one set of registers
                return slot

            lax.fori_loop(whole * together, unit.steps, last, slot)
        return acc[...] if spec.excess == 1 else acc[...] * jnp.float32(spec.excess)

    y = pl.run_scoped(multiply, plgpu.ACC((ROWS, tokens), jnp.float32))
    if running:
        release(lax.rem(done + unit.steps - 1, jnp.int32(stages)))
    return y
