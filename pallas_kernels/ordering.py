"""When XLA makes what a layer needs.

XLA schedules a program from its end. What depends on parameters or constants alone is then made at
the program's start, for all layers: zeros that a loop begins with, or weights that are unpacked
before a product. A step then needs more memory with each layer. The arrays of a layer that could be
made at any time therefore wait for the layer's inputs.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike


def together[T, U](x: T, others: U) -> tuple[T, U]:
    """Both trees unchanged; nothing is computed from `others` before `x` is there."""
    return lax.optimization_barrier((x, others))


def zeros_after(x: Array, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[Array, Array]:
    """x unchanged, and zeros that are not made before it is there."""
    x, zero = together(x, jnp.zeros((), dtype))
    return x, jnp.broadcast_to(zero, shape)
