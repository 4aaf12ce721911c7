"""Root-mean-square norm."""

from __future__ import annotations

from jax import Array

from jaxllm.nn.linear import Init, Stored
from pallas_kernels.add_norm import rms_norm


class RMSNorm(Stored):
    """x / rms(x) · weight over the last axis, computed in float32.

    `axis` is the logical name of that axis.
    """

    def __init__(self, init: Init, width: int, eps: float, axis: str = "embed"):
        self.weight = init.full((width,), (axis,), 1.0)
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.weight[...], self.eps)
