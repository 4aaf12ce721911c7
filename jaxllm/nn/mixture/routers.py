"""Routers: which experts of a mixture compute a token, and with what weights. All in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxllm.nn.rules import Piece, Rule
from jaxllm.nn.weight.parameters import Init, contract

type Score = Callable[[Array], Array]  # of logits [T, E]
type Weigh = Callable[[Array], Array]  # of the scores [T, K] of chosen experts


def softmax(logits: Array) -> Array:
    """Over the last axis: of all experts as a score, of the chosen ones as weights."""
    return jax.nn.softmax(logits, axis=-1)


def unchanged(scores: Array) -> Array:
    """The scores themselves."""
    return scores


def normalised(scores: Array) -> Array:
    """Scores of chosen experts, divided by their sum."""
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)


@dataclass(frozen=True)
class GroupLimit:
    """Tokens choose among the experts of their best groups.

    Attributes:
        groups: of equally many neighbouring experts.
        kept: groups that stay.
        best: experts whose scores are summed to score a group.
    """

    groups: int
    kept: int
    best: int

    def __call__(self, score_TE: Array) -> Array:
        """The scores, -inf in the groups that are dropped. Of equal groups the first stays."""
        score_TGM = score_TE.reshape(score_TE.shape[0], self.groups, -1)
        group_TG = jnp.sum(lax.top_k(score_TGM, self.best)[0], axis=-1)
        kept_TG = jnp.zeros(group_TG.shape, bool)
        token_T = jnp.arange(score_TE.shape[0])
        kept_TG = kept_TG.at[token_T[:, None], lax.top_k(group_TG, self.kept)[1]].set(True)
        return jnp.where(kept_TG[:, :, None], score_TGM, -jnp.inf).reshape(score_TE.shape)


@dataclass(frozen=True)
class Routing:
    """How experts are chosen and weighed.

    Attributes:
        choices: experts that compute a token, those of highest score.
        score: turns logits into scores.
        weigh: turns the scores of the chosen into weights.
        scale: factor of the weights.
        limit: drops groups of experts; None keeps all.
        biased: the linear map has a bias.
        corrected: experts are chosen by score plus a correction of their own, which their weights
            do not see.
    """

    choices: int
    score: Score = softmax
    weigh: Weigh = normalised
    scale: float = 1.0
    limit: GroupLimit | None = None
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
        self.weight = init.normal((experts, width), ("expert", "embed"))
        self.bias = init.full((experts,), ("expert",), 0.0) if routing.biased else None
        self.correction = (
            nnx.Param(jnp.zeros((experts,), jnp.float32), axes=("expert",))
            if routing.corrected
            else None
        )
        self.routing = routing.shortest()

    def __call__(self, x_TD: Array) -> tuple[Array, Array]:
        """Experts (int32) and weights (float32) of each token, both `[T, K]`."""
        routing = self.routing
        weight = self.weight[...]
        logits_TE = contract(x_TD.astype(weight.dtype), weight, 1, jnp.float32)
        logits_TE = logits_TE if self.bias is None else logits_TE + self.bias[...]
        score_TE = routing.score(logits_TE)
        rank_TE = score_TE if self.correction is None else score_TE + self.correction[...]
        rank_TE = rank_TE if routing.limit is None else routing.limit(rank_TE)
        rank_TK, expert_TK = lax.top_k(rank_TE, routing.choices)
        chosen_TK = (
            rank_TK if self.correction is None else jnp.take_along_axis(score_TE, expert_TK, axis=1)
        )
        return expert_TK, routing.weigh(chosen_TK) * routing.scale

    def rules(self, *names: str) -> Iterator[Rule]:
        """`names` are full names of checkpoint tensors: of the weight, the bias and the correction,
        as far as there are any; further such groups are other spellings."""
        own = {"weight": self.weight, "bias": self.bias, "correction": self.correction}
        held = {leaf: parameter for leaf, parameter in own.items() if parameter is not None}
        for index, (leaf, parameter) in enumerate(held.items()):
            shape = parameter.get_value().shape
            first, *others = ((Piece(name, shape, shape),) for name in names[index :: len(held)])
            yield Rule(leaf, first, tuple(others))
