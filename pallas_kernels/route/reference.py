"""Routing in plain JAX: the oracle, for every shape and rule."""

from __future__ import annotations

from jax import Array

from pallas_kernels.grouped_matmul.groups import Groups, group
from pallas_kernels.route.rules import Rule


def route(logit_TE: Array, correction_E: Array | None, rule: Rule) -> tuple[Groups, Array]:
    """See `pallas_kernels.route`."""
    expert_TK, weight_TK = rule.choose(logit_TE, correction_E)
    return group(expert_TK, logit_TE.shape[1]), weight_TK
