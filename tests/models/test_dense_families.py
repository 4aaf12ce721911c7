"""Dense families: heads that are stored wider, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxllm import models, weights
from jaxllm.config import ConfigError
from jaxllm.mesh import make_mesh
from jaxllm.models.config.build import outline
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.head_maps import BiasedKeys
from jaxllm.nn.rope import Alibi
from jaxllm.pooling import Pooling
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
        graphdef, state = weights.load(
            golden.directory, weights.outline(spec, make_mesh(1), jnp.float32)
        )

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


@pytest.mark.parametrize("dim", [7, 8])
def test_far_positions_are_kept_in_keys_of_16_bits(dim: int) -> None:
    position_T = jnp.array([1, 1021, 65535])
    rotation = Alibi(-(-dim // 2), (0.7, 1.9))(position_T, None)
    row_TXCH = jnp.zeros((3, 1, 6, dim + dim % 2 + 2), jnp.bfloat16)
    found, _ = BiasedKeys(dim)(row_TXCH, 2, rotation, DenseContext())
    q, k, v = jnp.split(found.astype(jnp.float32), 3, axis=2)
    assert not v.any()
    added_TN = jnp.sum(q * k, axis=-1)[:, 0]
    np.testing.assert_allclose(added_TN, rotation.key_TN, rtol=2**-16)


def test_heads_of_a_falcon_that_do_not_turn_may_be_of_odd_width() -> None:
    config = CASES["falcon-alibi"] | {"hidden_size": 84}
    heads = models.make_spec(config).heads(1)
    assert (heads.dim, heads.stored_dim, heads.order) == (7, 10, ())
    with pytest.raises(ConfigError, match="head_dim is 7; rotary embedding needs"):
        models.make_spec(config | {"alibi": False})


def test_bloom_is_published_without_the_prefix_of_its_body(tmp_path: Path) -> None:
    golden, mesh = load_golden("bloom-alibi").directory, make_mesh(1)
    stored = load_file(golden / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    save_file(bare, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((golden / "config.json").read_bytes())
    spec = models.read_spec(tmp_path)
    states = [
        weights.load(path, weights.outline(spec, mesh, jnp.float32))[1]
        for path in (golden, tmp_path)
    ]
    first, second = map(jax.tree.leaves, states)
    assert all(np.array_equal(*pair) for pair in zip(first, second, strict=True))


def test_settings_of_attention_do_not_rename_an_mpt() -> None:
    given = CASES["mpt-clip"] | {"attn_config": {"model_type": "", "clip_qkv": 6}}
    spec = models.make_spec(given)
    assert (spec.model_type, spec.config["clip_qkv"]) == ("mpt", 6)


def test_dbrx_turns_by_the_base_of_its_attention_unless_the_file_says_otherwise() -> None:
    given = {key: value for key, value in CASES["dbrx-clip"].items() if key != "rope_theta"}
    assert models.make_spec(given).ropes == models.make_spec(CASES["dbrx-clip"]).ropes
    assert models.make_spec(given | {"rope_theta": 7.0}).ropes != models.make_spec(given).ropes


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
