"""Norms, embeddings, block shapes, ropes and logits maps against their definitions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.cache.collective import ALONE
from jaxllm.nn import blocks
from jaxllm.nn.blocks import Carry
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.embedding import PositionedEmbedding, ScaledEmbedding
from jaxllm.nn.linear import Init
from jaxllm.nn.logits import Scale, Softcap
from jaxllm.nn.mlp import MLP
from jaxllm.nn.norm import LayerNorm, RMSNorm
from jaxllm.nn.rope import LongRope, NoRope, PartialRope, StaticRope

WIDTH, TOKENS = 8, 5


def init() -> Init:
    return Init(nnx.Rngs(0), jnp.float32)


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_norm_is_its_definition(bias: bool) -> None:
    norm = LayerNorm(init(), WIDTH, 1e-3, bias)
    norm.weight[...] = random(WIDTH, seed=1)
    if norm.bias is not None:
        norm.bias[...] = random(WIDTH, seed=2)
    x, delta = random(TOKENS, WIDTH) * 3 + 1, random(TOKENS, WIDTH, seed=3)
    exact = np.asarray(x + delta, np.float64)
    expected = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(
        exact.var(-1, keepdims=True) + 1e-3
    )
    expected = expected * norm.weight[...] + (0 if norm.bias is None else norm.bias[...])
    total, normed = norm.add(x, delta, DenseContext())
    np.testing.assert_array_equal(total, x + delta)
    np.testing.assert_allclose(normed, expected, atol=1e-5)
    assert [rule.parameter for rule in norm.rules("n")] == ["weight", "bias"][: 1 + bias]


def test_a_plain_feed_forward_is_its_definition() -> None:
    mlp = MLP(init(), WIDTH, 12, "relu2", bias=True)
    mlp.up.bias[...], mlp.down.bias[...] = random(12, seed=1), random(WIDTH, seed=2)
    x = random(TOKENS, WIDTH) * 20
    hidden = np.maximum(x @ mlp.up.weight[...].T + mlp.up.bias[...], 0) ** 2
    expected = hidden @ mlp.down.weight[...].T + mlp.down.bias[...]
    np.testing.assert_allclose(mlp(x, DenseContext()), expected, rtol=1e-4, atol=1e-4)


def test_embeddings_are_scaled_in_float32_and_positions_are_added() -> None:
    scaled = ScaledEmbedding(Init(nnx.Rngs(0), jnp.bfloat16), 10, WIDTH, None, 1.003)
    token, position = jnp.array([3, 3, 9]), jnp.array([0, 2, 1])
    expected = (scaled.weight[...][token].astype(jnp.float32) * 1.003).astype(jnp.bfloat16)
    np.testing.assert_array_equal(scaled(token, position, DenseContext()), expected)
    placed = PositionedEmbedding(init(), 10, WIDTH, None, 4)
    np.testing.assert_array_equal(
        placed(token, position, DenseContext()),
        placed.weight[...][token] + placed.positions.weight[...][position],
    )


class Doubled(nnx.Module):
    """Stands for attention."""

    def __call__(self, layer: int, x_TD: jax.Array, rotation: Any, context: Any) -> jax.Array:
        return 2 * x_TD


def tripled(x_TD: jax.Array, context: Any) -> jax.Array:
    """Stands for a feed-forward."""
    return 3 * x_TD


def sum_of(kind: str, x: np.ndarray, norms: dict[str, RMSNorm]) -> np.ndarray:
    """The residual stream after a block, from the definition of its kind."""
    first, second = norms["attention_norm"], norms["mlp_norm"]
    if kind == "ParallelBlock":
        return x + 2 * first(x) + 3 * second(x)
    if kind == "PostNormBlock":
        x = x + first(2 * x)
        return x + second(3 * x)
    if kind == "SandwichBlock":
        x = x + norms["attention_out_norm"](2 * first(x))
        return x + norms["mlp_out_norm"](3 * second(x))
    factor = 0.5 if kind == "ScaledBlock" else 1
    x = x + factor * 2 * first(x)
    return x + factor * 3 * second(x)


KINDS = {"Block": {}, "ScaledBlock": {"factor": 0.5}, "SandwichBlock": {}, "PostNormBlock": {}}


@pytest.mark.parametrize("kind", [*KINDS, "ParallelBlock"])
def test_a_block_is_its_definition_and_its_carry_may_be_packed(kind: str) -> None:
    names = ["attention_norm", "mlp_norm"]
    names += ["attention_out_norm", "mlp_out_norm"] if kind == "SandwichBlock" else []
    norms = {name: RMSNorm(init(), WIDTH, 1e-5) for name in names}
    for seed, norm in enumerate(norms.values()):
        norm.weight[...] = random(WIDTH, seed=seed + 1)
    block = getattr(blocks, kind)(attention=Doubled(), mlp=tripled, **norms, **KINDS.get(kind, {}))
    x, context = random(TOKENS, WIDTH), DenseContext()
    first = block.attend(0, Carry(x), None, context)
    expected = sum_of(kind, sum_of(kind, x, norms), norms)
    second = block.attend(1, block.feed_forward(first, context), None, context)
    found = block.feed_forward(second, context)
    np.testing.assert_allclose(found.settled(ALONE), expected, rtol=1e-5, atol=1e-5)
    rows = jnp.array([4, 0])
    picked = block.feed_forward(second.rows(rows), context)
    np.testing.assert_allclose(picked.settled(ALONE), expected[rows], rtol=1e-5, atol=1e-5)
    width = 2 * WIDTH if kind == "ParallelBlock" else WIDTH
    assert second.packed(ALONE).shape == (TOKENS, width)


def test_a_parallel_block_may_have_one_norm() -> None:
    norm = RMSNorm(init(), WIDTH, 1e-5)
    block = blocks.ParallelBlock(
        attention_norm=norm, attention=Doubled(), mlp_norm=None, mlp=tripled
    )
    x, context = random(TOKENS, WIDTH), DenseContext()
    found = block.feed_forward(block.attend(0, Carry(x), None, context), context)
    np.testing.assert_allclose(found.settled(ALONE), x + 5 * norm(x), rtol=1e-5)


def test_logits_are_scaled_and_capped() -> None:
    logits = random(2, 7) * 40
    np.testing.assert_allclose(Scale(0.25)(logits), logits / 4)
    np.testing.assert_allclose(Softcap(30.0)(logits), 30 * np.tanh(logits / 30), rtol=1e-5)


def test_dimensions_that_pass_have_angles_of_zero() -> None:
    position = jnp.arange(TOKENS)
    cos, sin, *_ = PartialRope(StaticRope((1.0, 0.1), 1.5), 3)(position, None)
    assert cos.shape == sin.shape == (TOKENS, 5)
    np.testing.assert_array_equal(cos[:, 2:], 1)
    np.testing.assert_array_equal(sin[:, 2:], 0)
    np.testing.assert_allclose(cos[:, 0], 1.5 * np.cos(np.arange(TOKENS)), rtol=1e-5)
    for wanted, found in zip((1, 0), NoRope(4)(position, None)[:2], strict=True):
        np.testing.assert_array_equal(found, np.full((TOKENS, 4), wanted, np.float32))


def test_a_long_rope_is_chosen_by_what_is_served_not_by_a_sequence() -> None:
    short, long = StaticRope((1.0,)), StaticRope((0.1,))
    rope = PartialRope(LongRope(short, long, 16, 64), 1)
    position = jnp.arange(3)
    for length, table in ((16, short), (17, long), (64, long)):
        cos = rope.serving(length)(position, None).cos_TF
        np.testing.assert_array_equal(cos[:, :1], table(position, None)[0])
