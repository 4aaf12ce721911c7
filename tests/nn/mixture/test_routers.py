"""Which experts a router chooses, and what weights they get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.nn.linear import Init
from jaxllm.nn.mixture.routers import GroupLimit, Router, Routing, normalised, softmax, unchanged
from jaxllm.nn.rules import Piece, Rule

TOKENS, EXPERTS, WIDTH = 40, 12, 6


def router(choices: int = 3, **options: Any) -> Router:
    return Router(Init(nnx.Rngs(0), jnp.float32), WIDTH, EXPERTS, Routing(choices, **options))


def tokens() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((TOKENS, WIDTH)).astype(np.float32) * 50


def logits(module: Router) -> np.ndarray:
    return tokens().astype(np.float64) @ np.asarray(module.weight[...], np.float64).T


def soft(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def best(scores: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-scores, axis=-1, kind="stable")[:, :count]


def choose(module: Router, x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
    correction = None if module.correction is None else module.correction[...]
    return module.routing.choose(module.logits(x_TD), correction)


def check(module: Router, expert: np.ndarray, weight: np.ndarray) -> None:
    found_TK, weight_TK = choose(module, jnp.asarray(tokens()))
    assert found_TK.dtype == jnp.int32 and weight_TK.dtype == jnp.float32
    np.testing.assert_array_equal(found_TK, expert)
    np.testing.assert_allclose(weight_TK, weight, rtol=2e-5)


@pytest.mark.parametrize("weigh", [unchanged, normalised], ids=["as they are", "normalised"])
def test_softmax_then_the_best(weigh: Callable[[jax.Array], jax.Array]) -> None:
    module = router(weigh=weigh, scale=2.5)
    scores = soft(logits(module))
    expert = best(scores, 3)
    weight = np.take_along_axis(scores, expert, 1)
    total = weight.sum(1, keepdims=True) if weigh is normalised else 1.0
    check(module, expert, 2.5 * weight / total)


def test_the_best_then_softmax() -> None:
    module = router(score=unchanged, weigh=softmax)
    expert = best(logits(module), 3)
    check(module, expert, soft(np.take_along_axis(logits(module), expert, 1)))


def test_a_correction_decides_who_is_chosen_and_not_with_what_weight() -> None:
    module = router(score=jax.nn.sigmoid, corrected=True)
    assert module.correction is not None
    correction = np.linspace(0, 1, EXPERTS).astype(np.float32)
    module.correction[...] = jnp.asarray(correction)
    scores = sigmoid(logits(module))
    expert = best(scores + correction, 3)
    assert (expert != best(scores, 3)).any()
    weight = np.take_along_axis(scores, expert, 1)
    check(module, expert, weight / weight.sum(1, keepdims=True))


@pytest.mark.parametrize(("groups", "kept", "of_best"), [(4, 2, 2), (3, 1, 1), (4, 4, 2)])
def test_only_experts_of_the_best_groups_are_chosen(groups: int, kept: int, of_best: int) -> None:
    module = router(score=jax.nn.sigmoid, limit=GroupLimit(groups, kept, of_best))
    scores = sigmoid(logits(module))
    grouped = scores.reshape(TOKENS, groups, -1)
    total = np.sort(grouped, -1)[:, :, -of_best:].sum(-1)
    keep = np.zeros((TOKENS, groups), bool)
    np.put_along_axis(keep, best(total, kept), True, 1)
    limited = np.where(keep[:, :, None], grouped, -np.inf).reshape(scores.shape)
    expert = best(limited, 3)
    weight = np.take_along_axis(scores, expert, 1)
    check(module, expert, weight / weight.sum(1, keepdims=True))


def test_of_equal_experts_the_first_are_chosen() -> None:
    module = router()
    module.weight[...] = jnp.zeros((EXPERTS, WIDTH))
    found_TK, weight_TK = choose(module, jnp.asarray(tokens()))
    np.testing.assert_array_equal(found_TK, np.tile([0, 1, 2], (TOKENS, 1)))
    np.testing.assert_allclose(weight_TK, 1 / 3, rtol=1e-6)


def test_scores_of_16_bit_tokens_are_not_rounded() -> None:
    module = Router(Init(nnx.Rngs(0), jnp.bfloat16), WIDTH, EXPERTS, Routing(3))
    x_TD = jnp.asarray(tokens(), jnp.bfloat16)
    exact = np.asarray(x_TD, np.float64) @ np.asarray(module.weight[...], np.float64).T
    expert_TK, weight_TK = choose(module, x_TD)
    weight = np.take_along_axis(soft(exact), best(exact, 3), 1)
    np.testing.assert_array_equal(expert_TK, best(exact, 3))
    np.testing.assert_allclose(weight_TK, weight / weight.sum(1, keepdims=True), rtol=1e-5)


def test_a_router_is_filled_under_any_of_its_spellings() -> None:
    shape = (EXPERTS, WIDTH)
    (rule,) = router().rules("a.weight", "b.weight")
    forms = [(Piece(f"{name}.weight", shape, shape),) for name in "ab"]
    assert rule == Rule("weight", forms[0], (forms[1],))
    corrected = list(router(corrected=True).rules("a.weight", "a.bias", "b.weight", "b.bias"))
    assert [r.parameter for r in corrected] == ["weight", "correction"]
    assert corrected[1].others == ((Piece("b.bias", (EXPERTS,), (EXPERTS,)),),)


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_softmax_of_the_chosen_is_softmax_of_all_over_the_sum_of_the_chosen(scale: float) -> None:
    logits = scale * jax.random.normal(jax.random.key(3), (5, EXPERTS))
    routing = Routing(3)
    short = routing.shortest()
    assert (short.score, short.weigh) == (unchanged, softmax)
    wanted = routing.weigh(jax.lax.top_k(routing.score(logits), 3)[0])
    got = short.weigh(jax.lax.top_k(short.score(logits), 3)[0])
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"limit": GroupLimit(2, 1, 1)}, {"corrected": True}, {"weigh": unchanged}],
    ids=["limited", "corrected", "as they are"],
)
def test_routing_that_needs_every_score_keeps_them(options: dict[str, Any]) -> None:
    routing = Routing(2, **options)
    assert routing.shortest() is routing
