"""The gated activation of few tokens' products, rounded to 8-bit floats, in one launch on NVIDIA
Hopper: it adds up the shares of columns, too. XLA and the kernel that rounds take a launch each.

A team of eight warpgroups has a row, in registers. Each takes every eighth tile of it, and they
tell each other their largest magnitudes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_matmul.gating import Gating, computes, in_kernels
from pallas_kernels.mosaic_gpu import narrowed, store
from pallas_kernels.mosaic_team import LOADED, TEAM, Team, blocks_of
from pallas_kernels.parts import Parts, Product
from pallas_kernels.scaled_matmul.mosaic_rounding import NUMBERS, numbers_of, results, scale_of
from pallas_kernels.scaled_matmul.plan import FEW_ROWS
from pallas_kernels.scaled_matmul.rounding import RoundedRows, Rounding

# columns of a line; lines of a tile, one for each warp
LINE = 128
LINES = 4
TILE = LINES * LINE
MOST_TILES = 7 * TEAM
# A warp has a line, so that its largest number is found within the warp
LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((LINES, LINE), (LINE // 32,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)


class _Halves(NamedTuple):
    """A product `[T, 2F]`: its first `cut` columns are done, of the others there are shares."""

    done: Array | None
    shares: Array | None
    cut: int
    width: int  # F

    @classmethod
    def of(cls, product: Product) -> _Halves:
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
    halves = _Halves.of(product)
    return (
        0 < product.shape[0] <= FEW_ROWS
        and product.dtype in (jnp.bfloat16, jnp.float16)
        and not (isinstance(product, Parts) and product.scales)
        and jnp.dtype(rounding.dtype) == NUMBERS
        and 0 < halves.width <= MOST_TILES * TILE
        and halves.width % TILE == halves.cut % TILE == 0
        and (halves.cut == 0 or halves.cut >= halves.width)
    )


def gates(gating: Gating) -> bool:
    """Whether the kernel has the gating's functions."""
    return computes(gating)


def check(product: Product, rounding: Rounding, gating: Gating) -> None:
    """Raise ValueError for what `supports` does not allow, and for a gating that kernels have
    not."""
    if not supports(product, rounding) or not gates(gating):
        raise ValueError("mosaic_gating_few takes few rows in 16 bits without scales, and no erf")


def gated_rows(
    product: Product,
    rounding: Rounding,
    gating: Gating,
    *,
    blocks: int | None = None,
    interpret: Any = None,
) -> RoundedRows:
    """See `pallas_kernels.scaled_matmul`; for what `supports` allows. The `blocks` of a row change
    only speed.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    halves = _Halves.of(product)
    dtype = product.dtype
    T = product.shape[0]
    width = halves.width
    lines = halves.width // LINE
    team = Team(blocks or blocks_of(T, interpret))

    def gated_rows_kernel(*refs, most, met):  # type: ignore[no-untyped-def]
        *input_refs, numbers_ref, scale_ref = refs
        done_ref = input_refs[0]
        shares_ref = input_refs[-1]
        t = lax.axis_index("row")
        member = team.member()

        def half(line: Any, shared: bool) -> list[Array]:
            """A tile of gate or up, or its shares, from this line of the product on."""
            if not shared:
                return [_load(done_ref.at[t, _lines(line)])]
            share_lines = _lines(line - halves.cut // LINE)
            return [_load(shares_ref.at[s, t, share_lines]) for s in range(shares_ref.shape[0])]

        def rounded(y: Array) -> Array:
            return narrowed(y, dtype, LAYOUT, interpret).astype(jnp.float32)

        def activated(gate: list[Array], up: list[Array]) -> Array:
            x, by = (
                rounded(functools.reduce(jnp.add, [share.astype(jnp.float32) for share in part]))
                for part in (gate, up)
            )
            return rounded(in_kernels(gating)(x, by))

        team.begin(met, told=4 * LINES * TEAM)
        tiles = list(_tiles(halves, member))
        made: list[Array] = []
        for batch in _batches(halves, tiles, LOADED[team.blocks]):
            loaded = [
                (half(tile.line, halves.cut == 0), half(tile.line + lines, tile.shared))
                for tile in batch
            ]
            made += [activated(*both) for both in loaded]
        size = functools.reduce(jnp.maximum, [jnp.maximum(y, -y) for y in made])
        place = most.at[pl.ds(member * LINES, LINES)]
        team.ready()
        team.tell(place, jnp.max(size, axis=1), LAYOUT.reduce(1), met)
        team.done(met)
        team.wait(met)
        largest = functools.reduce(jnp.maximum, [most[i] for i in range(TEAM * LINES)])
        scale = scale_of(largest)
        for tile, y in zip(tiles, made, strict=True):
            numbers = numbers_of(y, scale)
            place = numbers_ref.at[t, _lines(tile.line)]
            pl.when(tile.is_stored)(lambda numbers=numbers, place=place: store(place, numbers))

        @pl.when(member == 0)
        def _() -> None:
            scale_ref.at[t][...] = scale

    rows, scales = results(width, rounding.rows)
    numbers, scale = team.launch(
        gated_rows_kernel,
        tuple(halves.arrays),
        T,
        interpret,
        out_type=(rows.update(shape=(rounding.rows, lines, LINE)), scales),
        scratch_types={"most": plgpu.SMEM((TEAM * LINES,), jnp.float32)},
    )
    return RoundedRows(numbers.reshape(rounding.rows, width), scale, T, dtype)


class _Tile(NamedTuple):
    """A tile of the result: its first line; whether up's numbers are yet to be added up; and
    whether the warpgroup that computes it is to store it."""

    line: Array
    shared: bool
    is_stored: Array


def _tiles(halves: _Halves, member: Array) -> Iterator[_Tile]:
    """Of a member of the team. All have as many, so some compute one of another's, and keep it."""
    ends = halves.up_done // TILE, halves.width // TILE
    for shared, (first, end) in enumerate(((0, ends[0]), ends)):
        for start in range(first, end, TEAM):
            place = start + member
            yield _Tile(jnp.minimum(place, end - 1) * LINES, bool(shared), place < end)


def _batches(halves: _Halves, tiles: list[_Tile], most: int) -> Iterator[list[_Tile]]:
    """Tiles whose numbers are loaded at once, into `most` registers."""
    batch: list[_Tile] = []
    room = most
    pair = LINES // 2
    shares = 0
    if halves.shares is not None:
        shares = LINES * len(halves.shares)
    if halves.cut:
        gate = pair
    else:
        gate = shares
    for tile in tiles:
        needs = gate + (shares if tile.shared else pair)
        if batch and needs > room:
            yield batch
            batch = []
            room = most
        batch.append(tile)
        room -= needs
    yield batch


def _lines(first: Any) -> Any:
    return pl.ds(pl.multiple_of(first, LINES), LINES)


def _load(ref: Any) -> Array:
    return plgpu.load(ref, layout=LAYOUT, optimized=False)
