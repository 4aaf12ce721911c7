"""Sum and norm for NVIDIA Hopper in Pallas Mosaic GPU: one small launch, a warpgroup a row.

A warpgroup keeps its row in registers. A thread issues all its loads at once, those of rows that
are yet to be added up included.
The sum's store starts before the threads synchronise to add up the squares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import THREADS, launch, row_layout, store
from pallas_kernels.parts import Parts, Product, WeightedRows, added, whole
from pallas_kernels.scaled_matmul import Inputs, RoundedRows, Rounding, mosaic_rounding

# With more rows memory is the limit. XLA's fusion of a plain norm reads no more than the kernel; to
# round it, it reads everything again
MAX_ROWS = 256
MAX_WIDTH = 128 * THREADS  # elements of a row in registers
MAX_ADDED = 256 * THREADS  # elements of the rows of a token, half of the registers

type Load = Callable[[Any], Array]


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
    choices, width = delta_TD.place_TK.shape[1], delta_TD.shape[1]
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
    return _launch(x_TD, Delta.of(delta_TD), weight_D, eps, rounding, interpret)


class Delta(NamedTuple):
    """What is added to x: arrays, and what a kernel makes of row t of refs to them; `load` loads a
    row. All that it makes is added to x in float32, in that order."""

    arrays: tuple[Array, ...]
    terms: Callable[..., list[Array]]

    @classmethod
    def of(cls, delta_TD: Product) -> Delta:
        if isinstance(delta_TD, Parts) and delta_TD.done is None:
            row = functools.partial(added, delta_TD.dtype)
            return cls((delta_TD.sums, *delta_TD.scales), lambda *given: [row(*given)])
        if isinstance(delta_TD, WeightedRows):
            return cls(delta_TD[:3], _weighted)
        return cls((whole(delta_TD),), _row)


def _row(t: Array, load: Load, delta_ref: Any) -> list[Array]:
    return [load(delta_ref.at[t])]


def _weighted(t: Array, load: Load, y_ref: Any, place_ref: Any, weight_ref: Any) -> list[Array]:
    """Of `WeightedRows`: all rows are loaded before the first is used."""
    choices = range(place_ref.shape[1])
    weights = [weight_ref[t, k] for k in choices]
    rows = [load(y_ref.at[place_ref[t, k]]) for k in choices]
    return [row.astype(jnp.float32) * own for row, own in zip(rows, weights, strict=True)]


def _launch(
    x_TD: Array,
    delta: Delta,
    weight_D: Array,
    eps: float,
    rounding: Rounding | None,
    interpret: Any,
) -> tuple[Array, Inputs]:
    (T, D), layout = x_TD.shape, row_layout(x_TD.shape[1])

    def load(ref: Any) -> Array:
        return plgpu.load(ref.at[pl.ds(0, D)], layout=layout, optimized=False)

    def add_norm_kernel(x_ref, *refs):  # type: ignore[no-untyped-def]
        count = len(delta.arrays)
        delta_refs, (weight_ref, sum_ref, *norm_refs) = refs[:count], refs[count:]
        t = lax.axis_index("row")
        x, weight = load(x_ref.at[t]), load(weight_ref)
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


def norm_results(x_TD: Array, rounding: Rounding | None) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What `store_norm` fills. Raises ValueError for numbers that it cannot round to."""
    T, D = x_TD.shape
    if rounding is None:
        return (jax.ShapeDtypeStruct((T, D), x_TD.dtype),)
    if jnp.dtype(rounding.dtype) != mosaic_rounding.NUMBERS:
        raise ValueError(f"mosaic_gpu add_norm rounds to float8_e4m3fn, not {rounding.dtype}")
    return mosaic_rounding.results(D, rounding.rows)


def norm_of(x_TD: Array, results: list[Array]) -> Inputs:
    """The norm that `store_norm` left in `results`."""
    if len(results) == 1:
        return results[0]
    numbers, scale = results
    return RoundedRows(numbers, scale, x_TD.shape[0], x_TD.dtype)


def store_norm(total: Array, weight: Array, eps: float, t: Array, refs: Sequence[Any]) -> None:
    """Norm row t, which the warpgroup holds in registers, and round it if `refs` say so."""
    wide = total.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide) * (1 / len(total)) + eps)
    norm = (wide * scale * weight).astype(total.dtype)
    if len(refs) == 1:
        store(refs[0].at[t], norm)
    else:
        mosaic_rounding.store_rounded(norm, [t], *refs)
