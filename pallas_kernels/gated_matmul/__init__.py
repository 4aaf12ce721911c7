"""The gated product of an MLP, y = silu(x · gateᵀ) * (x · upᵀ), in one pass over a weight in the
checkpoint's layout."""

from __future__ import annotations

from jax import Array

from pallas_kernels.backends import Backends

BACKENDS = Backends(__name__, "gated_matmul", ("reference", "mosaic_gpu"))


def gated_matmul(x_MI: Array, w_OI: Array, *, backend: str) -> Array:
    """silu(x · gateᵀ) * (x · upᵀ), summed and activated in float32; returns `y_MF` in x's dtype.

    `x_MI` holds a row a token; `w_OI` holds the F rows of the gate and then the F of up. Raises
    `UnknownBackend` for a name not in `BACKENDS`; a back end raises ValueError for shapes and
    dtypes that it does not take.
    """
    return BACKENDS[backend](x_MI, w_OI)


def backend_for(wanted: str, x_MI: Array, w_OI: Array) -> str | None:
    """`wanted` where this op has such a back end and it takes these arrays; None where XLA's
    products and an activation are faster."""
    worth = wanted != "reference" and pays(x_MI.shape[0], w_OI.size * w_OI.dtype.itemsize)
    return wanted if worth and BACKENDS.takes(wanted, x_MI, w_OI) else None


def pays(rows: int, weight_bytes: int) -> bool:
    """Whether the kernel is faster than two steps (measured on an H200): from 64 to 384 rows where
    reading the weight takes long, and with many rows also where it is small. XLA streams the weight
    as fast for a few rows, launches small products sooner, and between these cuts as good tiles."""
    return (64 <= rows <= 384 and weight_bytes >= 64 << 20) or (
        rows >= 1024 and weight_bytes >= 8 << 20
    )
