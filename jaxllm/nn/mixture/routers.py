"""Routers: which experts of a mixture compute a token, and with what weights. All in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.rules import Piece, Rule
from jaxllm.nn.weight.parameters import Init, contract
from pallas_kernels import route
from pallas_kernels.grouped_matmul import Groups
from pallas_kernels.route import GroupLimit, normalised, softmax, unchanged

__all__ = ["GroupLimit", "Router", "Routing", "normalised", "softmax", "unchanged"]


@dataclass(frozen=True)
class Routing(route.Rule):
    """How a router scores and chooses.

    Attributes:
        biased: the linear map has a bias.
        corrected: experts are chosen by score plus a correction of their own, which their weights
            do not see.
    """

    biased: bool = False
    corrected: bool = False

    def shortest(self) -> Self:
        """The same routing with fewest operations: softmax of all experts, divided by the sum of
        the chosen, is softmax of the chosen."""
        known = self.score is softmax and self.weigh is normalised
        if not known or self.corrected or self.limit is not None:
            return self
        return replace(self, score=unchanged, weigh=softmax)


class Router(nnx.Module):
    """Chooses experts by the scores of a linear map, of equal ones those of lower number.

    `weight` is `[E, D]`, `bias`, where there is one, `[E]`; so is `correction`, in float32.
    """

    def __init__(self, init: Init, width: int, experts: int, routing: Routing):
        self.weight = init.normal((experts, width), (None, "embed"))
        if routing.biased:
            self.bias = init.full((experts,), (None,), 0.0)
        else:
            self.bias = None
        if routing.corrected:
            self.correction = nnx.Param(jnp.zeros((experts,), jnp.float32), axes=(None,))
        else:
            self.correction = None
        self.routing = routing.shortest()

    def __call__(self, x_TD: Array, context: RowContext) -> tuple[Groups, Array]:
        """The rows of this device's experts, and weights (float32) of each token's choices,
        `[T, K]`."""
        correction = None
        if self.correction is not None:
            correction = self.correction[...]
        return context.route(self.logits(x_TD), correction, self.routing)

    def logits(self, x_TD: Array) -> Array:
        """The logits `[T, E]` of all experts, in float32."""
        weight = self.weight[...]
        logits_TE = contract(x_TD.astype(weight.dtype), weight, 1, jnp.float32)
        if self.bias is None:
            return logits_TE
        return logits_TE + self.bias[...]

    def rules(self, *names: str) -> Iterator[Rule]:
        """`names` are full names of checkpoint tensors: of the weight, the bias and the correction,
        as far as there are any; further such groups are other spellings."""
        parameters = {"weight": self.weight, "bias": self.bias, "correction": self.correction}
        held = {leaf: parameter for leaf, parameter in parameters.items() if parameter is not None}
        for index, (leaf, parameter) in enumerate(held.items()):
            shape = parameter.get_value().shape
            first, *others = ((Piece(name, shape, shape),) for name in names[index :: len(held)])
            yield Rule(leaf, first, tuple(others))
