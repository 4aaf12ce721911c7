"""Dense families: heads that are stored wider, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import models, weights
from jaxllm.config import ConfigError
from jaxllm.mesh import make_mesh
from jaxllm.models.config.build import outline
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.pooling import Pooling
from tests.goldens.cases import CASES
from tests.goldens.golden import load_golden


@pytest.mark.parametrize("name", ["olmo2-biases", "stablelm-head-norms", "hunyuan_v1_dense-alpha"])
def test_norms_of_heads_are_those_of_the_true_width(name: str) -> None:
    golden = load_golden(name)
    spec, prompt = models.read_spec(golden.directory), golden.continuations[1].prompt

    def hidden(spec: models.ModelSpec) -> jax.Array:
        graphdef, state = weights.load(golden.directory, spec, make_mesh(1), jnp.float32)

        @jax.jit
        def run(state: nnx.State, token_T: jax.Array) -> jax.Array:
            return nnx.merge(graphdef, state)(token_T, jnp.arange(len(prompt)), DenseContext())

        return run(state, jnp.array(prompt))

    found = hidden(spec.with_heads_of(16))
    np.testing.assert_allclose(found, hidden(spec), atol=1e-5)


def test_a_model_whose_table_is_narrower_does_not_pool() -> None:
    spec = models.make_spec(CASES["opt-post-norm-projected"])
    pooling = Pooling(task="embed", modes=("last",), maps=(), size=spec.width)
    with pytest.raises(ConfigError, match="word_embed_proj_dim is 16 and hidden_size 32"):
        outline(replace(spec, pooling=pooling), 1, jnp.float32)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("falcon-groups", {"alibi": True}, "alibi is true with 4 query heads over 2 key heads"),
        (
            "gpt_neo-windows",
            {"attention_types": [[["global"], 3]]},
            "attention_types is .* give 4 lay",
        ),
        ("gpt_neo-windows", {"attention_types": [[["full"], 4]]}, "layers 'global' or 'local'"),
        ("gpt_neo-windows", {"attention_types": [["global", 1e9]]}, "layers 'global' or 'local'"),
        ("gpt_neo-windows", {"attention_types": 4}, "attention_types is 4; it must give 4 layers"),
        ("gpt_neo-odd-heads", {"attention_layers": ["local"]}, "attention_layers is .* give 3 lay"),
        ("gpt_neo-windows", {"window_size": 0}, "window_size is 0; it must be a positive integer"),
        (
            "gptj-half",
            {"rotary_dim": 3},
            "rotary_dim is 3; it must be an even number, at most the 8",
        ),
        ("gptj-half", {"rotary_dim": 10}, "rotary_dim is 10; it must be an even number"),
        ("gptj-half", {"rotary_dim": None}, "rotary_dim is None; it must be a positive integer"),
        ("codegen-half", {"n_embd": 30, "n_head": 5}, "n_embd is 30; it must be a multiple of 4"),
        ("chatglm-groups", {"position_encoding_2d": True}, "use ChatGLM 2 or later"),
        ("chatglm-groups", {"post_layer_norm": False}, "post_layer_norm true; use ChatGLM 2"),
        ("smollm3-positions", {"no_rope_layers": [1]}, "no_rope_layers must be 2 times 0 or 1"),
        ("smollm3-positions", {"no_rope_layers": [1, []]}, "no_rope_layers must be 2 times"),
    ],
)
def test_what_a_family_cannot_run_is_one_clear_error(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        models.make_spec(CASES[name] | changes)
