"""Matrix products of a few tokens with a weight in the checkpoint's layout: y = x · wᵀ, and the gated one of an MLP."""

from __future__ import annotations

from typing import Any

from jax import Array

from pallas_kernels.backends import Backends

BACKENDS = Backends(__name__, "matmul", ("reference", "mosaic_gpu"))
GATED_BACKENDS = Backends(__name__, "gated_matmul", ("reference", "mosaic_gpu"))


def matmul(x_MI: Array, w_OI: Array, *, backend: str, out_dtype: Any = None, following: Array | None = None) -> Array:
    """x · wᵀ, summed in float32; returns `y_MO` in `out_dtype`, by default x's dtype.

    `x_MI` holds a row a token, `w_OI` a row an output feature. `following` is the weight of the product that comes next: a back end may
    begin to fetch it while this one ends; it does not change the result. Raises `UnknownBackend` for a name not in `BACKENDS`; a back
    end raises ValueError for shapes and dtypes that it does not take.
    """
    return BACKENDS[backend](x_MI, w_OI, out_dtype=out_dtype, following=following)


def gated_matmul(x_MI: Array, w_OI: Array, *, backend: str, following: Array | None = None) -> Array:
    """silu(x · gateᵀ) * (x · upᵀ) in float32; returns `y_MF` in x's dtype. `w_OI` holds the F rows of the gate and then the F of up.

    Otherwise as `matmul`; names are those of `GATED_BACKENDS`.
    """
    return GATED_BACKENDS[backend](x_MI, w_OI, following=following)
