"""The scaled product in plain JAX: the oracle, for every shape and type."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.gated_matmul.gating import Gating
from pallas_kernels.parts import Product, whole
from pallas_kernels.scaled_matmul.rounding import (
    Inputs,
    RoundedRows,
    Rounding,
    rounded_inputs,
    spread,
)


def scaled_matmul(
    x_TI: Inputs,
    w_OI: Array,
    scale_OG: Array,
    group: int,
    inputs: str,
    input_scale: Array | None = None,
) -> Array:
    """See `pallas_kernels.scaled_matmul`."""
    sums = scaled_sums(x_TI, w_OI, scale_OG, group, inputs, input_scale)
    return sums.astype(x_TI.dtype)


def scaled_sums(
    x_TI: Inputs,
    w_OI: Array,
    scale_OG: Array,
    group: int,
    inputs: str,
    input_scale: Array | None = None,
) -> Array:
    """See `pallas_kernels.scaled_matmul`; of inputs rounded in any way.

    With one scale a row, numbers are multiplied and sums scaled. With more, factors are scaled and
    rounded to x's type before, which is exact in float32 alone.
    """
    left, left_scale = rounded_inputs(x_TI, w_OI.dtype, group, inputs, input_scale)
    if scale_OG.shape[1] == 1:
        return product_of(left, w_OI, x_TI.dtype) * left_scale * scale_OG[:, 0]
    x, w = (
        (numbers.astype(jnp.float32) * spread(scale, group, numbers.shape[1])).astype(x_TI.dtype)
        for numbers, scale in ((left, left_scale), (w_OI, scale_OG))
    )
    return product_of(x, w, x_TI.dtype)


def gated_rows(product: Product, rounding: Rounding, gating: Gating) -> RoundedRows:
    """See `pallas_kernels.scaled_matmul`."""
    return rounding.of(gated(product, gating))


def gated(product: Product, gating: Gating) -> Array:
    """gating(gate, up), not rounded further."""
    gate, up = jnp.split(whole(product), 2, axis=1)
    return gating(gate, up)


scaled_parts = scaled_matmul  # XLA joins its program with that of what follows


def product_of(x_TI: Array, w_OI: Array, dtype: jnp.dtype, sums: Any = jnp.float32) -> Array:
    """Sums of exact products, made in float32; those of floats are held as `sums`."""
    if x_TI.dtype == w_OI.dtype == jnp.int8:
        product = lax.dot_general(
            x_TI, w_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
        )
        return product.astype(jnp.float32)
    # All numbers of 8 bits are numbers of x's type
    return lax.dot_general(
        x_TI.astype(dtype),
        w_OI.astype(dtype),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=sums,
    )
