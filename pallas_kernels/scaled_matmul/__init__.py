"""Products with weights of 8 bits: numbers times scales, of rows or of groups of columns."""

from __future__ import annotations

from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.backends import Backends
from pallas_kernels.gated_matmul.gating import Gating, computes
from pallas_kernels.grouped_matmul import Groups
from pallas_kernels.parts import Parts, Product
from pallas_kernels.scaled_matmul.experts import ScaledExperts
from pallas_kernels.scaled_matmul.plan import K, is_faster, room_of
from pallas_kernels.scaled_matmul.rounding import (
    IN_16_BITS,
    INPUTS,
    Inputs,
    RoundedRows,
    Rounding,
    in_steps,
    largest,
    rounded,
    spread,
)

__all__ = [
    "BACKENDS",
    "GROUP",
    "INPUTS",
    "Inputs",
    "RoundedRows",
    "Rounding",
    "ScaledExperts",
    "backend_for",
    "experts_fit",
    "gated_rows",
    "gates",
    "in_steps",
    "largest",
    "rounded",
    "rounding_for",
    "scaled_matmul",
    "scaled_parts",
    "scaled_sums",
    "spread",
    "takes_group",
    "takes_plain",
]

GROUP = K  # columns that share a scale, where not all of a row do: what kernels take
NAMES = ("reference", "mosaic_gpu")
BACKENDS = Backends(__name__, "scaled_matmul", NAMES)
PARTS = Backends(__name__, "scaled_parts", NAMES)
SUMS = Backends(__name__, "scaled_sums", NAMES)


def scaled_matmul(
    x_TI: Inputs,
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
    float32, or of 16 bits where inputs are "plain"; the last group may be cut off. `inputs` says
    how x is rounded to the weight's type before, one of `INPUTS`; "given" needs `input_scale`, a
    float32 scalar. x may be rounded already, see `rounding_for`. Raises `UnknownBackend` for a name
    not in `BACKENDS`, and ValueError for what the back end does not support.

    "shifted" needs an int8 weight. Its integers have 9 bits, so the product is made as one of
    "plain" inputs.
    """
    return BACKENDS[backend](x_TI, w_OI, scale_OG, group, inputs, input_scale)


def scaled_parts(
    x_TI: Inputs,
    w_OI: Array,
    scale_OG: Array,
    *,
    group: int,
    inputs: str,
    input_scale: Array | None = None,
    backend: str,
) -> Product:
    """`scaled_matmul`, in parts where the back end has some, for a reader that adds them up."""
    return PARTS[backend](x_TI, w_OI, scale_OG, group, inputs, input_scale)


def scaled_sums(
    x_TI: Array, w_OI: Array, scale_OG: Array, *, group: int, inputs: str, backend: str
) -> Array:
    """`scaled_matmul` in float32, whose sums are not rounded, of inputs that are "plain"."""
    return SUMS[backend](x_TI, w_OI, scale_OG, group, inputs)


def gated_rows(product: Product, rounding: Rounding, *, gating: Gating, backend: str) -> Inputs:
    """gating(gate, up) of a product `[T, 2F]` whose first F columns are the gate's, rounded for the
    product that reads it. The reference serves where the back end does not take these; what it
    makes of few tokens stays plain where a kernel will round it."""
    from pallas_kernels.scaled_matmul import reference

    if backend != "mosaic_gpu" or not computes(gating):
        return reference.gated_rows(product, rounding, gating)
    from pallas_kernels.scaled_matmul import mosaic_gating, mosaic_gating_few

    if mosaic_gating_few.supports(product, rounding):
        return mosaic_gating_few.gated_rows(product, rounding, gating)
    if mosaic_gating.supports(product, rounding):
        assert isinstance(product, Parts)
        return mosaic_gating.gated_rows(product, rounding, gating)
    if is_faster(product.shape[0], grouped=False):
        return reference.gated(product, gating)
    return reference.gated_rows(product, rounding, gating)


def gates(wanted: str, gating: Gating) -> bool:
    """Whether `gated_rows` is faster than the activation and the rounding by themselves."""
    return wanted == "mosaic_gpu" and computes(gating)


def backend_for(
    wanted: str, x_TI: Inputs, w_OI: Array, scale_OG: Array, group: int, inputs: str
) -> str:
    """`wanted` if that back end supports these arrays, else the reference."""
    supported = BACKENDS.supports(wanted, x_TI, w_OI, scale_OG, group, inputs)
    return wanted if supported else "reference"


def rounding_for(wanted: str, tokens: int, dtype: DTypeLike) -> Rounding:
    """What `scaled_matmul` takes in place of so many tokens, with a weight of this type and one
    scale a row, where `inputs` is "token"."""
    return Rounding(dtype, room_of(tokens) if wanted == "mosaic_gpu" else tokens)


def takes_group(group: int | None, inputs: str) -> bool:
    """Whether kernels take scales of so many columns, None of all; of inputs rounded this way."""
    from pallas_kernels.scaled_matmul import mosaic_converted

    wide = inputs in IN_16_BITS
    return mosaic_converted.takes_group(group) if wide else group in (None, GROUP)


def takes_plain(columns: int, group: int | None) -> bool:
    """Whether kernels take weights of so many columns, `group` of which share a scale, with inputs
    that are "plain"."""
    return columns % K == 0 and takes_group(group, "plain")


def experts_fit(rows: int, columns: int, gated: bool, inputs: str) -> bool:
    """Whether `grouped_scaled_matmul` takes experts of so many rows, gate's and up's where `gated`,
    and columns, with inputs rounded this way."""
    from pallas_kernels.grouped_matmul.mosaic_gpu import fits_units
    from pallas_kernels.scaled_matmul import mosaic_converted

    if inputs == "shifted":
        return False
    if inputs == "plain":
        return mosaic_converted.fits(rows, columns)
    return fits_units(rows, columns, gated, K)


def takes_experts(x_PI: Array, w: ScaledExperts, groups: Groups, gating: Gating | None) -> bool:
    """Whether `grouped_scaled_matmul` takes these."""
    from pallas_kernels.scaled_matmul import mosaic_grouped

    try:
        mosaic_grouped.check(x_PI, w, groups, gating)
    except ValueError:
        return False
    return True


def grouped_scaled_matmul(
    x_PI: Array,
    w: ScaledExperts,
    groups: Groups,
    bias_EO: Array | None = None,
    gating: Gating | None = None,
) -> Array:
    """Each row times the weight of its expert on NVIDIA Hopper, see `grouped_matmul`. Raises
    ValueError for what `takes_experts` does not."""
    from pallas_kernels.scaled_matmul import mosaic_grouped

    return mosaic_grouped.grouped_scaled_matmul(x_PI, w, groups, bias_EO, gating)
