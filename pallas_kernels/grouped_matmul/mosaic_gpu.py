"""Grouped products for NVIDIA Hopper in Pallas Mosaic GPU.

The weight's rows are the 64-row operand of the tensor cores and a tile's tokens the other one,
whose width can be any multiple of 8: an expert that few tokens chose costs its bytes and little
more.

A unit is one tile of tokens times some rows of its expert's weight. Units of a tile are neighbours,
so that blocks that run side by side share its tokens, and tiles of one expert its weight, in the L2
cache. A producer warpgroup fills a ring of TMA copies across units; the others multiply.
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
from pallas_kernels.grouped_matmul.groups import LARGEST_TILE, SMALLEST_TILE, Groups
from pallas_kernels.grouped_matmul.mosaic_rows import spread
from pallas_kernels.grouped_matmul.plan import (
    PROCESSORS,
    ROWS,
    K,
    Tuning,
    tuning_of,
    widths_of,
)
from pallas_kernels.mosaic_gpu import (
    PRODUCER_REGISTERS,
    TILED,
    drain,
    launch,
    padded,
    registers_of,
    take,
)


class Spec(NamedTuple):
    """Static parameters of a compiled kernel: shapes, type and sizes. `rows` are those of every
    tile, where they are known; `shared`: every tile has the first rows of x."""

    tiles: int
    tile: int
    rows: int | None
    shared: bool
    O: int
    I: int
    gating: Gating | None
    dtype: Any
    tuning: Tuning
    interpret: Any

    @property
    def F(self) -> int:
        """Columns of y."""
        if self.gating is None:
            return self.O
        return self.O // 2

    @property
    def half(self) -> int:
        """Rows of one of the two parts of the weight in a block: gate and up, or neighbours."""
        return self.tuning.warpgroups * ROWS

    @property
    def width(self) -> int:
        """Columns of y that a unit computes."""
        return self.half * (2 if self.gating is None else 1)

    @property
    def apart(self) -> int:
        """Rows of the weight from the first of one part to that of the other."""
        if self.gating is None:
            return self.half
        return self.F

    @property
    def steps(self) -> int:
        """Slots of the ring that a unit fills."""
        return self.I // self.tuning.columns

    @property
    def across(self) -> int:
        """Units of a tile."""
        return -(-self.F // self.width)


class Unit(NamedTuple):
    """What a block computes next: its tile and expert, its rows of x and of y, how many of them
    tokens take, and its first column of y."""

    tile: Array
    expert: Array
    row: Array
    rows: Array | int
    column: Array


def check(x: Any, w: Any, groups: Groups, gating: Any) -> None:
    """Raise ValueError unless x and w are bfloat16 or float16, their sizes fit tiles, and Mosaic
    has the gating's functions."""
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2]:
        raise ValueError(
            f"mosaic_gpu grouped_matmul takes x [P, I] and w [E, O, I], got {x.shape} and {w.shape}"
        )
    if x.dtype not in (jnp.bfloat16, jnp.float16) or w.dtype != x.dtype:
        raise ValueError(
            "mosaic_gpu grouped_matmul takes bfloat16 or float16 throughout, "
            f"got x {x.dtype}, w {w.dtype}"
        )
    check_units(w, groups, gating, K)


def fits_units(rows: int, inputs: int, gated: bool, columns: int) -> bool:
    """Whether so many rows, gate's and up's where `gated`, and inputs fit tiles with so many
    columns."""
    return rows % (2 * ROWS if gated else ROWS) == 0 and inputs % columns == 0


def check_units(w: Any, groups: Groups, gating: Any, columns: int) -> None:
    """Raise ValueError unless the sizes of w `[E, O, I]` fit tiles with so many columns, and Mosaic
    has the gating's functions."""
    if not fits_units(w.shape[1], w.shape[2], gating is not None, columns) or 0 in w.shape:
        if gating is None:
            outputs = ROWS
        else:
            outputs = 2 * ROWS
        raise ValueError(
            f"mosaic_gpu grouped_matmul takes O a multiple of {outputs} and I of {columns}, "
            f"got w {w.shape}"
        )
    if gating is not None and not computes(gating):
        raise ValueError("mosaic_gpu grouped_matmul takes gatings without erf; approximate gelu")
    tile = groups.tile
    if not SMALLEST_TILE <= tile <= LARGEST_TILE or tile & (tile - 1):
        raise ValueError(
            f"mosaic_gpu grouped_matmul takes tiles of {SMALLEST_TILE} to {LARGEST_TILE} rows, "
            f"a power of two, got {tile}"
        )


def grouped_matmul(
    x_PI: Array,
    w_EOI: Array,
    groups: Groups,
    bias_EO: Array | None,
    gating: Gating | None,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """See `pallas_kernels.grouped_matmul`. Raises what `check` raises.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    check(x_PI, w_EOI, groups, gating)
    x_PI = tile_rows(x_PI, groups, interpret)
    (tiles,) = groups.expert_W.shape
    tile = groups.tile
    _, O, I = w_EOI.shape
    sizes = tuning or tuning_of(tile)
    shared = x_PI.shape[0] < tiles * tile
    spec = Spec(tiles, tile, groups.shared, shared, O, I, gating, x_PI.dtype, sizes, interpret)
    plan = (groups.expert_W, groups.used, *(() if groups.shared else (groups.rows_W,)))
    return _multiply(spec, *plan, padded(x_PI), w_EOI, *(() if bias_EO is None else (bias_EO,)))


def tile_rows(x: Array, groups: Groups, interpret: Any) -> Array:
    """The rows of all tiles, from these or from tokens; tokens stay where every tile holds them."""
    if groups.shared or x.shape[0] == groups.rows:
        return x
    return spread(x, groups, interpret)


def _multiply(spec: Spec, *arrays: Array) -> Array:
    """`arrays` are the tiles' experts, the number of those in use, their rows unless these are
    known, x, w and, where there is one, the bias."""
    stages = spec.tuning.stages
    warpgroups = spec.tuning.warpgroups
    blocks = min(PROCESSORS, spec.tiles * spec.across)

    def kernel(expert_ref, used_ref, *rest, **sm):  # type: ignore[no-untyped-def]
        rows_ref = rest[0]
        x_ref, w_ref, *bias_ref, y_ref = rest[spec.rows is None :]
        block = lax.axis_index("block")
        wg = lax.axis_index("wg")

        def own_units(run: Callable[[Unit, Array], None]) -> Array:
            return each_unit(spec, (expert_ref, used_ref, rows_ref), (block, blocks), run)

        @pl.when(wg == warpgroups)
        def _producer() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            done = own_units(lambda unit, done: _fill(spec, x_ref, w_ref, unit, done, sm))
            drain(sm["free"], done, stages)

        @pl.when(wg < warpgroups)
        def _consumer() -> None:
            plgpu.set_max_registers(registers_of(warpgroups), action="increase")
            own_units(lambda unit, done: consume(spec, unit, done, wg, sm, (*bias_ref, y_ref)))
            plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = f"grouped_matmul_{spec.tile}x{spec.O}x{spec.I}"  # for profiles
    return launch(
        kernel,
        arrays,
        spec.interpret,
        out_type=jax.ShapeDtypeStruct((spec.tiles * spec.tile, spec.F), spec.dtype),
        scratch_types=scratch_of(spec),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="wg",
    )


def scratch_of(spec: Spec) -> dict[str, Any]:
    """Shared memory of a kernel: the ring, results on their way out, and barriers."""
    warpgroups, stages, columns = spec.tuning
    return {
        "x": plgpu.SMEM((stages, spec.tile, columns), spec.dtype, transforms=TILED),
        "w": plgpu.SMEM((stages, 2 * spec.half, columns), spec.dtype, transforms=TILED),
        "y": plgpu.SMEM((warpgroups, spec.tile, ROWS), spec.dtype, transforms=TILED),
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    }


def each_unit(
    spec: Spec,
    plan: tuple[Any, Any, Any],
    place: tuple[Array, int],
    run: Callable[[Unit, Array], None],
) -> Array:
    """Call `run(unit, steps done before)` for each unit of a thread block; returns the steps done.

    `plan` are the tiles' experts, the number of those in use and their rows; `place` is the number
    of the thread block, and how many there are.
    """
    expert_ref, used_ref, rows_ref = plan
    block, blocks = place
    units = used_ref[used_ref.shape[0] - 1] * spec.across

    def body(i: Array, done: Array) -> Array:
        run(unit_at(spec, block + i * blocks, expert_ref, rows_ref), done)
        return done + spec.steps

    count = lax.div(units - block + (blocks - 1), jnp.int32(blocks))
    return lax.fori_loop(0, jnp.maximum(count, 0), body, jnp.int32(0))


def unit_at(spec: Spec, place: Array, expert_ref: Any, rows_ref: Any) -> Unit:
    """The unit of this number; units of a tile are neighbours."""
    tile = lax.div(place, jnp.int32(spec.across))
    column = lax.rem(place, jnp.int32(spec.across)) * spec.width
    row = pl.multiple_of(tile * spec.tile, 8)
    if spec.rows is None:
        rows = rows_ref[tile]
    else:
        rows = spec.rows
    return Unit(tile, expert_ref[tile], row, rows, column)


def row_of_x(row: Array, shared: bool) -> Array:
    """The first row of x of a tile that begins at `row`, or at 0 where all tiles share rows."""
    # Not a constant: the compiler would reject a slice that ends beyond the array
    if shared:
        return pl.multiple_of(row * 0, 8)
    return row


def at_width(widths: tuple[int, ...], rows: Array | int, run: Callable[[int], None]) -> None:
    """Call `run` with the least of the widths, ascending, that holds so many rows."""
    below = 0
    if isinstance(rows, int):
        return run(min(width for width in widths if width >= rows))
    for width in widths:
        pl.when(jnp.logical_and(rows > below, rows <= width))(lambda width=width: run(width))
        below = width
    return None


def _fill(spec: Spec, x_ref: Any, w_ref: Any, unit: Unit, done: Array, sm: dict[str, Any]) -> None:
    """Fill the ring with one unit's rows of the weight, and of x."""

    @pl.loop(0, spec.steps)
    def _(t):  # type: ignore[no-untyped-def]
        slot = take(sm["free"], done + t, spec.tuning.stages)
        copy_weight(spec, w_ref, unit, t, slot, sm)
        copy_tokens(spec, x_ref, unit, t, slot, sm)


def copy_weight(
    spec: Spec, w_ref: Any, unit: Unit, t: Array, slot: Array, sm: dict[str, Any]
) -> None:
    """Copy step t of a unit's rows of the weight into a slot."""
    for part in range(2):
        rows = pl.ds(pl.multiple_of(unit.column + part * spec.apart, 8), spec.half)
        plgpu.copy_gmem_to_smem(
            w_ref.at[unit.expert, rows, _columns(spec, t)],
            sm["w"].at[slot, pl.ds(part * spec.half, spec.half)],
            sm["full"].at[slot],
        )


def copy_tokens(
    spec: Spec, x_ref: Any, unit: Unit, t: Array, slot: Array, sm: dict[str, Any]
) -> None:
    """Copy step t of a unit's rows of x into a slot."""
    row = row_of_x(unit.row, spec.shared)

    def copy(width: int) -> None:
        x = x_ref.at[pl.ds(row, width), _columns(spec, t)]
        plgpu.copy_gmem_to_smem(x, sm["x"].at[slot, pl.ds(0, width)], sm["full"].at[slot])

    at_width(widths_of(spec.tile), unit.rows, copy)


def _columns(spec: Spec, t: Array) -> Any:
    columns = spec.tuning.columns
    return pl.ds(pl.multiple_of(t * columns, columns), columns)


def consume(
    spec: Spec, unit: Unit, done: Array, wg: Array, sm: dict[str, Any], refs: tuple[Any, ...]
) -> None:
    """Compute and write one warpgroup's share of a unit; `refs` are the bias, if any, and y."""

    def product(width: int) -> None:
        finish(spec, unit, list(_product(spec, width, done, wg, sm)), wg, sm, refs)

    at_width(widths_of(spec.tile), unit.rows, product)


def finish(
    spec: Spec, unit: Unit, both: list[Array], wg: Array, sm: dict[str, Any], refs: tuple[Any, ...]
) -> None:
    """Write both parts of a warpgroup's products, with their bias, gated; see `consume`."""
    *bias_ref, y_ref = refs
    column = pl.multiple_of(unit.column + wg * ROWS, ROWS)
    for ref in bias_ref:
        expert_bias = ref.at[unit.expert]
        both = [plus(expert_bias, y, column + part * spec.apart) for part, y in enumerate(both)]
    first, second = both
    store = lambda y, column: _store(spec, y, unit.row, column, sm["y"].at[wg], y_ref)
    if spec.gating is not None:
        store(in_kernels(spec.gating)(first, second), column)
    else:
        store(first, column)
        store(second, pl.multiple_of(column + spec.half, ROWS))


def _product(
    spec: Spec, width: int, done: Array, wg: Array, sm: dict[str, Any]
) -> tuple[Array, Array]:
    """Both parts of a warpgroup's rows of the weight times `width` tokens, `[ROWS, width]`. A slot
    is released one step late, while the next products run."""
    steps = spec.steps
    stages = jnp.int32(spec.tuning.stages)

    def multiply(first, second):  # type: ignore[no-untyped-def]
        @pl.loop(0, steps)
        def _(t):  # type: ignore[no-untyped-def]
            slot = lax.rem(done + t, stages)
            plgpu.barrier_wait(sm["full"].at[slot])
            x = sm["x"].at[slot, pl.ds(0, width)].T
            for part, acc in enumerate((first, second)):
                rows = pl.ds(part * spec.half + wg * ROWS, ROWS)
                plgpu.wgmma(acc, sm["w"].at[slot, rows], x)
            plgpu.wgmma_wait(2)
            pl.when(t > 0)(
                lambda: plgpu.barrier_arrive(sm["free"].at[lax.rem(done + t - 1, stages)])
            )

        return first[...], second[...]

    acc = plgpu.ACC((ROWS, width), jnp.float32)
    both = pl.run_scoped(multiply, acc, acc)
    plgpu.barrier_arrive(sm["free"].at[lax.rem(done + steps - 1, stages)])
    return both


def plus(bias: Any, y: Array, row: Array) -> Array:
    """`y` plus the bias of its rows, which begin at `row` of the weight. Rows beyond the weight are
    never stored; their bias is that of the last ones, as plain loads must stay within the array."""
    last = bias.shape[0] - ROWS
    rows = pl.ds(pl.multiple_of(jnp.minimum(row, last), ROWS), ROWS)
    row_bias = plgpu.load(bias.at[rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return y + lax.broadcast_in_dim(row_bias.astype(jnp.float32), y.shape, [0])


def _store(spec: Spec, y: Array, row: Array, column: Array, staged: Any, y_ref: Any) -> None:
    """Write `[ROWS, width]` of products as rows of tokens; columns beyond y are not there."""
    width = y.shape[1]

    @pl.when(column < spec.F)
    def _() -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tokens = staged.at[pl.ds(0, width)]
        tokens.T[...] = y.astype(spec.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tokens, y_ref.at[pl.ds(row, width), pl.ds(column, ROWS)])
