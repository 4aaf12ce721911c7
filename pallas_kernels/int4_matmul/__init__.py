"""Products of tokens with 4-bit weights, y = x · wᵀ, whose groups of columns share a scale."""

from __future__ import annotations

from jax import Array

from pallas_kernels.backends import Backends
from pallas_kernels.grouped_matmul import Gating, Groups
from pallas_kernels.int4_matmul.packed import Int4
from pallas_kernels.parts import Product
from pallas_kernels.target import ANYWHERE, HOPPER, Target

NEEDS = {"reference": ANYWHERE, "mosaic_gpu": HOPPER}
BACKENDS = Backends(__name__, "int4_matmul", NEEDS)
PARTS = Backends(__name__, "int4_parts", NEEDS)
DENSE = Backends(__name__, "dense", {"mosaic_dense": HOPPER})
GROUPED = Backends(__name__, "grouped_int4_matmul", {"mosaic_grouped": HOPPER})


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


def choose(target: Target, x_TI: Array, w: Int4) -> str:
    """The back end of products of these on a target."""
    return BACKENDS.choose(target, x_TI, w)


def find_dense(target: Target, x_TI: Array, w: Int4) -> str | None:
    """The back end of `dense` where products with x are made with the whole weight in x's type;
    None where they are not."""
    return DENSE.find(target, x_TI, w)


def dense(x_TI: Array, w: Int4, *, backend: str) -> Array:
    """The weight `[O, I]` in x's type for products with x."""
    return DENSE[backend](w, x_TI)


def find_grouped(target: Target, x_PI: Array, w: Int4) -> str | None:
    """The back end of `grouped_int4_matmul` for these, of which w has an axis of experts first;
    None where none takes them."""
    return GROUPED.find(target, x_PI, w)


def grouped_int4_matmul(
    x_PI: Array,
    w: Int4,
    groups: Groups,
    bias_EO: Array | None = None,
    gating: Gating | None = None,
    *,
    backend: str,
) -> Array:
    """Each row times the weight of its expert, see `grouped_matmul`."""
    return GROUPED[backend](x_PI, w, groups, bias_EO, gating)
