"""Products of tokens with 4-bit weights, y = x · wᵀ, whose groups of columns share a scale."""

from __future__ import annotations

import jax
from jax import Array

from pallas_kernels.backends import Backends
from pallas_kernels.grouped_matmul import Gating, Groups
from pallas_kernels.int4_matmul import plan
from pallas_kernels.int4_matmul.packed import Int4
from pallas_kernels.parts import Product

NAMES = ("reference", "mosaic_gpu")
BACKENDS = Backends(__name__, "int4_matmul", NAMES)
PARTS = Backends(__name__, "int4_parts", NAMES)


def int4_matmul(x_TI: Array, w: Int4, *, backend: str) -> Array:
    """x · wᵀ, summed in float32; returns `y_TO` in x's type.

    The weight that is multiplied is computed in float32 and rounded once to x's type. Raises
    `UnknownBackend` for a name not in `BACKENDS`, and ValueError for shapes or types that the back
    end does not support.
    """
    return BACKENDS[backend](x_TI, w)


def int4_parts(x_TI: Array, w: Int4, *, backend: str) -> Product:
    """`int4_matmul`, in parts where the back end has some, for a reader that adds them up."""
    return PARTS[backend](x_TI, w)


def is_dense(backend: str, x_TI: Array, w: Int4) -> bool:
    """Whether the back end multiplies with the whole weight in x's type, which `dense` makes."""
    return (
        backend == "mosaic_gpu"
        and plan.is_dense(x_TI.shape[0])
        and BACKENDS.supports(backend, x_TI, w)
    )


def dense(x_TI: Array, w: Int4) -> Array:
    """The weight `[O, I]` in x's type for products with x on NVIDIA Hopper."""
    from pallas_kernels.int4_matmul import mosaic_dense

    return mosaic_dense.dense(w, x_TI)


def takes_experts(x_PI: Array, w: Int4) -> bool:
    """Whether `grouped_int4_matmul` takes these, of which w has an axis of experts first."""
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), w)
    return BACKENDS.supports("mosaic_gpu", x_PI, one)


def grouped_int4_matmul(
    x_PI: Array,
    w: Int4,
    groups: Groups,
    bias_EO: Array | None = None,
    gating: Gating | None = None,
) -> Array:
    """Each row times the weight of its expert on NVIDIA Hopper, see `grouped_matmul`."""
    from pallas_kernels.int4_matmul import mosaic_grouped

    return mosaic_grouped.grouped_int4_matmul(x_PI, w, groups, bias_EO, gating)
