"""Residual sum and norm in plain JAX: differentiable, any shape and type."""

from __future__ import annotations

from jax import Array

from pallas_kernels.add_norm.norm import rms_norm


def add_norm(x_TD: Array, delta_TD: Array, weight_D: Array, eps: float) -> tuple[Array, Array]:
    """See `pallas_kernels.add_norm`."""
    sum_TD = x_TD + delta_TD
    return sum_TD, rms_norm(sum_TD, weight_D, eps)
