"""Residual sum and root-mean-square norm in plain JAX: differentiable, any shape and type."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.parts import Product, WeightedRows, whole
from pallas_kernels.scaled_matmul import Inputs, Rounding


def add_norm(
    x_TD: Array, delta_TD: Product, weight_D: Array, eps: float, rounding: Rounding | None = None
) -> tuple[Array, Inputs]:
    """See `pallas_kernels.add_norm`."""
    if isinstance(delta_TD, WeightedRows):
        sum_TD = (x_TD.astype(jnp.float32) + delta_TD.total).astype(x_TD.dtype)
    else:
        sum_TD = x_TD + whole(delta_TD)
    norm_TD = rms_norm(sum_TD, weight_D, eps)
    return sum_TD, norm_TD if rounding is None else rounding.of(norm_TD)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / rms(x) · weight over the last axis, computed in float32 and rounded once to x's dtype."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)
