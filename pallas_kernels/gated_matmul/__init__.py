"""The gated product of an MLP, y = activation(x · gateᵀ) · (x · upᵀ), with the weight in the
checkpoint's layout."""

from __future__ import annotations

from jax import Array

from pallas_kernels.backends import Backends
from pallas_kernels.gated_matmul.gating import GELU, SILU, Gated, Gating, computes
from pallas_kernels.target import ANYWHERE, HOPPER, Target

__all__ = [
    "BACKENDS",
    "GELU",
    "SILU",
    "Gated",
    "Gating",
    "computes",
    "find",
    "gated_matmul",
]

BACKENDS = Backends(__name__, "gated_matmul", {"reference": ANYWHERE, "mosaic_gpu": HOPPER})


def gated_matmul(x_MI: Array, w_OI: Array, *, gating: Gating, backend: str) -> Array:
    """gating(x · gateᵀ, x · upᵀ), summed and activated in float32; returns `y_MF` in x's dtype.

    `x_MI` holds one row a token; `w_OI` holds F rows of the gate, then F of up. Raises
    `UnknownBackend` for a name not in `BACKENDS`, and ValueError for shapes, types or gatings that
    the back end does not support.
    """
    return BACKENDS[backend](x_MI, w_OI, gating)


def find(target: Target, x_MI: Array, w_OI: Array, gating: Gating) -> str | None:
    """The back end for these on a target; None where none is faster than XLA's product and
    activation."""
    return BACKENDS.find(target, x_MI, w_OI, gating)
