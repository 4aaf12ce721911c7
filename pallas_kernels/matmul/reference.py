"""The products as XLA computes them: the oracle, and the back end that takes every shape and dtype."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax, nn


def matmul(x_MI: Array, w_OI: Array, *, out_dtype: Any = None, following: Array | None = None) -> Array:
    """See `pallas_kernels.matmul`."""
    del following
    y = lax.dot_general(x_MI, w_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y.astype(out_dtype or x_MI.dtype)


def gated_matmul(x_MI: Array, w_OI: Array, *, following: Array | None = None) -> Array:
    """See `pallas_kernels.matmul`."""
    gate, up = jnp.split(matmul(x_MI, w_OI, out_dtype=jnp.float32, following=following), 2, axis=1)
    return (nn.silu(gate) * up).astype(x_MI.dtype)
