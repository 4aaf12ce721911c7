"""Rows of tokens as 8-bit floats with a scale each, in one launch on NVIDIA Hopper. XLA takes
three: the largest magnitudes, the scales, and the numbers.

One warpgroup has a row in registers, so it is read once. Several cannot share one: the memory in
which Mosaic's reductions exchange what warps hold is the block's, and the others' would be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import THREADS, launch, row_layout, store
from pallas_kernels.scaled_matmul.rounding import Inputs, RoundedRows, largest

NUMBERS = jnp.float8_e4m3fn
MAX_COLUMNS = 224 * THREADS


def takes(x_TI: Inputs, dtype: Any) -> bool:
    """Whether the kernel takes these rows."""
    return (
        not isinstance(x_TI, RoundedRows)
        and x_TI.dtype in (jnp.bfloat16, jnp.float16)
        and dtype == NUMBERS
        and x_TI.shape[0] >= 1
        and x_TI.shape[1] % THREADS == 0
        and x_TI.shape[1] <= MAX_COLUMNS
    )


def rounded_rows(
    x_TI: Array,
    room: int | None = None,
    *,
    places_TK: Array | None = None,
    taken: tuple[Array, int] | None = None,
    interpret: Any = None,
) -> RoundedRows:
    """Rows of NUMBERS, see `scaled_matmul.rounding`, in arrays of `room` rows, by default T.

    `x_TI` is one that `takes` allows. With `places_TK` row t of x becomes these rows. `taken` are
    the rows of each tile that matter, and the height of tiles. `interpret` is a
    `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    T, I = x_TI.shape
    if places_TK is not None:
        plan = places_TK
    elif taken is not None:
        plan = taken[0]
    else:
        plan = None
    choices = 1
    if places_TK is not None:
        choices = places_TK.shape[1]

    def rounded_rows_kernel(x_ref, *refs):  # type: ignore[no-untyped-def]
        *plan_ref, numbers_ref, scale_ref = refs
        t = lax.axis_index("row")
        if taken is None:
            return rounded_row(t, x_ref, plan_ref, numbers_ref, scale_ref)
        tile = jnp.int32(taken[1])
        is_taken = lax.rem(t, tile) < plan_ref[0][lax.div(t, tile)]
        return pl.when(is_taken)(lambda: rounded_row(t, x_ref, (), numbers_ref, scale_ref))

    def rounded_row(t, x_ref, place_ref, numbers_ref, scale_ref):  # type: ignore[no-untyped-def]
        x = plgpu.load(x_ref.at[t], layout=row_layout(I), optimized=False)
        rows = [place_ref[0][t, k] if place_ref else t for k in range(choices)]
        store_rounded(x, rows, numbers_ref, scale_ref)

    numbers, scale = launch(
        rounded_rows_kernel,
        (x_TI,) if plan is None else (x_TI, plan),
        interpret,
        out_type=results(I, room or T),
        grid=(T,),
        grid_names=("row",),
    )
    return RoundedRows(numbers, scale, T, x_TI.dtype)


def results(width: int, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What `store_rounded` fills: numbers and scales of so many rows."""
    return (
        jax.ShapeDtypeStruct((rows, width), NUMBERS),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
    )


def store_rounded(x: Array, rows: Sequence[Array], numbers_ref: Any, scale_ref: Any) -> None:
    """Round a row, which the warpgroup holds in registers in `row_layout`, into these rows."""
    x = x.astype(jnp.float32)
    scale = scale_of(jnp.max(jnp.maximum(x, -x)))
    numbers = numbers_of(x, scale)
    for row in rows:
        store(numbers_ref.at[row], numbers)
        scale_ref.at[row][...] = scale


def scale_of(most: Array) -> Array:
    """The scale of numbers whose largest magnitude this is."""
    return jnp.where(most == 0, 1.0, most * (1 / largest(NUMBERS)))


def numbers_of(x: Array, scale: Array) -> Array:
    """x by its scale, yet to be rounded. The largest may be a bit beyond the type's range, which
    rounds to its end; Hopper's conversion puts there whatever is beyond."""
    return x * (1 / scale)
