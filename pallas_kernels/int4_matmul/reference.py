"""Products with 4-bit weights in plain JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.int4_matmul.packed import Int4, dequantised
from pallas_kernels.ordering import together


def int4_matmul(x_TI: Array, w: Int4) -> Array:
    """See `pallas_kernels.int4_matmul`. The weight is a temporary in x's type."""
    x_TI, w = together(x_TI, w)
    weight = dequantised(w, x_TI.shape[1], x_TI.dtype)
    precision = None
    if x_TI.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST
    y = lax.dot_general(
        x_TI,
        weight,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return y.astype(x_TI.dtype)


int4_parts = int4_matmul  # XLA joins its program with that of what follows
