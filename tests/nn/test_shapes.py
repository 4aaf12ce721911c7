"""Arrays have the axes that their names promise, in every family and layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxllm import models
from jaxllm.models.config.build import build, outline
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.decoder import Decoder
from tests.array_shapes import checked
from tests.goldens.cases import CASES

MODULES = ("jaxllm.nn", "jaxllm.models", "pallas_kernels.rope_write", "pallas_kernels.add_norm")


def forward(model: Decoder, tokens: int, segments: bool) -> jax.Array:
    token_T, position_T = jnp.arange(tokens) % 67, jnp.arange(tokens)
    segment_T = position_T // 4 if segments else None
    context = DenseContext(segment_T)
    return model.logits(model(token_T, position_T, context), context)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("name", ["llama-mha-biases", "llama-dynamic", "qwen3-bias-window"])
def test_names_promise_the_axes_that_arrays_have(name: str, segments: bool, shards: int) -> None:
    spec = models.make_spec(CASES[name])
    with checked(*MODULES) as seen:
        logits = jax.eval_shape(
            lambda: forward(build(spec, shards, nnx.Rngs(0), jnp.bfloat16), 11, segments)
        )
    assert (logits.shape, logits.dtype) == ((11, spec.vocab_size), jnp.float32)
    assert {"x_TD", "part_TD", "token_T", "position_T", "angle_TF", "o_TNH", "hidden_RD"} <= set(
        seen
    )


def test_names_hold_while_a_model_is_traced_over_a_batch() -> None:
    spec = models.make_spec(CASES["qwen3-dynamic"])
    graphdef, state = nnx.split(outline(spec, 1, jnp.float32))

    def one(state: nnx.State, token_T: jax.Array) -> jax.Array:
        context = DenseContext(prompt_length_T=jnp.full(5, 100))
        return nnx.merge(graphdef, state)(token_T, jnp.arange(5), context)

    with checked(*MODULES) as seen:
        jax.eval_shape(jax.vmap(one, (None, 0)), state, jnp.zeros((3, 5), jnp.int32))
    assert seen["x_TD"] > 0 and seen["part_TD"] > 0
