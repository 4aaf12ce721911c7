"""The gated product of an MLP, y = activation(x · gateᵀ) · (x · upᵀ), with the weight in the
checkpoint's layout."""

from __future__ import annotations

from jax import Array

from pallas_kernels.backends import Backends
from pallas_kernels.gated_matmul.gating import GELU, SILU, Gated, Gating, computes

__all__ = [
    "BACKENDS",
    "GELU",
    "SILU",
    "Gated",
    "Gating",
    "backend_for",
    "computes",
    "gated_matmul",
    "is_faster",
]

BACKENDS = Backends(__name__, "gated_matmul", ("reference", "mosaic_gpu"))
# Rows below 1,024 for which the kernel is faster with a large weight
FASTER = range(64, 257), range(353, 385), range(449, 513), range(545, 577), range(705, 769)


def gated_matmul(x_MI: Array, w_OI: Array, *, gating: Gating, backend: str) -> Array:
    """gating(x · gateᵀ, x · upᵀ), summed and activated in float32; returns `y_MF` in x's dtype.

    `x_MI` holds one row a token; `w_OI` holds F rows of the gate, then F of up. Raises
    `UnknownBackend` for a name not in `BACKENDS`, and ValueError for shapes, types or gatings that
    the back end does not support.
    """
    return BACKENDS[backend](x_MI, w_OI, gating)


def backend_for(wanted: str, x_MI: Array, w_OI: Array, gating: Gating) -> str | None:
    """`wanted` if that back end supports these and is faster than XLA's product and activation,
    else None."""
    faster = wanted != "reference" and is_faster(x_MI.shape[0], w_OI.size * w_OI.dtype.itemsize)
    return wanted if faster and BACKENDS.supports(wanted, x_MI, w_OI, gating) else None


def is_faster(rows: int, weight_bytes: int) -> bool:
    """Whether the kernel is faster than XLA's product and activation, as measured on an H200.

    With fewer rows XLA streams the weight as fast, and small products launch sooner. In between the
    tiles of `matmul` fill the card better, or XLA's.
    """
    if rows >= 1024:
        return weight_bytes >= 8 << 20
    return weight_bytes >= 64 << 20 and any(rows in measured for measured in FASTER)
