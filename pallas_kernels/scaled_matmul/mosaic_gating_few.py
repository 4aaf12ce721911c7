"""The gated activation of few tokens' products, rounded to 8-bit floats, in one launch on NVIDIA
Hopper: it adds up the shares of columns, too. XLA and the kernel that rounds take a launch each.

A thread block has a row, in registers. Each warpgroup takes every eighth tile of it, and they tell
each other their largest magnitudes through shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import launch, store
from pallas_kernels.parts import Parts, Product
from pallas_kernels.scaled_matmul.mosaic_rounding import NUMBERS, numbers_of, results, scale_of
from pallas_kernels.scaled_matmul.plan import FEW_ROWS
from pallas_kernels.scaled_matmul.rounding import RoundedRows, Rounding

LINE, LINES = 128, 4  # columns of a line; lines of a tile, one for each warp
TILE = LINES * LINE
WARPGROUPS = 8
MOST_TILES = 56  # seven for each warpgroup
LOADED = 48  # registers of a thread, of 64, that are filled before the first is used
# A warp has a line, so that its largest number is found within the warp
LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((LINES, LINE), (LINE // 32,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)


class _Given(NamedTuple):
    """A product `[T, 2F]`: its first `cut` columns are done, of the others there are shares."""

    done: Array | None
    shares: Array | None
    cut: int
    width: int  # F

    @classmethod
    def of(cls, product: Product) -> _Given:
        width = product.shape[1] // 2
        if isinstance(product, Parts):
            return cls(product.done, product.sums, product.cut, width)
        assert isinstance(product, Array)
        return cls(product, None, 2 * width, width)

    @property
    def arrays(self) -> list[Array]:
        """In lines."""
        return [
            x.reshape(*x.shape[:-1], x.shape[-1] // LINE, LINE)
            for x in (self.done, self.shares)
            if x is not None
        ]

    @property
    def up_done(self) -> int:
        """Columns of up that are done."""
        return max(0, self.cut - self.width)


def supports(product: Product, rounding: Rounding) -> bool:
    """Whether the kernel takes this product, and rounds as asked."""
    if not isinstance(product, Parts | Array) or len(product.shape) != 2 or product.shape[1] % 2:
        return False
    given = _Given.of(product)
    return (
        0 < product.shape[0] <= FEW_ROWS
        and product.dtype in (jnp.bfloat16, jnp.float16)
        and not (isinstance(product, Parts) and product.scales)
        and jnp.dtype(rounding.dtype) == NUMBERS
        and 0 < given.width <= MOST_TILES * TILE
        and given.width % TILE == given.cut % TILE == 0
        and (given.cut == 0 or given.cut >= given.width)
    )


def gated_rows(product: Product, rounding: Rounding, *, interpret: Any = None) -> RoundedRows:
    """See `pallas_kernels.scaled_matmul`; for what `supports` allows.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    given, dtype, T = _Given.of(product), product.dtype, product.shape[0]
    width, lines = given.width, given.width // LINE

    def gated_rows_kernel(*refs, most, met):  # type: ignore[no-untyped-def]
        *given_refs, numbers_ref, scale_ref = refs
        done_ref, shares_ref = given_refs[0], given_refs[-1]
        t, wg = lax.axis_index("row"), lax.axis_index("wg")

        def half(line: Any, shared: bool) -> list[Array]:
            """A tile of gate or up, or its shares, from this line of the product on."""
            if not shared:
                return [_load(done_ref.at[t, _lines(line)])]
            own = _lines(line - given.cut // LINE)
            return [_load(shares_ref.at[s, t, own]) for s in range(shares_ref.shape[0])]

        def activated(gate: list[Array], up: list[Array]) -> Array:
            x, by = (
                functools.reduce(jnp.add, [each.astype(jnp.float32) for each in part])
                .astype(dtype)
                .astype(jnp.float32)
                for part in (gate, up)
            )
            return (x / (1 + jnp.exp(-x)) * by).astype(dtype).astype(jnp.float32)

        tiles = list(_tiles(given, wg))
        made: list[Array] = []
        for some in _batches(given, tiles):
            loaded = [
                (half(tile.line, given.cut == 0), half(tile.line + lines, tile.shared))
                for tile in some
            ]
            made += [activated(*both) for both in loaded]
        size = functools.reduce(jnp.maximum, [jnp.maximum(y, -y) for y in made])
        store(most.at[pl.ds(wg * LINES, LINES)], jnp.max(size, axis=1))
        plgpu.commit_smem()
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)
        largest = functools.reduce(jnp.maximum, [most[i] for i in range(WARPGROUPS * LINES)])
        scale = scale_of(largest)
        for tile, y in zip(tiles, made, strict=True):
            numbers, place = numbers_of(y, scale), numbers_ref.at[t, _lines(tile.line)]
            pl.when(tile.own)(lambda numbers=numbers, place=place: store(place, numbers))

        @pl.when(wg == 0)
        def _() -> None:
            scale_ref.at[t][...] = scale

    rows, scales = results(width, rounding.rows)
    numbers, scale = launch(
        gated_rows_kernel,
        tuple(given.arrays),
        interpret,
        out_type=(rows.update(shape=(rounding.rows, lines, LINE)), scales),
        scratch_types={
            "most": plgpu.SMEM((WARPGROUPS * LINES,), jnp.float32),
            "met": plgpu.Barrier(num_arrivals=WARPGROUPS),
        },
        grid=(T,),
        grid_names=("row",),
        num_threads=WARPGROUPS,
        thread_name="wg",
        # A thread reads what others have stored after the barrier alone
        compiler={"unsafe_no_auto_barriers": True},
    )
    return RoundedRows(numbers.reshape(rounding.rows, width), scale, T, dtype)


class _Tile(NamedTuple):
    """A tile of the result: its first line; whether up's numbers are yet to be added up; and
    whether the warpgroup that computes it is to store it."""

    line: Array
    shared: bool
    own: Array


def _tiles(given: _Given, wg: Array) -> Iterator[_Tile]:
    """Of a warpgroup. All have as many, so some compute one of another's, and keep it."""
    ends = given.up_done // TILE, given.width // TILE
    for shared, (first, end) in enumerate(((0, ends[0]), ends)):
        for start in range(first, end, WARPGROUPS):
            place = start + wg
            yield _Tile(jnp.minimum(place, end - 1) * LINES, bool(shared), place < end)


def _batches(given: _Given, tiles: list[_Tile]) -> Iterator[list[_Tile]]:
    """Tiles whose numbers are loaded at once."""
    batch: list[_Tile] = []
    room, pair = LOADED, LINES // 2
    shares = 0 if given.shares is None else LINES * len(given.shares)
    gate = pair if given.cut else shares
    for tile in tiles:
        needs = gate + (shares if tile.shared else pair)
        if batch and needs > room:
            yield batch
            batch, room = [], LOADED
        batch.append(tile)
        room -= needs
    yield batch


def _lines(first: Any) -> Any:
    return pl.ds(pl.multiple_of(first, LINES), LINES)


def _load(ref: Any) -> Array:
    return plgpu.load(ref, layout=LAYOUT, optimized=False)
