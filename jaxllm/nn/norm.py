"""Root-mean-square norm."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxllm.nn.linear import Init


class RMSNorm(nnx.Module):
    """x / rms(x) · weight over the last axis, computed in float32. `axis` is the logical name of that axis."""

    def __init__(self, init: Init, width: int, eps: float, axis: str = "embed"):
        self.weight = init.full((width,), (axis,), 1.0)
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * scale * self.weight[...].astype(jnp.float32)).astype(x.dtype)
