"""The building blocks, each against a few lines of plain numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.embedding import Embedding, vocab_axis
from jaxllm.nn.heads import Heads
from jaxllm.nn.linear import Init, Linear
from jaxllm.nn.mlp import ACTIVATIONS, GatedMLP, is_fused
from jaxllm.nn.norm import RMSNorm
from pallas_kernels.gated_matmul import Gating


def init(dtype: jax.typing.DTypeLike = jnp.float32) -> Init:
    return Init(nnx.Rngs(0), dtype)


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def test_a_linear_map_contracts_all_its_input_axes() -> None:
    linear = Linear(init(), (2, 3), (4, 5), ("shard", None, "heads", "head_dim"), bias=True)
    linear.bias[...] = random(2, 3, seed=1)
    x = random(7, 4, 5)
    expected = np.einsum("tij,abij->tab", x, linear.weight[...]) + linear.bias[...]
    np.testing.assert_allclose(linear(x, DenseContext()), expected, atol=1e-5)


def test_every_parameter_names_all_its_axes() -> None:
    linear = Linear(init(), (2, 3), (4,), ("shard", None, "embed"), bias=True)
    mlp = GatedMLP(init(), 8, 12, 2, "silu", bias=True)
    for module in (linear, mlp, RMSNorm(init(), 4, 1e-6), Embedding(init(), 10, 4, "vocab")):
        for parameter in jax.tree.leaves(
            nnx.state(module), is_leaf=lambda x: isinstance(x, nnx.Param)
        ):
            assert len(parameter.get_metadata("axes")) == parameter.get_value().ndim


def test_a_norm_of_bfloat16_is_computed_in_float32() -> None:
    norm = RMSNorm(init(jnp.bfloat16), 64, 1e-6)
    x = (random(3, 64) * 300).astype(jnp.bfloat16)
    x32 = np.asarray(x, np.float32)
    expected = x32 / np.sqrt((x32**2).mean(-1, keepdims=True) + 1e-6)
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(norm(x), np.float32), expected, rtol=2**-8)


def test_a_vocabulary_that_does_not_divide_is_replicated() -> None:
    assert vocab_axis(96, 8) == "vocab"
    assert vocab_axis(97, 8) is None


def test_a_gated_mlp_keeps_gate_and_up_of_a_shard_together() -> None:
    mlp = GatedMLP(init(), 6, 8, 2, "silu")
    x, weight = random(5, 6), np.asarray(mlp.gate_up.weight[...])
    gate, up = weight[:, 0].reshape(8, 6), weight[:, 1].reshape(8, 6)
    hidden = np.asarray(jax.nn.silu(x @ gate.T)) * (x @ up.T)
    np.testing.assert_allclose(
        mlp(x, DenseContext()), hidden @ np.asarray(mlp.down.weight[...]).T, atol=1e-6
    )


class Fused(DenseContext):
    """Answers every gated product with that of gates of two and ups of three."""

    def gated_product(
        self, x_TD: jax.Array, weight_X2FD: jax.Array, gating: Gating
    ) -> jax.Array | None:
        shape = x_TD.shape[0], weight_X2FD.shape[0] * weight_X2FD.shape[2]
        return gating(jnp.full(shape, 2.0), jnp.full(shape, 3.0))


@pytest.mark.parametrize(
    ("activation", "bias", "asked"),
    [("silu", False, True), ("gelu", False, True), ("relu2", False, True), ("silu", True, False)],
)
def test_the_context_computes_the_gated_product_of_any_activation_without_a_bias(
    activation: str, bias: bool, asked: bool
) -> None:
    mlp = GatedMLP(init(), 6, 8, 2, activation, bias)
    x = random(5, 6)
    hidden = np.full((5, 8), 3 * float(ACTIVATIONS[activation](jnp.float32(2.0))))
    wanted = hidden @ np.asarray(mlp.down.weight[...]).T
    assert np.allclose(mlp(x, Fused()), wanted, atol=1e-5) == asked


def test_activations_are_fused_but_for_those_with_erf() -> None:
    assert {name for name in ACTIVATIONS if not is_fused(name)} == {"gelu", "gelu_python"}


def test_gelu_and_its_approximation_differ() -> None:
    x = jnp.linspace(-3, 3, 13)
    assert float(jnp.abs(ACTIVATIONS["gelu"](x) - ACTIVATIONS["gelu_pytorch_tanh"](x)).max()) > 1e-4
    np.testing.assert_array_equal(ACTIVATIONS["swish"](x), ACTIVATIONS["silu"](x))


@pytest.mark.parametrize(
    ("query", "kv", "shards", "stored", "per_shard"),
    [(8, 8, 4, 8, 2), (8, 2, 1, 2, 2), (8, 2, 2, 2, 1), (8, 2, 8, 8, 1), (8, 1, 4, 4, 1)],
)
def test_kv_heads_repeat_only_when_there_are_fewer_than_shards(
    query: int, kv: int, shards: int, stored: int, per_shard: int
) -> None:
    heads = Heads(query, kv, 4, shards)
    assert heads.problem() is None
    assert (heads.kv_stored, heads.kv_per_shard) == (stored, per_shard)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (Heads(8, 3, 4), "8 attention heads are not a multiple of 3 key-value heads"),
        (Heads(6, 2, 4, 4), "6 attention heads do not divide over 4"),
        (Heads(12, 6, 4, 4), "6 key-value heads neither divide over 4"),
    ],
)
def test_heads_that_do_not_divide_say_so(heads: Heads, message: str) -> None:
    assert message in (heads.problem() or "")
