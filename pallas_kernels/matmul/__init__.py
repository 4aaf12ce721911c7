"""Products of few and of some hundred tokens with weights of 16 bits, y = x · wᵀ."""

from __future__ import annotations

from jax import Array

from pallas_kernels.backends import Backends
from pallas_kernels.parts import Product
from pallas_kernels.target import ANYWHERE, HOPPER, Target

NEEDS = {"reference": ANYWHERE, "mosaic_gpu": HOPPER}
BACKENDS = Backends(__name__, "matmul", NEEDS)
PARTS = Backends(__name__, "matmul_parts", NEEDS)


def matmul(x_TI: Array, w_OI: Array, *, backend: str) -> Array:
    """x · wᵀ, summed in float32; returns `y_TO` in x's type.

    Raises `UnknownBackend` for a name not in `BACKENDS`, and ValueError for shapes or types that
    the back end does not support.
    """
    return BACKENDS[backend](x_TI, w_OI)


def matmul_parts(x_TI: Array, w_OI: Array, *, backend: str) -> Product:
    """`matmul`, in parts where the back end has some, for a reader that adds them up."""
    return PARTS[backend](x_TI, w_OI)


def find(target: Target, x_TI: Array, w_OI: Array) -> str | None:
    """The back end for these arrays on a target; None where none is faster than XLA's product."""
    return BACKENDS.find(target, x_TI, w_OI)
