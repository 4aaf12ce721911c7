"""Every family computes what transformers computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxllm import models, weights
from jaxllm.mesh import make_mesh
from jaxllm.nn.contexts.dense import DenseContext
from tests.goldens.cases import CASES, NEW_TOKENS, PROMPT_LENGTHS
from tests.goldens.golden import Continuation, golden_names, load_golden
from tests.goldens.pooled_cases import CASES as POOLED

LENGTH = max(PROMPT_LENGTHS) + NEW_TOKENS
BOUND = 2e-4


def test_every_family_has_a_golden() -> None:
    covered = {CASES[name]["model_type"] for name in golden_names()}
    pooled = (files["config.json"]["model_type"] for files in POOLED.values())
    covered |= {model_type.replace("-", "_") for model_type in pooled}
    covered |= {"new"}  # GTE under other names, tests/engine/test_pooling_engine.py
    assert covered == set(models.families())


def test_every_case_has_been_made() -> None:
    assert golden_names() == sorted(CASES)
    for name in CASES:
        assert models.read_config(load_golden(name).directory) == CASES[name]


def logprobs(
    name: str, continuations: tuple[Continuation, ...], shards: int = 1, wider: int = 0
) -> np.ndarray:
    """[prompts, LENGTH, V]: distributions over each prompt with its golden continuation, all
    prompts in one batch; heads stored with `wider` zeros."""
    golden = load_golden(name)
    spec, mesh = models.read_spec(golden.directory).serving(LENGTH), make_mesh(shards)
    spec = spec.with_heads_of(spec.heads(1).stored_dim + wider)
    graphdef, state = weights.load(golden.directory, weights.outline(spec, mesh, jnp.float32))
    rows = [c.prompt + c.tokens for c in continuations]
    token = np.array([row + [0] * (LENGTH - len(row)) for row in rows], np.int32)
    segment = np.array([[0] * len(row) + [1] * (LENGTH - len(row)) for row in rows], np.int32)
    prompt = np.array([[len(c.prompt)] * LENGTH for c in continuations], np.int32)

    @jax.jit
    def run(state: nnx.State, token: jax.Array, segment: jax.Array, prompt: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state)

        def one(token_T: jax.Array, segment_T: jax.Array, prompt_T: jax.Array) -> jax.Array:
            context = DenseContext(segment_T, prompt_T)
            hidden = model(token_T, jnp.arange(LENGTH), context)
            return jax.nn.log_softmax(model.logits(hidden, context))

        return jax.vmap(one)(token, segment, prompt)

    return np.asarray(run(state, token, segment, prompt))


def test_a_head_of_its_own_adds_a_bias_as_a_tied_one_does(tmp_path: Path) -> None:
    tied = load_golden("ernie4-5-moe-bias").directory
    stored = load_file(tied / "model.safetensors")
    table = stored["model.embed_tokens.weight"]
    wanted = [part.astype(np.float32) for part in (table, stored["lm_head.bias"])]
    config = CASES["ernie4-5-moe-bias"] | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(stored | {"lm_head.weight": table}, tmp_path / "model.safetensors")
    hidden_RD = np.random.default_rng(0).standard_normal((3, table.shape[1]), np.float32)
    for directory in (tied, tmp_path):
        spec = models.read_spec(directory)
        model = nnx.merge(
            *weights.load(directory, weights.outline(spec, make_mesh(1), jnp.float32))
        )
        found = model.logits(jnp.asarray(hidden_RD), DenseContext())
        np.testing.assert_allclose(found, hidden_RD @ wanted[0].T + wanted[1], atol=1e-5)
    assert np.abs(wanted[1]).max() > 0.01


# Made of parts that goldens of other families run, too
ALIKE = (
    *("arcee", "cohere2_moe", "dots1", "exaone_moe", "flex_olmo", "glm4_moe_lite"),
    *("granitemoeshared", "helium", "internlm3", "ministral", "solar_open", "vaultgemma"),
)


def first_of_families() -> Iterator[Any]:
    """Every golden; all but the first of each family are slow, and all of those in `ALIKE`."""
    seen = set(ALIKE)
    for name in golden_names():
        family = CASES[name]["model_type"]
        yield pytest.param(name, marks=[pytest.mark.slow] if family in seen else [])
        seen.add(family)


@pytest.mark.parametrize("name", [*first_of_families()])
def test_a_family_gives_the_tokens_and_logprobs_of_transformers(name: str) -> None:
    continuations = load_golden(name).continuations
    assert [len(c.prompt) for c in continuations] == list(PROMPT_LENGTHS)
    for found, expected in zip(logprobs(name, continuations), continuations, strict=True):
        start = len(expected.prompt)
        generated = found[start - 1 : start - 1 + NEW_TOKENS]
        np.testing.assert_allclose(generated, expected.logprobs, atol=BOUND, rtol=0)
        assert generated.argmax(-1).tolist() == expected.tokens
        inside = found[np.arange(start - 1), expected.prompt[1:]]
        np.testing.assert_allclose(inside, expected.prompt_logprobs, atol=BOUND, rtol=0)


WIDER = ("glm-biases", "stablelm-head-norms")  # rotated in part, and normed head by head


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in WIDER else pytest.mark.slow)
        for name in golden_names()
    ],
)
def test_heads_that_are_stored_wider_change_nothing(name: str) -> None:
    shards = 2 if name == WIDER[0] else 1
    one = load_golden(name).continuations[1:2]
    wide = logprobs(name, one, shards, wider=6)
    np.testing.assert_allclose(wide, logprobs(name, one), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["gemma3_text-older-keys", "glm-biases", "phi3-short-partial"])
def test_parts_of_fused_and_reordered_tensors_go_to_their_shards(name: str) -> None:
    one = load_golden(name).continuations[1:2]
    np.testing.assert_allclose(logprobs(name, one, 2), logprobs(name, one), atol=1e-5, rtol=1e-5)


@pytest.fixture(
    scope="module",
    params=["llama-gqa", "llama-mha-biases", "llama-mqa-tied-linear", "qwen3-bias-window"],
)
def unsharded(request: pytest.FixtureRequest) -> tuple[str, np.ndarray]:
    """A case, and its log-probabilities on one device."""
    return request.param, logprobs(request.param, load_golden(request.param).continuations)


@pytest.mark.parametrize("shards", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_sharding_a_checkpoint_changes_nothing(
    unsharded: tuple[str, np.ndarray], shards: int
) -> None:
    name, expected = unsharded
    np.testing.assert_allclose(
        logprobs(name, load_golden(name).continuations, shards), expected, atol=1e-5, rtol=1e-5
    )
