"""Residual sum and root-mean-square norm in plain JAX: any shape and type."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.norm import rms_norm
from pallas_kernels.parts import NormedRows, Parts, Product, WeightedRows, whole
from pallas_kernels.scaled_matmul import Inputs, Rounding
from pallas_kernels.target import Target


def prefers(
    target: Target,
    x_TD: Array,
    weight_D: Array,
    delta_TD: Product | None = None,
    rounding: Rounding | None = None,
) -> bool:
    """For a plain `delta`: what adds up parts in plain JAX is better joined with what made them."""
    return not isinstance(delta_TD, Parts | WeightedRows | NormedRows)


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
