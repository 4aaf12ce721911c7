"""The same request gives the same tokens, however it is run."""

from __future__ import annotations

import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxllm import models, weights
from jaxllm.engine.engine import Engine
from jaxllm.mesh import make_mesh
from jaxllm.nn.dense import DenseContext
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import run

MakeEngine = Callable[..., Engine]


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(96) for _ in range(n)] for n in lengths]


PROMPTS = prompts_of(1, 5, 8, 17, 40, 63)
MODES = {
    "greedy": SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=7, max_tokens=20, ignore_eos=True),
}


@pytest.fixture(scope="module")
def alone(make_engine: MakeEngine) -> dict[str, list[list[int]]]:
    """Each prompt by itself, whole prefill, synchronous, no prefix cache: what every other way must equal."""
    engine = make_engine(max_num_seqs=1, async_scheduling=False, enable_prefix_caching=False)
    return {mode: [run(engine, [p], params)[0] for p in PROMPTS] for mode, params in MODES.items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="batched, overlapped, cached"),
        pytest.param({"async_scheduling": False}, id="synchronous"),
        pytest.param({"max_num_batched_tokens": 16}, id="chunked"),
        pytest.param({"num_gpu_blocks_override": 16}, id="preempted"),
        pytest.param({"block_size": 16}, id="other page size"),
    ],
)
def test_a_request_gets_the_same_tokens_however_it_is_run(make_engine: MakeEngine, alone: dict, mode: str, how: dict) -> None:
    engine = make_engine(**how)
    assert run(engine, PROMPTS, MODES[mode]) == alone[mode]
    if "num_gpu_blocks_override" in how:
        assert engine.stats().preemptions > 0
    engine.scheduler.pool.check()
    assert engine.stats().free_pages == engine.stats().num_pages


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_sharded_over_devices_gives_the_same_tokens(make_engine: MakeEngine, alone: dict, shards: int) -> None:
    engine = make_engine(tensor_parallel_size=shards)
    assert run(engine, PROMPTS, MODES["greedy"]) == alone["greedy"]


def test_a_cached_prefix_changes_nothing(make_engine: MakeEngine, alone: dict) -> None:
    engine = make_engine()
    assert run(engine, PROMPTS, MODES["seeded"]) == alone["seeded"]
    assert engine.stats().prefix_hits == 0
    assert run(engine, PROMPTS, MODES["seeded"]) == alone["seeded"]
    assert engine.stats().prefix_hits == sum((len(p) - 1) // 8 * 8 for p in PROMPTS)


def test_paged_steps_equal_the_dense_model(tiny_dir: str, alone: dict) -> None:
    hf, mesh = models.read_config(tiny_dir), make_mesh(1)
    graphdef, state = weights.load(tiny_dir, hf, mesh, jnp.float32, "dummy")

    @jax.jit
    def next_token(state: nnx.State, token_T: jax.Array, length: jax.Array) -> jax.Array:
        module = nnx.merge(graphdef, state)
        hidden = module(token_T, jnp.arange(token_T.shape[0]), DenseContext())
        return jnp.argmax(module.logits(hidden[length - 1][None]))

    for prompt, expected in zip(PROMPTS, alone["greedy"], strict=True):
        tokens = list(prompt)
        for _ in expected:
            padded = jnp.array(tokens + [0] * (96 - len(tokens)))
            tokens.append(int(next_token(state, padded, jnp.array(len(tokens)))))
        assert tokens[len(prompt) :] == expected
