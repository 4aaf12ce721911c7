"""Products with weights of 8 bits: numbers times scales, of rows or of groups of columns."""

from __future__ import annotations

from jax import Array

from pallas_kernels.backends import Backends
from pallas_kernels.scaled_matmul.rounding import INPUTS, largest, rounded

__all__ = ["BACKENDS", "INPUTS", "backend_for", "is_faster", "largest", "rounded", "scaled_matmul"]

FEW_ROWS = 64  # measured: up to here cuBLASLt reads the weight at 2.2 to 2.4 TB/s of 4.3
BACKENDS = Backends(__name__, "scaled_matmul", ("reference", "mosaic_gpu"))


def scaled_matmul(
    x_TI: Array,
    w_OI: Array,
    scale_OG: Array,
    *,
    group: int,
    inputs: str,
    input_scale: Array | None = None,
    backend: str,
) -> Array:
    """x · (w · scale)ᵀ, summed in float32; returns `y_TO` in x's type.

    `w_OI` is float8_e4m3fn or int8. Column i of row o has the scale `scale_OG[o, i // group]`,
    float32; the last group may be cut off. `inputs` says how x is rounded to the weight's type
    before, one of `INPUTS`; "given" needs `input_scale`, a float32 scalar. Raises `UnknownBackend`
    for a name not in `BACKENDS`, and ValueError for what the back end does not support.
    """
    return BACKENDS[backend](x_TI, w_OI, scale_OG, group, inputs, input_scale)


def backend_for(
    wanted: str, x_TI: Array, w_OI: Array, scale_OG: Array, group: int, inputs: str
) -> str:
    """`wanted` if that back end supports these arrays and is expected to be faster than the
    reference, else the reference."""
    faster = is_faster(x_TI.shape[0], grouped=scale_OG.shape[1] > 1)
    supported = BACKENDS.supports(wanted, x_TI, w_OI, scale_OG, group, inputs)
    return wanted if faster and supported else "reference"


def is_faster(rows: int, grouped: bool) -> bool:
    """Whether a kernel is faster than what XLA makes of the reference on Hopper.

    With a scale for each row that is a product of cuBLASLt's in 8 bits, as fast as the card for
    many rows, but at 2.4 TB/s for few. With groups of columns XLA multiplies in 16 bits.
    """
    return grouped or rows <= FEW_ROWS
