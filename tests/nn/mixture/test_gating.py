"""Experts with biases and gatings of their own, token by token."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.linear import Init
from jaxllm.nn.mixture.experts import ExpertMaps, Experts
from pallas_kernels.grouped_matmul import group

EXPERTS, CHOICES, WIDTH, INNER = 6, 3, 5, 4


def clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    """A gating that is no activation times up."""
    gate, up = jnp.minimum(gate, 0.5), jnp.clip(up, -0.5, 0.5)
    return gate * jax.nn.sigmoid(1.7 * gate) * (up + 1)


def tanh(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jnp.tanh(gate) * up


def experts(gating: Callable[[jax.Array, jax.Array], jax.Array], bias: bool) -> Experts:
    init = Init(nnx.Rngs(3), jnp.float32)
    axes = ("expert", None, "embed")
    module = Experts(
        ExpertMaps(init, (EXPERTS, 2 * INNER, WIDTH), axes, parts=2, bias=bias),
        ExpertMaps(init, (EXPERTS, WIDTH, INNER), ("expert", "embed", None), bias=bias),
        gating,
    )
    for seed, maps in enumerate((module.gate_up, module.down)):
        maps.weight[...] = jax.random.normal(jax.random.key(seed), maps.weight.shape)
        if maps.bias is not None:
            maps.bias[...] = jax.random.normal(jax.random.key(9 + seed), maps.bias.shape)
    return module


def expected(module: Experts, x: np.ndarray, expert: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Every token by every expert that it chose, one after another."""
    out = np.zeros_like(x)
    numbers = [np.asarray(maps.weight[...]) for maps in (module.gate_up, module.down)]
    biases = [
        0 * w[..., 0] if maps.bias is None else np.asarray(maps.bias[...])
        for maps, w in zip((module.gate_up, module.down), numbers, strict=True)
    ]
    for t, (own, weights) in enumerate(zip(expert, weight, strict=True)):
        for e, factor in zip(own, weights, strict=True):
            gate, up = np.split(numbers[0][e] @ x[t] + biases[0][e], 2)
            hidden = np.asarray(module.gating(jnp.asarray(gate), jnp.asarray(up)))
            out[t] += factor * (numbers[1][e] @ hidden + biases[1][e])
    return out


def choices(tokens: int, law: str) -> tuple[np.ndarray, np.ndarray]:
    """Different experts for each token, and weights that need not add up to one."""
    rng = np.random.default_rng(5)
    if law == "all alike":  # all rows go to three experts, the others have none
        expert = np.tile(np.array([4, 0, 2], np.int32), (tokens, 1))
    else:
        expert = np.stack([rng.permutation(EXPERTS)[:CHOICES] for _ in range(tokens)])
    return expert.astype(np.int32), rng.uniform(0.1, 2.0, (tokens, CHOICES)).astype(np.float32)


def routed(module: Experts, x: jax.Array, expert: np.ndarray, weight: np.ndarray) -> jax.Array:
    groups = group(jnp.asarray(expert), EXPERTS)
    return module(x, groups, jnp.asarray(weight), DenseContext()).whole


@pytest.mark.parametrize("law", ["spread", "all alike"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gating", [clamped, tanh])
def test_experts_are_what_each_of_them_computes(
    gating: Callable[[jax.Array, jax.Array], jax.Array], bias: bool, law: str
) -> None:
    module, tokens = experts(gating, bias), 19
    expert, weight = choices(tokens, law)
    x = np.random.default_rng(1).normal(size=(tokens, WIDTH)).astype(np.float32)
    found = routed(module, jnp.asarray(x), expert, weight)
    np.testing.assert_allclose(found, expected(module, x, expert, weight), rtol=1e-4, atol=1e-4)


def test_a_token_alone_gets_what_it_gets_among_others() -> None:
    module, tokens = experts(clamped, True), 19
    expert, weight = choices(tokens, "spread")
    x = jnp.asarray(np.random.default_rng(1).normal(size=(tokens, WIDTH)), jnp.float32)
    together = routed(module, x, expert, weight)
    for t in (0, 7, 18):
        own = slice(t, t + 1)
        alone = routed(module, x[own], expert[own], weight[own])
        np.testing.assert_allclose(alone, together[own], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_every_experts_tensors_fill_rows_of_their_own(bias: bool) -> None:
    maps = experts(tanh, bias).gate_up
    (rule,) = maps.rules("e.{}.gate", "e.{}.up")
    assert sorted((piece.name, piece.row, piece.start) for piece in rule.pieces) == sorted(
        (f"e.{e}.{part}", e, start)
        for e in range(EXPERTS)
        for part, start in (("gate", 0), ("up", INNER))
    )
    assert all(piece.source == (INNER, WIDTH) for piece in rule.pieces)
