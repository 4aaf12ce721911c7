"""Products of tokens with the matrices of the experts that they chose: each row of x meets the
weight of its own expert alone."""

from __future__ import annotations

import jax
from jax import Array

from pallas_kernels.backends import Backends
from pallas_kernels.gated_matmul.gating import Gating
from pallas_kernels.grouped_matmul.experts import Experts
from pallas_kernels.grouped_matmul.groups import (
    Groups,
    combine,
    group,
    group_tokens,
    own_groups,
    rows_for,
    tile_for,
)
from pallas_kernels.grouped_matmul.plan import is_one_launch
from pallas_kernels.grouped_matmul.reference import by_tile

__all__ = [
    "BACKENDS",
    "Experts",
    "Gating",
    "Groups",
    "backend_for",
    "by_tile",
    "combine",
    "feed_forward",
    "group",
    "group_tokens",
    "grouped_matmul",
    "own_groups",
    "rows_for",
    "takes_one_launch",
    "tile_for",
]

BACKENDS = Backends(__name__, "grouped_matmul", ("reference", "mosaic_gpu"))


def grouped_matmul(
    x_PI: Array,
    w_EOI: Array,
    groups: Groups,
    *,
    bias_EO: Array | None = None,
    gating: Gating | None = None,
    backend: str,
) -> Array:
    """x · weightᵀ + bias of each row's expert, summed in float32; returns `y_PO` in x's dtype.

    `x_PI` holds the rows of `groups`, tile by tile, or the tokens. With `gating`, the weight holds
    F rows of the gate and then F of up, and the result is `gating(gate, up)`, `y_PF`. Rows that no
    token takes hold arbitrary values. Raises `UnknownBackend` for a name not in `BACKENDS`, and
    ValueError for shapes or types that the back end does not support.
    """
    return BACKENDS[backend](x_PI, w_EOI, groups, bias_EO, gating)


def backend_for(
    wanted: str, x_PI: Array, w_EOI: Array, groups: Groups, gating: Gating | None
) -> str:
    """`wanted` if that back end supports these arrays, else the reference."""
    return wanted if BACKENDS.supports(wanted, x_PI, w_EOI, groups, gating) else "reference"


def takes_one_launch(
    wanted: str, processors: int, x_PI: Array, experts: Experts, groups: Groups, gating: Gating
) -> bool:
    """Whether `feed_forward` takes these, and is expected to be faster than two products, on a card
    with so many processors; 0: not known."""
    tokens, down = groups.place_TK.shape[0], experts.down_EDF
    if wanted != "mosaic_gpu" or not is_one_launch(tokens, processors):
        return False
    hidden = jax.ShapeDtypeStruct((groups.rows, down.shape[2]), x_PI.dtype)
    return BACKENDS.supports(wanted, x_PI, experts.gate_up_EOI, groups, gating) and (
        BACKENDS.supports(wanted, hidden, down, groups, None)
    )


def feed_forward(x_PI: Array, experts: Experts, groups: Groups, gating: Gating) -> Array:
    """down(gating(gate(x), up(x))) of each row's expert on NVIDIA Hopper: two products of
    `grouped_matmul` in one launch. Raises ValueError for what `takes_one_launch` does not."""
    from pallas_kernels.grouped_matmul import mosaic_fused

    return mosaic_fused.feed_forward(x_PI, experts, groups, gating)
