"""Routing of a mixture of experts: which experts compute a token, with what weights, and the rows
of each expert."""

from __future__ import annotations

from jax import Array

from pallas_kernels.backends import Backends
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.route.rules import GroupLimit, Rule, normalised, softmax, unchanged
from pallas_kernels.target import ANYWHERE, HOPPER, Target

__all__ = [
    "BACKENDS",
    "GroupLimit",
    "Rule",
    "choose",
    "normalised",
    "route",
    "softmax",
    "unchanged",
]

BACKENDS = Backends(__name__, "route", {"reference": ANYWHERE, "mosaic_gpu": HOPPER})


def route(
    logit_TE: Array, correction_E: Array | None, rule: Rule, *, backend: str
) -> tuple[Groups, Array]:
    """The rows of all experts, and the weights of each token's choices `[T, K]` (float32), of
    float32 logits.

    Choices and weights are those of `Rule.choose`, rows those of `grouped_matmul.group`. Raises
    `UnknownBackend` for a name not in `BACKENDS`, and ValueError for shapes or rules that the back
    end does not support.
    """
    return BACKENDS[backend](logit_TE, correction_E, rule)


def choose(target: Target, logit_TE: Array, rule: Rule) -> str:
    """The back end for these logits and this rule on a target."""
    return BACKENDS.choose(target, logit_TE, rule)
