"""Products of tokens with a weight whose rows are the 64-row operand of Hopper's tensor cores: how
thread blocks share the work, and how they write their sums.

A unit is a block of the weight's rows times a tile of tokens, over all columns or a share of them.
Where blocks of rows do not fill the card, columns are shared out: the sums of shares are written in
float32 and added in order by whoever reads the product (`parts.py`), so results repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_units
from pallas_kernels.mosaic_gpu import TILED, banded, store
from pallas_kernels.mosaic_units import BAND_GROUP, ROWS, STAGED
from pallas_kernels.mosaic_units.joined_shares import Segment, fewer_segments_of, segments_of
from pallas_kernels.parts import Parts, Product

# The layout of a product with single numbers, which a transposed store needs
SINGLE = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,))),
    warp_dims=(-8,),
    lane_dims=(-4, -3),
    vector_dim=-1,
)


class Unit(NamedTuple):
    """What a thread block computes next: its block of rows, its first token, its share of the
    columns, and the slots of that."""

    block: Array
    token: Array
    share: Array
    first: Array
    steps: Array


class Split(NamedTuple):
    """A product in units.

    Attributes:
      T: tokens, in whole tiles of 8 where there are more.
      O: rows of the weight.
      dtype: of the product. One of float32 is written from registers, as shares are.
      steps: slots of a ring that cover the columns.
      warpgroups: that multiply, each 64 rows of the weight.
      tokens: of a unit.
      shares: parts of the columns whose products are added afterwards.
      joined: two tiles of tokens share columns out together, see `joined_shares`.
    """

    T: int
    O: int
    dtype: Any
    steps: int
    warpgroups: int
    tokens: int
    shares: int
    joined: bool = False

    @property
    def height(self) -> int:
        """Rows of the weight in a block."""
        return self.warpgroups * ROWS

    @property
    def down(self) -> int:
        """Blocks of rows."""
        return -(-self.O // self.height)

    @property
    def bands(self) -> int:
        """Tiles of tokens."""
        return -(-self.T // self.tokens)

    @property
    def whole(self) -> int:
        """Blocks of rows whose columns are not shared out: as many as fill the card."""
        if self.shares == 1:
            return self.down
        processors = mosaic_units.PROCESSORS
        if self.bands == 1:
            return self.down // processors * processors
        return 0

    @property
    def places(self) -> int:
        """Units of a tile of tokens."""
        return self.whole + (self.down - self.whole) * self.shares

    @property
    def units(self) -> int:
        return self.places * self.bands

    @property
    def blocks(self) -> int:
        """Thread blocks."""
        if self.joined:
            return min(mosaic_units.PROCESSORS, self.down * (2 * self.shares - 1))
        return min(mosaic_units.PROCESSORS, self.units)

    @property
    def is_exact(self) -> bool:
        """Whether sums are not rounded."""
        return bool(jnp.dtype(self.dtype) == jnp.float32)

    @property
    def results(self) -> list[jax.ShapeDtypeStruct]:
        """The products of whole blocks of rows, then the sums of the shares of the other blocks;
        either is left out where there are no such blocks."""
        width = self.bands * self.tokens
        arrays = []
        if self.whole:
            # Copies end with the array; what registers hold is stored in full
            tokens = self.T
            if self.is_exact:
                tokens = width
            arrays.append(jax.ShapeDtypeStruct((tokens, self.O), self.dtype))
        rest = (self.down - self.whole) * self.height
        if rest:
            arrays.append(jax.ShapeDtypeStruct((self.shares, width, rest), jnp.float32))
        return arrays

    @property
    def staged(self) -> dict[str, Any]:
        """Shared memory for results of whole blocks, where they are rounded."""
        if not self.whole or self.is_exact:
            return {}
        shape = (self.warpgroups, min(self.tokens, STAGED), ROWS)
        return {"y": plgpu.SMEM(shape, self.dtype, transforms=TILED)}

    def unit(self, index: Array) -> Unit:
        """Units of the same rows and columns are neighbours, so that they share the weight in the
        L2 cache; `BAND_GROUP` tiles of tokens at a time, so that those stay in it too."""
        shares = jnp.int32(self.shares)
        place, band = self._place(index)
        beyond = jnp.maximum(place - self.whole, 0)
        block = jnp.minimum(place, self.whole) + lax.div(beyond, shares)
        share = lax.rem(beyond, shares)
        is_whole = place < self.whole
        first = jnp.where(is_whole, 0, lax.div(share * self.steps, shares))
        last = jnp.where(is_whole, self.steps, lax.div((share + 1) * self.steps, shares))
        token = pl.multiple_of(band * self.tokens, 8)
        return Unit(block, token, share, first, last - first)

    def _place(self, index: Array) -> tuple[Array, Array]:
        """The number of a unit among those of its tile of tokens, and that tile."""
        if self.bands <= BAND_GROUP:
            return lax.div(index, jnp.int32(self.bands)), lax.rem(index, jnp.int32(self.bands))
        return banded(index, self.places, self.bands, BAND_GROUP)

    def each(self, block: Array, run: Callable[[Unit, Array], None]) -> Array:
        """Call `run(unit, steps done before)` for each unit of a thread block; returns the steps
        done."""
        if self.joined:
            return self._each_joined(block, run)

        def body(i: Array, done: Array) -> Array:
            unit = self.unit(block + i * self.blocks)
            run(unit, done)
            return done + unit.steps

        count = lax.div(self.units - 1 - block, jnp.int32(self.blocks)) + 1
        return lax.fori_loop(0, count, body, jnp.int32(0))

    def _each_joined(self, block: Array, run: Callable[[Unit, Array], None]) -> Array:
        """The same where two tiles of tokens share columns out together."""
        sharers = 2 * self.shares - 1
        block_segments = segments_of(self.steps, self.shares)
        if self.blocks < self.down * sharers:
            block_segments += fewer_segments_of(self.steps, self.shares)
        place = lax.div(block, jnp.int32(sharers))
        index = block - place * sharers
        if len(block_segments) > sharers:
            index = jnp.where(place == self.down - 1, index + sharers, index)

        def picked(of: Callable[[list[Segment]], int]) -> Array:
            numbers = [of(segments) for segments in block_segments]
            chosen = jnp.int32(numbers[0])
            for i, number in enumerate(numbers[1:], 1):
                chosen = jnp.where(index == i, number, chosen)
            return chosen

        def body(k: Array, done: Array) -> Array:
            def field(name: str) -> Array:
                first = picked(lambda segments: getattr(segments[0], name))
                return jnp.where(
                    k == 0, first, picked(lambda segments: getattr(segments[-1], name))
                )

            token = pl.multiple_of(field("band") * self.tokens, 8)
            unit = Unit(place, token, field("share"), field("first"), field("steps"))
            run(unit, done)
            return done + unit.steps

        return lax.fori_loop(0, picked(len), body, jnp.int32(0))

    def row(self, unit: Unit, wg: Array) -> Array:
        """The first row of a warpgroup."""
        return pl.multiple_of(unit.block * self.height + wg * ROWS, ROWS)

    def store(
        self, y: Array, unit: Unit, wg: Array, sm: dict[str, Any], made: Any, interpret: Any
    ) -> None:
        """Write `[ROWS, tokens]` of products as rows of tokens, or as a share that is added later;
        `made` are the `results`."""
        row = self.row(unit, wg)
        tokens = pl.ds(unit.token, self.tokens)

        def from_registers(ref: Any) -> None:
            store(ref.T, y if interpret else _single(y))

        if self.whole:

            @pl.when(jnp.logical_and(unit.block < self.whole, row < self.O))
            def _() -> None:
                if self.is_exact:
                    from_registers(made[0].at[tokens, pl.ds(row, ROWS)])
                else:
                    self._store_whole(y, unit, row, sm["y"].at[wg], made[0])

        if self.whole < self.down:
            shared_rows = pl.ds(row - self.whole * self.height, ROWS)
            pl.when(unit.block >= self.whole)(
                lambda: from_registers(made[-1].at[unit.share, tokens, shared_rows])
            )

    def _store_whole(self, y: Array, unit: Unit, row: Array, staged: Any, y_ref: Any) -> None:
        """Write the products of some tokens after the other through shared memory."""
        width = y.shape[1]
        for first in range(0, width, STAGED):
            count = min(width - first, STAGED)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            slab = staged.at[pl.ds(0, count)]
            slab.T[...] = y[:, first : first + count].astype(self.dtype)
            plgpu.commit_smem()
            tokens = pl.ds(pl.multiple_of(unit.token + first, 8), count)
            plgpu.copy_smem_to_gmem(slab, y_ref.at[tokens, pl.ds(row, ROWS)])

    def parts(self, results: list[Array], T: int, O: int) -> Product:
        """The product `[T, O]` of the `results`, of which shares of columns are left apart."""
        if self.whole == self.down:
            return results[0][:T, :O]
        done = None
        if self.whole:
            done = results[0]
        cut = self.whole * self.height
        return Parts(results[-1], (), (T, O), self.dtype, done, cut)


def _single(y: Array) -> Array:
    """y with its pairs of numbers as single ones; each lane keeps its own."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(y.shape, jnp.float32, layout=SINGLE),
    )
    def apart(_: Any, y: Any) -> Any:
        layout = SINGLE.to_mgpu()
        i32, i64 = (mgpu.utils.dtype_to_ir_type(np.dtype(name)) for name in ("int32", "int64"))
        register_type = layout.registers_element_type(mgpu.utils.dtype_to_ir_type(jnp.float32))
        both = [
            mgpu.utils.inline_ptx(
                "mov.b64 {$0, $1}, $2;", mgpu.utils.bitcast(pair, i64), result_types=[i32] * 2
            )
            for pair in y.registers.flat
        ]
        singles = [mgpu.utils.bitcast(x, register_type) for pair in both for x in pair]
        registers = np.array(singles, dtype=object).reshape(layout.registers_shape(y.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return apart(y)
