"""Products of tokens with 4-bit weights, y = x · wᵀ, whose groups of columns share a scale."""

from __future__ import annotations

from jax import Array

from pallas_kernels.backends import Backends
from pallas_kernels.int4_matmul.packed import Int4

BACKENDS = Backends(__name__, "int4_matmul", ("reference", "mosaic_gpu"))


def int4_matmul(x_TI: Array, w: Int4, *, backend: str) -> Array:
    """x · wᵀ, summed in float32; returns `y_TO` in x's type.

    The weight that is multiplied is computed in float32 and rounded once to x's type. Raises
    `UnknownBackend` for a name not in `BACKENDS`, and ValueError for shapes or types that the back
    end does not support.
    """
    return BACKENDS[backend](x_TI, w)
