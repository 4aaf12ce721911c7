"""Products of tokens with the weights in few bits of the experts that they chose, for NVIDIA
Hopper: the kernel of one weight, whose units are tiles of tokens times rows of the tile's expert.

Of gate and up, half of the warpgroups multiply the one and half the other; the latter hand their
sums over in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_matmul.gating import Gating, computes, in_kernels
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.grouped_matmul.mosaic_gpu import (
    at_width,
    plus,
    row_of_x,
    tile_rows,
)
from pallas_kernels.int4_matmul import mosaic_gpu as one
from pallas_kernels.int4_matmul.mosaic_operand import Rows, Weight
from pallas_kernels.int4_matmul.packed import CHUNK, ROWS, Int4
from pallas_kernels.int4_matmul.plan import widths_of
from pallas_kernels.mosaic_gpu import PRODUCER_REGISTERS, drain, launch, padded, registers_of, store
from pallas_kernels.mosaic_units import PROCESSORS
from pallas_kernels.mosaic_units.split import Unit

APART = 8  # numbers between rows of sums in shared memory, whose threads then use all banks


class _Tile(NamedTuple):
    """A tile's expert, and how many of its rows tokens take."""

    expert: Array
    rows: Array | int


class _Spec(NamedTuple):
    """Static parameters of a compiled kernel: those of one weight, the blocks of 64 rows of an
    expert, whether all tiles have the first rows of x, and the rows of every tile where they are
    known."""

    dense: one.Spec
    blocks: int
    shared: bool
    rows: int | None
    gating: Gating | None

    @property
    def widths(self) -> tuple[int, ...]:
        """Of products."""
        return widths_of(self.dense.tuning.tokens)

    @property
    def pairs(self) -> int:
        """Warpgroups of a part of the weight."""
        return self.dense.tuning.warpgroups // self.dense.parts


def check(x_PI: Array, w: Int4) -> None:
    """Raise ValueError for experts, with an axis of their own first, of which `mosaic_gpu` takes
    none by itself."""
    one.check(x_PI, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), w))


def grouped_int4_matmul(
    x_PI: Array,
    w: Int4,
    groups: Groups,
    bias_EO: Array | None = None,
    gating: Gating | None = None,
    *,
    interpret: Any = None,
) -> Array:
    """Each row of `groups`' tiles times the weight of its expert, see
    `pallas_kernels.grouped_matmul`. All arrays of w have an axis of experts first. Raises what
    `check` raises.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    check(x_PI, w)
    return grouped_products(x_PI, one.held(w), groups, bias_EO, gating, interpret)


def grouped_products(
    x_PI: Array,
    w: Weight,
    groups: Groups,
    bias_EO: Array | None,
    gating: Gating | None,
    interpret: Any,
) -> Array:
    """The same with any weights in few bits, each expert's of whole chunks."""
    x = padded(tile_rows(x_PI, groups, interpret), CHUNK)
    if w.rows % (ROWS if gating is None else 2 * ROWS) or (gating and not computes(gating)):
        spec = _spec(x, w, groups, None, interpret)
        (y,) = _multiply(spec, groups, x, w, None)
        return _finished(y[:, : w.rows], groups, bias_EO, gating)
    (y,) = _multiply(_spec(x, w, groups, gating, interpret), groups, x, w, bias_EO)
    return y


def _spec(x: Array, w: Weight, groups: Groups, gating: Gating | None, interpret: Any) -> _Spec:
    blocks = -(-w.rows // ROWS)
    tile = groups.tile
    parts = 1 if gating is None else 2
    rows = blocks // parts * ROWS
    warpgroups = 4 if tile <= 64 else 2
    kept = 0
    if gating is not None:
        kept = warpgroups // 2 * ROWS * (tile + APART) * 4
    sizes = w.numbers.tuning((groups.rows, rows, x.shape[1]), (tile, warpgroups), kept)
    sizes = sizes._replace(shares=1)
    dense = one.Spec(groups.rows, rows, x.shape[1], w.numbers, x.dtype, sizes, interpret, parts)
    return _Spec(dense, blocks, x.shape[0] < groups.rows, groups.shared, gating)


def _finished(y_PO: Array, groups: Groups, bias_EO: Array | None, gating: Gating | None) -> Array:
    """Products with the bias of their experts, and gated, where the kernel cannot do that."""
    y_WRO = y_PO.astype(jnp.float32).reshape(len(groups.expert_W), groups.tile, -1)
    if bias_EO is not None:
        y_WRO += bias_EO[groups.expert_W][:, None].astype(jnp.float32)
    if gating is None:
        y = y_WRO
    else:
        y = gating(*jnp.split(y_WRO, 2, axis=-1))
    return y.astype(y_PO.dtype).reshape(len(y_PO), -1)


def _multiply(
    spec: _Spec, groups: Groups, x: Array, w: Weight, bias_EO: Array | None
) -> list[Array]:
    split = spec.dense.split
    warpgroups = spec.dense.tuning.warpgroups
    arrays = [x, *(part.reshape(-1, *part.shape[2:]) for part in w.arrays)]
    if bias_EO is not None:
        biases = [bias_EO]
    else:
        biases = []
    blocks = min(PROCESSORS, split.bands * split.down)

    plan = (groups.expert_W, groups.used, *(() if spec.rows else (groups.rows_W,)))

    def kernel(*refs, **sm):  # type: ignore[no-untyped-def]
        plan_refs = refs[: len(plan)]
        rest = refs[len(plan) :]
        input_refs = rest[: len(arrays)]
        *bias_ref, made = rest[len(arrays) :]
        block = lax.axis_index("block")
        wg = lax.axis_index("wg")

        def each(run: Callable[[Unit, _Tile, Array], None]) -> Array:
            return _each(spec, plan_refs, (block, blocks), run)

        @pl.when(wg == warpgroups)
        def _producer() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            done = each(lambda unit, tile, done: _fill(spec, input_refs, unit, tile, done, sm))
            drain(sm["free"], done, spec.dense.tuning.stages)

        @pl.when(wg < warpgroups)
        def _consumer() -> None:
            plgpu.set_max_registers(registers_of(warpgroups), action="increase")

            def consume(unit: Unit, tile: _Tile, done: Array) -> None:
                def product(width: int) -> None:
                    row = split.row(unit, lax.rem(wg, jnp.int32(spec.pairs)))
                    row += lax.div(wg, jnp.int32(spec.pairs)) * spec.dense.O
                    rows = Rows(input_refs[1:], tile.expert * (spec.blocks * ROWS) + row)
                    y = one.product(spec.dense, rows, unit, done, wg, sm, width)
                    for ref in bias_ref:
                        y = plus(ref.at[tile.expert], y, row)
                    if spec.gating is None:
                        split.store(y, unit, wg, sm, (made,), spec.dense.interpret)
                    else:
                        _gated(spec, y, unit, done, wg, sm, made)

                at_width(spec.widths, tile.rows, product)

            done = each(consume)
            if spec.gating is not None:  # barriers end in the phase they began in
                pl.when(jnp.logical_and(wg >= spec.pairs, done > 0))(
                    lambda: plgpu.barrier_wait(sm["taken"].at[wg - spec.pairs])
                )
            plgpu.wait_smem_to_gmem(0)

    dense = spec.dense
    sizes = f"{dense.tuning.tokens}x{dense.parts * dense.O}x{dense.I}"
    kernel.__name__ = f"grouped_{dense.numbers.name}_{sizes}"  # for profiles
    return launch(
        kernel,
        (*plan, *arrays, *biases),
        dense.interpret,
        out_type=split.results,
        scratch_types=one.scratch(dense) | _exchange(spec),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="wg",
    )


def _exchange(spec: _Spec) -> dict[str, Any]:
    """Where up's sums are handed over."""
    if spec.gating is None:
        return {}
    barrier = plgpu.Barrier(num_arrivals=1, num_barriers=spec.pairs)
    shape = (spec.pairs, ROWS, spec.dense.tuning.tokens + APART)
    return {"up": plgpu.SMEM(shape, jnp.float32), "sent": barrier, "taken": barrier}


def _each(
    spec: _Spec,
    plan: tuple[Any, ...],
    place: tuple[Array, int],
    run: Callable[[Unit, _Tile, Array], None],
) -> Array:
    """Call `run(unit, tile, steps done before)` for each unit of a thread block; returns the
    steps done. `place` is the number of the thread block, and how many there are."""
    expert_ref, used_ref, *rows_ref = plan
    block, blocks = place
    split = spec.dense.split
    units = used_ref[used_ref.shape[0] - 1] * split.down

    def body(i: Array, done: Array) -> Array:
        index = block + i * blocks
        tile = lax.div(index, jnp.int32(split.down))
        token = pl.multiple_of(tile * spec.dense.tuning.tokens, 8)
        row = lax.rem(index, jnp.int32(split.down))
        zero = jnp.int32(0)
        expert_tile = _Tile(expert_ref[tile], rows_ref[0][tile] if rows_ref else spec.rows or 0)
        run(Unit(row, token, zero, zero, jnp.int32(split.steps)), expert_tile, done)
        return done + split.steps

    count = lax.div(units - block + (blocks - 1), jnp.int32(blocks))
    return lax.fori_loop(0, jnp.maximum(count, 0), body, jnp.int32(0))


def _fill(
    spec: _Spec,
    input_refs: tuple[Any, ...],
    unit: Unit,
    tile: _Tile,
    done: Array,
    sm: dict[str, Any],
) -> None:
    """Fill the ring with one unit."""
    first = tile.expert * spec.blocks + unit.block * spec.pairs
    firsts = tuple(first + part * spec.dense.O // ROWS for part in range(spec.dense.parts))
    row = row_of_x(unit.token, spec.shared)
    source = one.Source(firsts, row, lambda run: at_width(spec.widths, tile.rows, run))
    one.fill(spec.dense, input_refs, source, unit, done, sm)


def _gated(
    spec: _Spec, y: Array, unit: Unit, done: Array, wg: Array, sm: dict[str, Any], made: Any
) -> None:
    """Hand over the sums of up, or take them and write what the gate makes of them."""
    pairs = spec.pairs
    tokens = pl.ds(0, y.shape[1])
    gating = spec.gating
    assert gating is not None

    @pl.when(wg >= pairs)
    def _give() -> None:
        pair = wg - pairs
        pl.when(done > 0)(lambda: plgpu.barrier_wait(sm["taken"].at[pair]))
        store(sm["up"].at[pair, :, tokens], y)
        plgpu.barrier_arrive(sm["sent"].at[pair])

    @pl.when(wg < pairs)
    def _take() -> None:
        plgpu.barrier_wait(sm["sent"].at[wg])
        up = plgpu.load(sm["up"].at[wg, :, tokens], layout=plgpu.Layout.WGMMA, optimized=False)
        plgpu.barrier_arrive(sm["taken"].at[wg])
        split = spec.dense.split
        split.store(in_kernels(gating)(y, up), unit, wg, sm, (made,), spec.dense.interpret)
