"""Products with weights of 8 bits: numbers times scales, of rows or of groups of columns."""

from __future__ import annotations

from typing import Any

from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.backends import Backends
from pallas_kernels.gated_matmul.gating import Gating
from pallas_kernels.grouped_matmul import Groups
from pallas_kernels.parts import Product
from pallas_kernels.scaled_matmul.experts import ScaledExperts
from pallas_kernels.scaled_matmul.plan import K, takes_group
from pallas_kernels.scaled_matmul.rounding import (
    INPUTS,
    Inputs,
    RoundedRows,
    Rounding,
    in_steps,
    largest,
    rounded,
    spread,
)
from pallas_kernels.target import ANYWHERE, HOPPER, Target

__all__ = [
    "BACKENDS",
    "GROUP",
    "INPUTS",
    "Inputs",
    "RoundedRows",
    "Rounding",
    "ScaledExperts",
    "choose",
    "choose_gated_rows",
    "experts_fit",
    "find_grouped",
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
    "takes_plain",
]

GROUP = K  # columns that share a scale, where not all of a row do: what kernels take
NEEDS = {"reference": ANYWHERE, "mosaic_gpu": HOPPER}
BACKENDS = Backends(__name__, "scaled_matmul", NEEDS)
PARTS = Backends(__name__, "scaled_parts", NEEDS)
SUMS = Backends(__name__, "scaled_sums", NEEDS)
GATED_ROWS = Backends(
    __name__,
    "gated_rows",
    {
        "reference": ANYWHERE,
        "deferred": HOPPER,
        "mosaic_gating": HOPPER,
        "mosaic_gating_few": HOPPER,
    },
)
GROUPED = Backends(__name__, "grouped_scaled_matmul", {"mosaic_grouped": HOPPER})


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
    product that reads it; plain where the back end leaves the rounding to that."""
    return GATED_ROWS[backend](product, rounding, gating)


def choose_gated_rows(target: Target, product: Product, rounding: Rounding, gating: Gating) -> str:
    """The back end of `gated_rows` for these on a target."""
    return GATED_ROWS.choose(target, product, rounding, gating)


def gates(target: Target, gating: Gating) -> bool:
    """Whether a target has kernels of `gated_rows` with this gating, which are faster than the
    activation and the rounding by themselves."""
    kernels = (name for name in GATED_ROWS.suited(target) if not GATED_ROWS.runs_anywhere(name))
    return any(GATED_ROWS.fact(name, "gates", _never)(gating) for name in kernels)


def choose(
    target: Target, x_TI: Inputs, w_OI: Array, scale_OG: Array, group: int, inputs: str
) -> str:
    """The back end of products of these on a target."""
    return BACKENDS.choose(target, x_TI, w_OI, scale_OG, group, inputs)


def rounding_for(target: Target, tokens: int, dtype: DTypeLike) -> Rounding:
    """What `scaled_matmul` takes in place of so many tokens, with a weight of this type and one
    scale a row, where `inputs` is "token"."""
    room_of = BACKENDS.fact(BACKENDS.suited(target)[0], "room_of", _as_many)
    return Rounding(dtype, room_of(tokens))


def takes_plain(columns: int, group: int | None) -> bool:
    """Whether kernels take weights of so many columns, `group` of which share a scale, with inputs
    that are "plain"."""
    return columns % K == 0 and takes_group(group)


def find_grouped(
    target: Target, x_PI: Array, w: ScaledExperts, groups: Groups, gating: Gating | None
) -> str | None:
    """The back end of `grouped_scaled_matmul` for these; None where none takes them."""
    return GROUPED.find(target, x_PI, w, groups, gating)


def experts_fit(
    target: Target, sizes: tuple[int, int], gated: bool, group: int | None, inputs: str
) -> bool:
    """Whether `grouped_scaled_matmul` on a target takes experts of so many rows, gate's and up's
    where `gated`, and columns, `group` of which share a scale, with inputs rounded this way."""
    checks = [GROUPED.fact(name, "fits", _never) for name in GROUPED.suited(target)]
    return any(fits(*sizes, gated, group, inputs) for fits in checks)


def grouped_scaled_matmul(
    x_PI: Array,
    w: ScaledExperts,
    groups: Groups,
    bias_EO: Array | None = None,
    gating: Gating | None = None,
    *,
    backend: str,
) -> Array:
    """Each row times the weight of its expert, see `grouped_matmul`. Raises ValueError for what the
    back end does not take."""
    return GROUPED[backend](x_PI, w, groups, bias_EO, gating)


def _as_many(tokens: int) -> int:
    return tokens


def _never(*shapes: Any) -> bool:
    return False
