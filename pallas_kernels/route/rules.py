"""How a mixture's experts are chosen and weighed, in plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

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
class Rule:
    """How experts are chosen and weighed.

    Attributes:
        choices: experts that compute a token, those of highest score.
        score: turns logits into scores.
        weigh: turns the scores of the chosen into weights.
        scale: factor of the weights.
        limit: drops groups of experts; None keeps all.
    """

    choices: int
    score: Score = softmax
    weigh: Weigh = normalised
    scale: float = 1.0
    limit: GroupLimit | None = None

    def choose(self, logit_TE: Array, correction_E: Array | None = None) -> tuple[Array, Array]:
        """Experts (int32) and weights (float32) of each token, both `[T, K]`.

        Of equal experts those of lower number are chosen. The correction is added to scores to
        choose, and no weight sees it.
        """
        score_TE = self.score(logit_TE)
        if correction_E is None:
            rank_TE = score_TE
        else:
            rank_TE = score_TE + correction_E
        if self.limit is not None:
            rank_TE = self.limit(rank_TE)
        rank_TK, expert_TK = lax.top_k(rank_TE, self.choices)
        if correction_E is None:
            chosen_TK = rank_TK
        else:
            chosen_TK = jnp.take_along_axis(score_TE, expert_TK, axis=1)
        return expert_TK, self.weigh(chosen_TK) * self.scale
