"""The root-mean-square norm in plain JAX: differentiable, any shape and type."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / rms(x) · weight over the last axis, computed in float32 and rounded once to x's dtype."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)
