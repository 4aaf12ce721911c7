"""The gated activation of a product, rounded to 8-bit floats for the product that follows, in one
launch on NVIDIA Hopper. XLA computes the activation twice, for the scales and for the numbers.

Here are rows of any width: a warpgroup holds its own in shared memory between the two. Two rows
share the scales of columns, which are as many bytes as both. `mosaic_gating_ring` has the others.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_matmul.gating import Gating, computes, in_kernels
from pallas_kernels.mosaic_gpu import THREADS, launch, narrowed, row_layout, store
from pallas_kernels.parts import Parts, Product
from pallas_kernels.scaled_matmul import mosaic_gating_ring
from pallas_kernels.scaled_matmul.mosaic_rounding import NUMBERS, numbers_of, results, scale_of
from pallas_kernels.scaled_matmul.rounding import RoundedRows, Rounding

HELD = 28 * 1024  # numbers of a row
PIECE = 1024  # of them that a warpgroup computes at once
SHARING = 1024  # tokens from which rows share scales, as all processors have several


def supports(product: Product, rounding: Rounding) -> bool:
    """Whether the kernel takes this product, and rounds as asked."""
    if not isinstance(product, Parts) or len(product.sums) > 1 or not product.scales:
        return False
    width = product.shape[1] // 2
    return (
        product.dtype in (jnp.bfloat16, jnp.float16)
        and product.sums.dtype in (product.dtype, jnp.float32)
        and jnp.dtype(rounding.dtype) == NUMBERS
        and width % THREADS == 0
        and 0 < width <= HELD
    )


def rows_of(tokens: int) -> int:
    """Rows of a warpgroup. Of more than two a processor has too few warpgroups at once."""
    if tokens >= SHARING:
        return 2
    return 1


def gates(gating: Gating) -> bool:
    """Whether the kernel has the gating's functions."""
    return computes(gating)


def check(product: Product, rounding: Rounding, gating: Gating) -> None:
    """Raise ValueError for what `supports` does not allow, and for a gating that kernels have
    not."""
    if not supports(product, rounding) or not gates(gating):
        raise ValueError("mosaic_gating takes one product in 16 bits with scales, and no erf")


def gated_rows(
    product: Parts, rounding: Rounding, gating: Gating, *, interpret: Any = None
) -> RoundedRows:
    """See `pallas_kernels.scaled_matmul`; for what `supports` allows.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    takes = mosaic_gating_ring.takes(product)
    return (mosaic_gating_ring.gated_rows if takes else of_any_width)(
        product, rounding, gating, interpret=interpret
    )


def of_any_width(
    product: Parts, rounding: Rounding, gating: Gating, *, interpret: Any = None
) -> RoundedRows:
    """`gated_rows` by a warpgroup a row."""
    T = product.shape[0]
    F = product.shape[1] // 2
    dtype = product.dtype
    height = rows_of(T)
    size = min(PIECE, F)
    pieces = F // size
    rest = F % size

    def gated_rows_kernel(y_ref, rows_ref, columns_ref, numbers_ref, scale_ref, held):  # type: ignore[no-untyped-def]
        first = lax.axis_index("rows") * height
        rows = [jnp.minimum(first + r, T - 1) for r in range(height)]
        activate = partial(
            _activate, (y_ref, rows_ref, columns_ref), in_kernels(gating), rows, held, interpret
        )
        most = activate(0, size, None)
        most = lax.fori_loop(1, pieces, lambda i, most: activate(_at(i, size), size, most), most)
        largest = [jnp.max(sizes) for sizes in most]
        if rest:
            more = activate(pieces * size, rest, None)
            largest = [jnp.maximum(a, jnp.max(b)) for a, b in zip(largest, more, strict=True)]
        scales = [scale_of(magnitude) for magnitude in largest]
        put_down = partial(_put_down, held, rows, scales, numbers_ref)
        pl.loop(0, pieces)(lambda i: put_down(_at(i, size), size))
        if rest:
            put_down(pieces * size, rest)
        for r, t in enumerate(rows):
            scale_ref.at[t][...] = scales[r]

    numbers, scale = launch(
        gated_rows_kernel,
        (product.sums, *product.scales),
        interpret,
        out_type=results(F, rounding.rows),
        scratch_types={"held": plgpu.SMEM((height, F), dtype)},
        grid=(-(-T // height),),
        grid_names=("rows",),
        # A thread reads what it has stored itself; reductions have barriers of their own.
        compiler={"unsafe_no_auto_barriers": True},
    )
    return RoundedRows(numbers, scale, T, dtype)


def _activate(
    product_refs: tuple[Any, Any, Any],
    gating: Gating,
    rows: list[Array],
    held: Any,
    interpret: Any,
    begin: Any,
    width: int,
    most: list[Array] | None,
) -> list[Array]:
    """Activate some columns of the rows, which are then `held`; their magnitudes, or the larger
    ones of these and `most`. `product_refs` are the product, its scales of rows and those of
    columns."""
    y_ref, rows_ref, columns_ref = product_refs
    F = held.shape[-1]
    dtype = held.dtype
    gate_scale, up_scale = (
        _load(columns_ref.at[pl.ds(column, width)]) for column in (begin, begin + F)
    )
    narrow = partial(narrowed, dtype=dtype, layout=row_layout(width), interpret=interpret)
    sizes = []
    for r, t in enumerate(rows):
        gate, up = (
            narrow(
                _load(y_ref.at[0, t, pl.ds(column, width)]).astype(jnp.float32) * rows_ref[t] * by
            )
            for column, by in ((begin, gate_scale), (begin + F, up_scale))
        )
        y = narrow(gating(gate.astype(jnp.float32), up.astype(jnp.float32)))
        store(held.at[r, pl.ds(begin, width)], y)
        y = y.astype(jnp.float32)
        size = jnp.maximum(y, -y)
        sizes.append(size if most is None else jnp.maximum(most[r], size))
    return sizes


def _put_down(
    held: Any, rows: list[Array], scales: list[Array], numbers_ref: Any, begin: Any, width: int
) -> None:
    """Round some columns of the rows that are `held`."""
    for r, t in enumerate(rows):
        y = _load(held.at[r, pl.ds(begin, width)]).astype(jnp.float32)
        store(numbers_ref.at[t, pl.ds(begin, width)], numbers_of(y, scales[r]))


def _at(i: Array, size: int) -> Array:
    return pl.multiple_of(i * size, size)


def _load(ref: Any) -> Array:
    return plgpu.load(ref, layout=row_layout(ref.shape[-1]), optimized=False)
