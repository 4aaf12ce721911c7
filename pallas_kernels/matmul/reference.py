"""The matrix product as XLA computes it: the oracle, and the back end that takes every shape and dtype."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def matmul(x_MI: Array, w_OI: Array, *, out_dtype: Any = None, following: Array | None = None) -> Array:
    """See `pallas_kernels.matmul`."""
    del following
    y = lax.dot_general(x_MI, w_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y.astype(out_dtype or x_MI.dtype)
