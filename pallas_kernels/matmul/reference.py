"""The product in plain JAX: the oracle, for every shape and type."""

from __future__ import annotations

from jax import Array, lax

from pallas_kernels.parts import Product
from pallas_kernels.target import Target


def matmul(x_TI: Array, w_OI: Array) -> Array:
    """See `pallas_kernels.matmul`."""
    return lax.dot_general(x_TI, w_OI, (((1,), (1,)), ((), ())))


def matmul_parts(x_TI: Array, w_OI: Array) -> Product:
    """See `pallas_kernels.matmul`: the whole product."""
    return matmul(x_TI, w_OI)


def prefers(target: Target, x_TI: Array, w_OI: Array) -> bool:
    """Never: callers have products of their own, of any axes."""
    return False
