"""Residual sum and norm: a part's output joins the residual stream, and the sum is normed for the
next part."""

from __future__ import annotations

from jax import Array

from pallas_kernels.backends import Backends
from pallas_kernels.norm import rms_norm as rms_norm
from pallas_kernels.parts import Product
from pallas_kernels.scaled_matmul import Inputs, Rounding
from pallas_kernels.target import ANYWHERE, HOPPER, Target

BACKENDS = Backends(__name__, "add_norm", {"reference": ANYWHERE, "mosaic_gpu": HOPPER})


def add_norm(
    x_TD: Array,
    delta_TD: Product,
    weight_D: Array,
    eps: float,
    *,
    rounding: Rounding | None = None,
    backend: str,
) -> tuple[Array, Inputs]:
    """`(x + delta, rms_norm(x + delta) * weight)`, both `[T, D]` in x's dtype. Parts of `delta`
    are added up before, `NormedRows` normed; `WeightedRows` are added to x in float32.

    The sum is rounded once; the norm is computed in float32 from the rounded sum and rounded once.
    With a `rounding`, the norm is then rounded to that, as a product that reads it would do.
    Raises `UnknownBackend` for a name not in `BACKENDS`.
    """
    return BACKENDS[backend](x_TD, delta_TD, weight_D, eps, rounding)


def find(
    target: Target,
    x_TD: Array,
    weight_D: Array,
    delta_TD: Product | None = None,
    rounding: Rounding | None = None,
) -> str | None:
    """The back end for these arrays on a target; None: `delta` is to be added up before."""
    return BACKENDS.find(target, x_TD, weight_D, delta_TD, rounding)


def choose(
    target: Target, x_TD: Array, weight_D: Array, *, rounding: Rounding | None = None
) -> str:
    """The back end for a plain `delta` on a target."""
    return BACKENDS.choose(target, x_TD, weight_D, None, rounding)
