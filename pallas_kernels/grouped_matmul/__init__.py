"""Products of tokens with the matrices of the experts that they chose: each row of x meets the
weight of its own expert alone."""

from __future__ import annotations

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
from pallas_kernels.grouped_matmul.reference import by_tile
from pallas_kernels.target import ANYWHERE, HOPPER, Target

__all__ = [
    "BACKENDS",
    "Experts",
    "Gating",
    "Groups",
    "by_tile",
    "choose",
    "combine",
    "feed_forward",
    "find_one_launch",
    "group",
    "group_tokens",
    "grouped_matmul",
    "own_groups",
    "rows_for",
    "tile_for",
]

BACKENDS = Backends(__name__, "grouped_matmul", {"reference": ANYWHERE, "mosaic_gpu": HOPPER})
ONE_LAUNCH = Backends(__name__, "feed_forward", {"mosaic_fused": HOPPER})


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


def choose(target: Target, x_PI: Array, w_EOI: Array, groups: Groups, gating: Gating | None) -> str:
    """The back end for these arrays on a target."""
    return BACKENDS.choose(target, x_PI, w_EOI, groups, gating)


def find_one_launch(
    target: Target, x_PI: Array, experts: Experts, groups: Groups, gating: Gating
) -> str | None:
    """The back end of `feed_forward` for these; None where two products are as fast."""
    return ONE_LAUNCH.find(target, x_PI, experts, groups, gating)


def feed_forward(
    x_PI: Array, experts: Experts, groups: Groups, gating: Gating, *, backend: str
) -> Array:
    """down(gating(gate(x), up(x))) of each row's expert: two products of `grouped_matmul` in one
    launch. Raises ValueError for what the back end does not take."""
    return ONE_LAUNCH[backend](x_PI, experts, groups, gating)
