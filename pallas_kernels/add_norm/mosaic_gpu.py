"""Sum and norm for NVIDIA Hopper in Pallas Mosaic GPU: one small launch, a warpgroup a row.

A warpgroup keeps its row in registers. A thread issues all its loads at once, those of rows that
are yet to be added up included. Few rows with many shares have a team each (`mosaic_few`).
The sum's store starts before the threads synchronise to add up the squares.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.add_norm import mosaic_few
from pallas_kernels.add_norm.mosaic_norm import Delta, norm_of, norm_results, store_norm
from pallas_kernels.mosaic_gpu import THREADS, launch, row_layout, store
from pallas_kernels.parts import Product, WeightedRows
from pallas_kernels.scaled_matmul import Inputs, Rounding

# With more rows memory is the limit. XLA's fusion of a plain norm reads no more than the kernel; to
# round it, it reads everything again
MAX_ROWS = 256
MAX_WIDTH = 128 * THREADS  # elements of a row in registers
MAX_ADDED = 256 * THREADS  # elements of the rows of a token, half of the registers


def check(
    x_TD: Array,
    weight_D: Array,
    delta_TD: Product | None = None,
    rounding: Rounding | None = None,
) -> None:
    """Raise ValueError for shapes and types that the kernel does not support, and for many rows
    that are not rounded."""
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
    few = rounding is None or isinstance(delta_TD, WeightedRows)
    if rows < 1 or (few and rows > MAX_ROWS):
        raise ValueError(f"mosaic_gpu add_norm takes 1 to {MAX_ROWS} rows, got {rows}")
    if isinstance(delta_TD, WeightedRows):
        _check_rows(delta_TD)


def _check_rows(delta_TD: WeightedRows) -> None:
    """Raise ValueError for rows that the kernel does not add up."""
    choices = delta_TD.place_TK.shape[1]
    width = delta_TD.shape[1]
    if choices * width > MAX_ADDED or delta_TD.own_TK is not None:
        raise ValueError(
            f"mosaic_gpu add_norm adds up rows of at most {MAX_ADDED} numbers for each token, all "
            f"of which count, got {choices} rows of {width}; add them up before"
        )


def add_norm(
    x_TD: Array,
    delta_TD: Product,
    weight_D: Array,
    eps: float,
    rounding: Rounding | None = None,
    *,
    interpret: Any = None,
) -> tuple[Array, Inputs]:
    """See `pallas_kernels.add_norm`. bfloat16 or float16, weights also float32; 1 to 256 rows, or
    more if the norm is rounded; D a multiple of 128 up to 16384. Raises ValueError otherwise.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    check(x_TD, weight_D, delta_TD, rounding)
    T, D = x_TD.shape
    if delta_TD.shape != (T, D) or delta_TD.dtype != x_TD.dtype or weight_D.shape != (D,):
        raise ValueError(
            "mosaic_gpu add_norm takes x and delta [T, D] of one type and weight [D], got "
            f"x {x_TD.dtype}{list(x_TD.shape)}, delta {delta_TD.dtype}{list(delta_TD.shape)}, "
            f"weight {list(weight_D.shape)}"
        )
    run = mosaic_few.add_norm if mosaic_few.takes(delta_TD) else _launch
    return run(x_TD, Delta.of(delta_TD), weight_D, eps, rounding, interpret)


def _launch(
    x_TD: Array,
    delta: Delta,
    weight_D: Array,
    eps: float,
    rounding: Rounding | None,
    interpret: Any,
) -> tuple[Array, Inputs]:
    T, D = x_TD.shape
    layout = row_layout(x_TD.shape[1])

    def load(ref: Any) -> Array:
        return plgpu.load(ref.at[pl.ds(0, D)], layout=layout, optimized=False)

    def add_norm_kernel(x_ref, *refs):  # type: ignore[no-untyped-def]
        count = len(delta.arrays)
        delta_refs = refs[:count]
        weight_ref, sum_ref, *norm_refs = refs[count:]
        t = lax.axis_index("row")
        x = load(x_ref.at[t])
        weight = load(weight_ref)
        terms = (term.astype(jnp.float32) for term in delta.terms(t, load, *delta_refs))
        total = sum(terms, x.astype(jnp.float32)).astype(x.dtype)
        store(sum_ref.at[t], total)
        store_norm(total, weight.astype(jnp.float32), eps, t, norm_refs)

    total, *norm = launch(
        add_norm_kernel,
        (x_TD, *delta.arrays, weight_D),
        interpret,
        out_type=(jax.ShapeDtypeStruct((T, D), x_TD.dtype), *norm_results(x_TD, rounding)),
        grid=(T,),
        grid_names=("row",),
        # No thread reads what another one stores; the reduction has barriers of its own.
        compiler={"unsafe_no_auto_barriers": True},
    )
    return total, norm_of(x_TD, norm)
