"""Dense families: heads that are stored wider, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import models, weights
from jaxllm.config import ConfigError
from jaxllm.mesh import make_mesh
from jaxllm.nn.contexts.dense import DenseContext
from tests.goldens.cases import CASES
from tests.goldens.golden import load_golden


@pytest.mark.parametrize(
    "name",
    ["olmo2-biases", "stablelm-head-norms", "hunyuan_v1_dense-alpha", "phi-head-norms"],
)
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


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("falcon-groups", {"alibi": True}, "alibi is true with 4 query heads over 2 key heads"),
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
