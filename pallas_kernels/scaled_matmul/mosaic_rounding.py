"""Rows of tokens as 8-bit floats with a scale each, in one launch on NVIDIA Hopper. XLA takes
three: the largest magnitudes, the scales, and the numbers.

One thread block has a row in registers, so it is read once; wide rows are shared by warpgroups.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import launch, store
from pallas_kernels.scaled_matmul.rounding import largest

NUMBERS = jnp.float8_e4m3fn
MAX_ROWS = 256  # with more rows memory is the limit
THREADS = 128
MAX_COLUMNS = 64 * THREADS  # of a warpgroup
WARPGROUPS = (1, 2, 4)


def supports(x_TI: Array, dtype: Any) -> bool:
    """Whether the kernel takes these rows."""
    return (
        x_TI.dtype in (jnp.bfloat16, jnp.float16)
        and dtype == NUMBERS
        and 1 <= x_TI.shape[0] <= MAX_ROWS
        and _warpgroups(x_TI.shape[1]) is not None
    )


def _warpgroups(columns: int) -> int | None:
    """Warpgroups that share a row; None where none can."""
    return next(
        (n for n in WARPGROUPS if columns % (n * THREADS) == 0 and columns <= n * MAX_COLUMNS), None
    )


def rounded_rows(x_TI: Array, room: int | None = None, *, interpret: Any = None) -> Any:
    """Numbers `[T, I]` of NUMBERS and float32 scales `[T]`, see `scaled_matmul.rounding`.

    `x_TI` is one that `supports` allows. Both results have `room` rows if that is given; what
    follows the last token in them is anything. `interpret` is a `plgpu.InterpretGPUParams` for
    machines without a GPU.
    """
    (T, I), warpgroups = x_TI.shape, _warpgroups(x_TI.shape[1])  # noqa: E741
    assert warpgroups is not None
    width = I // warpgroups

    def rounded_rows_kernel(x_ref, numbers_ref, scale_ref, most_ref, ready):  # type: ignore[no-untyped-def]
        t, wg = lax.axis_index("row"), lax.axis_index("wg")
        own = (t, pl.ds(wg * width, width))
        x = plgpu.load(x_ref.at[own], layout=_layout(width), optimized=False).astype(jnp.float32)
        most = jnp.max(jnp.maximum(x, -x))
        if warpgroups > 1:
            most_ref.at[wg][...] = most
            plgpu.barrier_arrive(ready)
            plgpu.barrier_wait(ready)
            for other in range(warpgroups):
                most = jnp.maximum(most, most_ref[other])
        scale = jnp.where(most == 0, 1.0, most * (1 / largest(NUMBERS)))
        limit = largest(NUMBERS)
        numbers = jnp.maximum(jnp.minimum(x * (1 / scale), limit), -limit)
        store(numbers_ref.at[own], numbers)

        @pl.when(wg == 0)
        def _() -> None:
            scale_ref.at[t][...] = scale

    return launch(
        rounded_rows_kernel,
        (x_TI,),
        interpret,
        out_type=(
            jax.ShapeDtypeStruct((room or T, I), NUMBERS),
            jax.ShapeDtypeStruct((room or T,), jnp.float32),
        ),
        scratch_types=[
            plgpu.SMEM((WARPGROUPS[-1],), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups),
        ],
        grid=(T,),
        grid_names=("row",),
        num_threads=warpgroups,
        thread_name="wg",
    )


def _layout(width: int) -> Any:
    """Neighbouring threads read neighbouring words, of 16 bytes if the width allows."""
    word = math.gcd(width // THREADS, 8)
    tiling = plgpu.Tiling(((THREADS * word,), (32 * word,), (word,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
