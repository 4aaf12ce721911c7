"""Products of few and of some hundred tokens with weights of 16 bits, y = x · wᵀ."""

from __future__ import annotations

from jax import Array

from pallas_kernels.backends import Backends
from pallas_kernels.matmul.plan import is_faster
from pallas_kernels.parts import Product

NAMES = ("reference", "mosaic_gpu")
BACKENDS = Backends(__name__, "matmul", NAMES)
PARTS = Backends(__name__, "matmul_parts", NAMES)


def matmul(x_TI: Array, w_OI: Array, *, backend: str) -> Array:
    """x · wᵀ, summed in float32; returns `y_TO` in x's type.

    Raises `UnknownBackend` for a name not in `BACKENDS`, and ValueError for shapes or types that
    the back end does not support.
    """
    return BACKENDS[backend](x_TI, w_OI)


def matmul_parts(x_TI: Array, w_OI: Array, *, backend: str) -> Product:
    """`matmul`, in parts where the back end has some, for a reader that adds them up."""
    return PARTS[backend](x_TI, w_OI)


def backend_for(wanted: str, x_TI: Array, w_OI: Array) -> str | None:
    """`wanted` if that back end supports these and is faster than XLA's product, else None."""
    faster = wanted != "reference" and is_faster(x_TI.shape[0], w_OI.size * w_OI.dtype.itemsize)
    return wanted if faster and BACKENDS.supports(wanted, x_TI, w_OI) else None
