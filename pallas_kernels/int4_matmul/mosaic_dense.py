"""A 4-bit weight in a 16-bit type for NVIDIA Hopper, at the speed of the memory that it is written
to: products with very many tokens then are those of any weight.

Each warpgroup converts tiles of 64 rows x 128 columns by itself, with a ring of copies in and two
tiles on their way out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_matmul.mosaic_operand import Place, Spec, Words, operand
from pallas_kernels.int4_matmul.mosaic_operand import check as check
from pallas_kernels.int4_matmul.packed import CHUNK, ROWS, SLOT, Int4
from pallas_kernels.int4_matmul.plan import Tuning, is_dense
from pallas_kernels.mosaic_gpu import TILED, launch
from pallas_kernels.mosaic_units import PROCESSORS
from pallas_kernels.target import Target

WARPGROUPS = 4
SLOTS = 4  # of a warpgroup's ring
BUFFERS = 2  # tiles that are written


def prefers(target: Target, x_TI: Array, w: Int4) -> bool:
    """For very many rows, see `is_dense`."""
    return is_dense(x_TI.shape[0])


def dense(w: Int4, x_TI: Array, *, most: int = PROCESSORS, interpret: Any = None) -> Array:
    """The weight `[O, I]` in the type of its scales, rounded once, for a product with x.

    It is made once x is there, so that memory holds few at a time; by `most` thread blocks.
    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    O = w.words.shape[0] * ROWS
    I = w.words.shape[1] * CHUNK
    sizes = Tuning(8, WARPGROUPS, SLOT, SLOTS, 1)
    words = Words(w.group, w.form)
    spec = Spec(8, O, I, words, w.scales.dtype, sizes, interpret)
    arrays = [part for part in (w.words, w.scales, w.zeros, w.offsets) if part is not None]
    across = I // SLOT
    tiles = w.words.shape[0] * across
    blocks = min(most, -(-tiles // WARPGROUPS))

    def kernel(_x_ref, *refs, **sm):  # type: ignore[no-untyped-def]
        wg = lax.axis_index("wg")
        first = lax.axis_index("block") * WARPGROUPS + wg
        stride = blocks * WARPGROUPS
        count = lax.div(tiles - 1 - first + stride, jnp.int32(stride))
        _convert_all(spec, refs[:-1], refs[-1], _Share(first, stride, count, across), wg, sm)

    kernel.__name__ = f"int4_dense_{O}x{I}"  # for profiles
    whole = launch(
        kernel,
        (x_TI, *arrays),
        interpret,
        out_type=jax.ShapeDtypeStruct((O, I), spec.dtype),
        scratch_types=_scratch(spec, words),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="wg",
    )
    return whole[: w.rows, : x_TI.shape[1]]


class _Share(NamedTuple):
    """A warpgroup's tiles: the first, how far apart they are, how many, and how many of all lie
    side by side."""

    first: Array
    stride: int
    count: Array
    across: int

    def place(self, i: Array) -> tuple[Array, Array]:
        """The block of rows and of columns of a tile."""
        tile = self.first + i * self.stride
        return lax.div(tile, jnp.int32(self.across)), lax.rem(tile, jnp.int32(self.across))


def _convert_all(
    spec: Spec,
    refs: tuple[Any, ...],
    made: Any,
    share: _Share,
    wg: Array,
    sm: dict[str, Any],
) -> None:
    """Convert a warpgroup's tiles, while the next ones arrive and the last ones are written."""
    slots = jnp.int32(SLOTS)
    words = spec.numbers
    assert isinstance(words, Words)

    def fetch(i: Array) -> None:
        pl.when(i < share.count)(
            lambda: _fetch(words, refs, share.place(i), lax.rem(i, slots), wg, sm)
        )

    for i in range(SLOTS):
        fetch(jnp.int32(i))

    @pl.loop(0, share.count)
    def _(i):  # type: ignore[no-untyped-def]
        slot = lax.rem(i, slots)
        plgpu.barrier_wait(sm["full"].at[wg * SLOTS + slot])
        plgpu.wait_smem_to_gmem(BUFFERS - 1, wait_read_only=True)
        staged = sm["y"].at[wg, lax.rem(i, jnp.int32(BUFFERS))]
        _convert(spec, words, Place(slot, wg, 0), staged, sm)
        plgpu.commit_smem()  # all threads have read the slot, too
        row, column = share.place(i)
        rows = pl.ds(row * ROWS, ROWS)
        columns = pl.ds(column * SLOT, SLOT)
        plgpu.copy_smem_to_gmem(staged, made.at[rows, columns])
        fetch(i + SLOTS)

    plgpu.wait_smem_to_gmem(0)


def _scratch(spec: Spec, words: Words) -> dict[str, Any]:
    """As the product has it, with a ring for each warpgroup and without tokens."""
    scratch = words.scratch(spec) | {
        "y": plgpu.SMEM((WARPGROUPS, BUFFERS, ROWS, SLOT), spec.dtype, transforms=TILED),
        "full": plgpu.Barrier(num_arrivals=words.copies, num_barriers=WARPGROUPS * SLOTS),
    }
    if spec.interpret is not None:
        scratch["a"] = plgpu.SMEM((WARPGROUPS, ROWS, spec.operand), spec.dtype, transforms=TILED)
    return scratch


def _fetch(
    numbers: Words,
    refs: tuple[Any, ...],
    place: tuple[Array, Array],
    slot: Array,
    wg: Array,
    sm: dict[str, Any],
) -> None:
    """Copy a tile's words, scales, zero points or offsets."""
    row, column = place
    words, *values = refs
    full = sm["full"].at[wg * SLOTS + slot]
    chunks = SLOT // CHUNK
    ready = sm["w"].at[slot, wg]
    plgpu.copy_gmem_to_smem(words.at[row, pl.ds(column * chunks, chunks)], ready, full)
    groups = pl.ds(lax.div(column * SLOT, jnp.int32(numbers.group)), numbers.groups(SLOT))
    for name, part in zip(("scales", "others"), values, strict=False):
        plgpu.copy_gmem_to_smem(part.at[row, groups], sm[name].at[slot, wg], full)


def _convert(spec: Spec, words: Words, place: Place, staged: Any, sm: dict[str, Any]) -> None:
    excess = words.excess(spec.dtype)
    for first in range(0, SLOT, spec.operand):
        weights = operand(spec, words, place._replace(column=first), sm)
        if spec.interpret is not None:
            weights = weights[...]
        if excess != 1:
            weights = weights * jnp.asarray(excess, spec.dtype)
        staged[:, pl.ds(first, spec.operand)] = weights
