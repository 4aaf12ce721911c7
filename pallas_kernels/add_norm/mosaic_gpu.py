"""Sum and norm for NVIDIA Hopper in Pallas Mosaic GPU: one small launch, a warpgroup a row.

A warpgroup keeps its row in registers. A thread issues all its loads at once, the weight included.
The sum's store starts before the threads synchronise to add up the squares.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import THREADS, launch, row_layout, store

MAX_ROWS = 256  # with more rows memory is the limit, and XLA's fusion is as fast
MAX_WIDTH = 128 * THREADS  # elements of a row in registers


def check(x_TD: Array, weight_D: Array) -> None:
    """Raise ValueError for shapes and types that the kernel does not support."""
    rows, width = x_TD.shape
    if x_TD.dtype not in (jnp.bfloat16, jnp.float16) or weight_D.dtype not in (
        x_TD.dtype,
        jnp.float32,
    ):
        raise ValueError(
            "mosaic_gpu add_norm takes bfloat16 or float16, and weights of the same or float32, "
            f"got x {x_TD.dtype}, weight {weight_D.dtype}"
        )
    if width % THREADS or not THREADS <= width <= MAX_WIDTH:
        raise ValueError(
            f"mosaic_gpu add_norm takes a width that is a multiple of {THREADS} up to {MAX_WIDTH}, "
            f"got {width}"
        )
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"mosaic_gpu add_norm takes 1 to {MAX_ROWS} rows, got {rows}")


def add_norm(
    x_TD: Array, delta_TD: Array, weight_D: Array, eps: float, *, interpret: Any = None
) -> tuple[Array, Array]:
    """See `pallas_kernels.add_norm`. bfloat16 or float16, weights also float32; 1 to 256 rows; D a
    multiple of 128 up to 16384. Raises ValueError otherwise.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    check(x_TD, weight_D)
    T, D = x_TD.shape
    if delta_TD.shape != (T, D) or delta_TD.dtype != x_TD.dtype or weight_D.shape != (D,):
        raise ValueError(
            "mosaic_gpu add_norm takes x and delta [T, D] of one type and weight [D], got "
            f"x {x_TD.dtype}{list(x_TD.shape)}, delta {delta_TD.dtype}{list(delta_TD.shape)}, "
            f"weight {list(weight_D.shape)}"
        )
    layout = row_layout(D)

    def load(ref: Any) -> Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    def add_norm_kernel(x_ref, delta_ref, weight_ref, sum_ref, out_ref):  # type: ignore[no-untyped-def]
        t = lax.axis_index("row")
        x, delta, weight = load(x_ref.at[t]), load(delta_ref.at[t]), load(weight_ref)
        total = (x.astype(jnp.float32) + delta.astype(jnp.float32)).astype(x.dtype)
        store(sum_ref.at[t], total)
        wide = total.astype(jnp.float32)
        scale = lax.rsqrt(jnp.sum(wide * wide) * (1 / D) + eps)
        store(out_ref.at[t], (wide * scale * weight.astype(jnp.float32)).astype(x.dtype))

    found = launch(
        add_norm_kernel,
        (x_TD, delta_TD, weight_D),
        interpret,
        out_type=(jax.ShapeDtypeStruct((T, D), x_TD.dtype),) * 2,
        grid=(T,),
        grid_names=("row",),
        # No thread reads what another one stores; the reduction has barriers of its own.
        compiler={"unsafe_no_auto_barriers": True},
    )
    return tuple(found)
