"""Rotary angles, activations, heads and names of tensors against their definitions."""

from __future__ import annotations

import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

from jaxllm import models
from jaxllm.models.config.build import outline
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.heads import Heads
from jaxllm.nn.linear import Init, Linear
from jaxllm.nn.mlp import ACTIVATIONS, GatedMLP
from jaxllm.nn.rope import DynamicRope, StaticRope
from jaxllm.nn.rules import Piece
from jaxllm.nn.weight.parameters import contract
from tests.goldens.cases import CASES

ERF = np.vectorize(math.erf)


def tanh_gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


DEFINITIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "swish": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + ERF(x / math.sqrt(2))) / 2,
    "gelu_new": tanh_gelu,
    "gelu_pytorch_tanh": tanh_gelu,
    "gelu_python": lambda x: x * (1 + ERF(x / math.sqrt(2))) / 2,
    "gelu_fast": tanh_gelu,
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_its_definition(name: str) -> None:
    x = np.linspace(-6, 6, 49)
    found = ACTIVATIONS[name](jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, DEFINITIONS[name](x), atol=1e-5)


@pytest.mark.parametrize("name", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_a_feed_forward_is_its_definition(name: str, bias: bool, shards: int) -> None:
    mlp = GatedMLP(Init(nnx.Rngs(0), jnp.float32), 6, 8, shards, name, bias)
    if bias:
        mlp.gate_up.bias[...] = jax.random.normal(jax.random.key(1), (shards, 2, 8 // shards))
        mlp.down.bias[...] = jnp.arange(6.0)
    x = np.asarray(jax.random.normal(jax.random.key(2), (5, 6)), np.float64) * 20
    weight = np.asarray(mlp.gate_up.weight[...], np.float64)
    gate, up = (weight[:, side].reshape(8, 6) @ x.T for side in (0, 1))
    if bias:
        offsets = np.asarray(mlp.gate_up.bias[...], np.float64)
        gate, up = gate + offsets[:, 0].reshape(8, 1), up + offsets[:, 1].reshape(8, 1)
    hidden = (DEFINITIONS[name](gate) * up).T
    expected = hidden @ np.asarray(mlp.down.weight[...], np.float64).T
    expected += np.arange(6.0) if bias else 0
    found = mlp(jnp.asarray(x, jnp.float32), DenseContext())
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_static_angles_are_position_times_frequency(scale: float) -> None:
    inv_freq, position = (1.0, 0.1, 0.003), np.array([0, 1, 17, 4095])
    cos, sin, *_ = StaticRope(inv_freq, scale)(jnp.asarray(position), None)
    angle = position[:, None] * np.array(inv_freq)
    np.testing.assert_allclose(cos, scale * np.cos(angle), atol=5e-4)
    np.testing.assert_allclose(sin, scale * np.sin(angle), atol=5e-4)


@hypothesis.given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 100))
@hypothesis.settings(max_examples=30)
def test_a_dynamic_base_follows_the_longer_of_prompt_and_position(
    position: int, prompt: int, original: int
) -> None:
    rope = DynamicRope(10000.0, 8, 4.0, original)
    cos = rope(jnp.array([position]), jnp.array([prompt])).cos_TF
    length = max(position + 1, prompt)
    growth = 4.0 * length / original - 3 if length > original else 1.0
    base = 10000.0 * growth ** (8 / 6)
    expected = np.cos([position / base ** (i / 8) for i in range(0, 8, 2)])
    np.testing.assert_allclose(cos[0], expected, atol=2e-4)


@hypothesis.given(st.integers(1, 24), st.integers(1, 24), st.sampled_from([1, 2, 3, 4, 6, 8]))
def test_heads_divide_evenly_or_say_why_not(query: int, kv: int, shards: int) -> None:
    heads = Heads(query, kv, 4, shards)
    if heads.problem() is None:
        assert heads.query_per_shard * shards == query
        assert heads.kv_per_shard * shards == heads.kv_stored == kv * heads.repeat
        assert heads.kv_stored % shards == 0 and heads.query_per_shard % heads.kv_per_shard == 0
    else:
        uneven = kv % shards and shards % kv
        assert query % kv or query % shards or uneven


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_products_accumulate_in_float32(dtype: jax.typing.DTypeLike) -> None:
    x = jnp.ones((1, 4096), dtype)
    assert float(contract(x, x, 1)[0, 0]) == 4096.0  # in halves 2048 + 1 is 2048
    assert contract(x, x, 1).dtype == dtype
    assert contract(x, x, 1, jnp.float32).dtype == jnp.float32


def test_a_bias_is_added_after_the_product() -> None:
    linear = Linear(Init(nnx.Rngs(0), jnp.float32), (3,), (4,), ("mlp", "embed"), bias=True)
    linear.bias[...] = jnp.array([1.0, 2.0, 3.0])
    x = jnp.ones((2, 4))
    context = DenseContext()
    difference = linear(x, context) - linear.product(x, context)
    np.testing.assert_allclose(difference, [[1.0, 2.0, 3.0]] * 2, atol=1e-6)


def test_a_decoder_names_the_tensors_of_every_module_by_its_path() -> None:
    model = outline(models.make_spec(CASES["llama-mha-biases"]), 1, jnp.float32)
    names = models.family("llama").NAMES
    table = {rule.parameter: [piece.name for piece in rule.pieces] for rule in model.rules(names)}
    assert table["layers.1.attention.qkv.bias"] == [
        f"model.layers.1.self_attn.{part}_proj.bias" for part in "qkv"
    ]
    assert table["head.weight"] == ["lm_head.weight"]
    assert table["layers.0.mlp_norm.weight"] == ["model.layers.0.post_attention_layernorm.weight"]
    with pytest.raises(KeyError, match=r"attention\.out"):
        list(model.rules({key: names[key] for key in names if not key.endswith(".out")}))


def test_a_piece_is_a_view_of_the_stored_tensor_with_all_its_numbers() -> None:
    stored = np.arange(12).reshape(6, 2)
    found = Piece("x", (6, 2), (3, 1, 2, 2)).arranged(stored)
    assert np.shares_memory(found, stored)
    np.testing.assert_array_equal(found.reshape(6, 2), stored)
    np.testing.assert_array_equal(
        Piece("x", (6, 2), (3, 4)).arranged(jnp.asarray(stored)), stored.reshape(3, 4)
    )
