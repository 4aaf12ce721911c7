"""The gated activation of a product, rounded to 8-bit floats for the product that follows, in one
launch on NVIDIA Hopper, for rows of as many columns as a processor's registers have scales for.

A processor has one thread block, which takes rows one after the other. They are copied into a ring
in shared memory while those before them are computed with. All warpgroups of the block work on a
row and tell each other their largest magnitudes. They keep the scales of columns in registers from
row to row: read again for each, these would be twice its bytes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_matmul.gating import Gating, in_kernels
from pallas_kernels.mosaic_gpu import launch, narrowed, store
from pallas_kernels.mosaic_units import PROCESSORS
from pallas_kernels.parts import Parts
from pallas_kernels.scaled_matmul.mosaic_gating_few import LAYOUT, LINE, LINES, TILE
from pallas_kernels.scaled_matmul.mosaic_rounding import numbers_of, results, scale_of
from pallas_kernels.scaled_matmul.rounding import RoundedRows, Rounding

MOST_SLOTS = 2  # which shared memory holds of the widest rows, too
# Tiles of a warpgroup whose scales and results its registers hold, by the warpgroups of a block
HELD = {4: 8, 3: 13, 2: 20}


def takes(product: Parts) -> bool:
    """Whether the kernel takes this product, one that `mosaic_gating` supports."""
    tiles, rest = divmod(product.shape[1] // 2, TILE)
    return (
        product.sums.dtype == product.dtype
        and rest == 0
        and tiles <= max(groups * held for groups, held in HELD.items())
    )


@dataclass(frozen=True)
class _Spec:
    """Static parameters of a compiled kernel: rows, columns of the result, its type before it is
    rounded, and a `plgpu.InterpretGPUParams` or None on a card."""

    T: int
    F: int
    dtype: Any
    gating: Gating
    interpret: Any

    @property
    def lines(self) -> int:
        return self.F // LINE

    @property
    def tiles(self) -> int:
        return self.F // TILE

    @property
    def groups(self) -> int:
        """Warpgroups of a block."""
        return next(n for n, held in HELD.items() if -(-self.tiles // n) <= held)

    @property
    def blocks(self) -> int:
        return min(self.T, PROCESSORS)

    @property
    def slots(self) -> int:
        """Rows of the ring."""
        return min(MOST_SLOTS, -(-self.T // self.blocks))


class _Place(NamedTuple):
    """A tile's first line: `start`, which is at most `most`, and `fixed` lines on. Places at fixed
    distances are one register."""

    start: Array
    most: int
    fixed: int

    def of(self, ref: Any, down: int) -> Any:
        """The tile that lies here, or `down` lines on."""
        rest = ref.at[pl.ds(pl.multiple_of(self.start, LINES), ref.shape[0] - self.most)]
        return rest.at[pl.ds(down + self.fixed, LINES)]


class _Tile(NamedTuple):
    """A tile of every row: its place, the scales of its columns for gate and up, and whether it is
    this warpgroup's to store."""

    place: _Place
    scales: tuple[Array, Array]
    is_stored: Array | bool


def gated_rows(
    product: Parts, rounding: Rounding, gating: Gating, *, interpret: Any = None
) -> RoundedRows:
    """See `pallas_kernels.scaled_matmul`; for what `takes` allows.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    T = product.shape[0]
    F = product.shape[1] // 2
    dtype = product.dtype
    spec = _Spec(T, F, dtype, in_kernels(gating), interpret)
    columns = (2 * spec.lines, LINE)
    rows = results(F, rounding.rows)
    numbers, scale = launch(
        functools.partial(_kernel, spec),
        (product.sums.reshape(T, *columns), product.scales[0], product.scales[1].reshape(columns)),
        interpret,
        out_type=(rows[0].update(shape=(rounding.rows, spec.lines, LINE)), rows[1]),
        scratch_types={
            "ring": plgpu.SMEM((spec.slots, *columns), dtype),
            "most": plgpu.SMEM((2, spec.groups * LINES), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=spec.slots),
            "met": plgpu.Barrier(num_arrivals=spec.groups),
        },
        grid=(spec.blocks,),
        grid_names=("block",),
        num_threads=spec.groups,
        thread_name="wg",
        # What others have stored is read after a barrier of the block alone
        compiler={"unsafe_no_auto_barriers": True},
    )
    return RoundedRows(numbers.reshape(rounding.rows, F), scale, T, dtype)


def _kernel(spec: _Spec, *refs: Any, **sm: Any) -> None:
    y_ref, rows_ref, columns_ref, numbers_ref, scale_ref = refs
    ring, most, full, met = (sm[name] for name in ("ring", "most", "full", "met"))
    block = lax.axis_index("block")
    wg = lax.axis_index("wg")
    count = lax.div(spec.T - 1 - block, jnp.int32(spec.blocks)) + 1

    def copy(i: Any) -> None:
        slot = lax.rem(i, jnp.int32(spec.slots))
        for half in (pl.ds(0, spec.lines), pl.ds(spec.lines, spec.lines)):
            plgpu.copy_gmem_to_smem(
                y_ref.at[block + i * spec.blocks, half], ring.at[slot, half], full.at[slot]
            )

    first = jnp.minimum(count, spec.slots)
    pl.when(wg == 0)(lambda: pl.loop(0, first)(copy))
    tiles = _tiles(spec, wg, columns_ref)

    def round_row(i: Array, by_row: Array) -> Array:
        t = block + i * spec.blocks
        slot = lax.rem(i, jnp.int32(spec.slots))
        following = rows_ref[jnp.minimum(t + spec.blocks, spec.T - 1)]
        told = most.at[lax.rem(i, jnp.int32(2))]
        plgpu.barrier_wait(full.at[slot])
        made = [_activated(spec, ring.at[slot], by_row, tile) for tile in tiles]
        size = functools.reduce(jnp.maximum, [jnp.abs(y.astype(jnp.float32)) for y in made])
        store(told.at[pl.ds(wg * LINES, LINES)], jnp.max(size, axis=1))
        plgpu.commit_smem()  # the row is read, before the next copy into the slot
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)
        pl.when((wg == 0) & (i + spec.slots < count))(lambda: copy(i + spec.slots))
        places = range(spec.groups * LINES)
        scale = scale_of(functools.reduce(jnp.maximum, [told[place] for place in places]))
        for tile, y in zip(tiles, made, strict=True):
            _put_down(numbers_ref.at[t], tile, numbers_of(y.astype(jnp.float32), scale))

        @pl.when(wg == 0)
        def _() -> None:
            scale_ref.at[t][...] = scale

        return following

    lax.fori_loop(0, count, round_row, rows_ref[block])


def _tiles(spec: _Spec, wg: Array, columns_ref: Any) -> list[_Tile]:
    """Of a warpgroup. All have as many, so some compute one of another's, and keep it."""
    tiles = []
    for start in range(0, spec.tiles, spec.groups):
        others = min(spec.groups, spec.tiles - start) - 1
        place = _Place(jnp.minimum(wg, others) * LINES, others * LINES, start * LINES)
        gate, up = (_load(place.of(columns_ref, down)) for down in (0, spec.lines))
        tiles.append(_Tile(place, (gate, up), True if others + 1 == spec.groups else wg <= others))
    return tiles


def _activated(spec: _Spec, row: Any, by_row: Array, tile: _Tile) -> Array:
    """A tile of the row in a slot of the ring, whose scale is `by_row`."""
    narrow = functools.partial(narrowed, dtype=spec.dtype, layout=LAYOUT, interpret=spec.interpret)
    gate, up = (
        narrow(_load(tile.place.of(row, down)).astype(jnp.float32) * by_row * by)
        for down, by in zip((0, spec.lines), tile.scales, strict=True)
    )
    return narrow(spec.gating(gate.astype(jnp.float32), up.astype(jnp.float32)))


def _put_down(row: Any, tile: _Tile, numbers: Array) -> None:
    def put_down() -> None:
        store(tile.place.of(row, 0), numbers)

    put_down() if tile.is_stored is True else pl.when(tile.is_stored)(put_down)


def _load(ref: Any) -> Array:
    return plgpu.load(ref, layout=LAYOUT, optimized=False)
