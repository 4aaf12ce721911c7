"""Models of unlike layers through an engine: recurrent states, shared keys, heads of two widths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import models
from jaxllm.cache.layer import PagedKV
from jaxllm.cache.states import StateArrays
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.load import load_engine
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.startup.budget import measure_budget
from jaxllm.mesh import make_mesh
from jaxllm.messages import GenerateRequest, RequestError
from jaxllm.models import ModelSpec
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests import hybrid
from tests.engine.conftest import run
from tests.engine.fake_host import Optimist
from tests.engine.few_shapes import few_shapes
from tests.hybrid import FULL, SHARED, SLIDING, STATE, WIDE

LENGTH = 128
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * j) % 96 for j in range(n)] for i, n in enumerate((40, 3, 90, 17, 25, 61))]
MODELS = {
    "states": (STATE, FULL, STATE, SLIDING),
    "states alone in front": (STATE, STATE, FULL),
    "states alone": (STATE, STATE),
    "shared": (FULL, SLIDING, SHARED, SHARED),
    "wide": (SLIDING, WIDE, FULL, WIDE),
    "all": (STATE, WIDE, SLIDING, SHARED, STATE, FULL, SHARED),
}


def slow(value: Any) -> Any:
    """A case that the quick tests leave out."""
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    with hybrid.registered():
        yield


def make(path: Path, layers: tuple[str, ...], **overrides: Any) -> Engine:
    (path / "config.json").write_text(json.dumps(hybrid.config(*layers)))
    wishes: dict[str, Any] = {
        "model": str(path),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": LENGTH,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "block_size": 8,
        "num_gpu_blocks_override": 96,
        "enforce_eager": True,
    }
    with few_shapes():
        return load_engine(EngineConfig(**(wishes | overrides)))


def likeliest(engine: Engine, sequences: list[list[int]]) -> list[np.ndarray]:
    """The likeliest token after each one of each sequence, by one forward of the whole."""
    model = engine.runner.shapes.model

    @jax.jit
    def forward(weights: Any, token_T: jax.Array) -> jax.Array:
        module = model.rebuild(weights)
        context = DenseContext()
        hidden_TD = module(token_T, jnp.arange(LENGTH), context)
        return jnp.argmax(module.logits(hidden_TD, context), axis=-1)

    # No token sees the padding behind it
    padded = [np.pad(tokens, (0, LENGTH - len(tokens))) for tokens in sequences]
    return [np.asarray(forward(engine.runner.weights, tokens)) for tokens in padded]


@pytest.mark.parametrize("name", ["all", *(slow(name) for name in MODELS if name != "all")])
def test_chunks_and_decodes_are_a_whole_forward(name: str, tmp_path: Path) -> None:
    engine = make(tmp_path, MODELS[name])
    found = run(engine, PROMPTS, GREEDY)
    sequences = [prompt + tokens for prompt, tokens in zip(PROMPTS, found, strict=True)]
    for prompt, tokens, wanted in zip(PROMPTS, found, likeliest(engine, sequences), strict=True):
        assert tokens == wanted[len(prompt) - 1 :][: len(tokens)].tolist()
    engine.self_check()


@pytest.mark.parametrize("name", ["all", slow("states")])
def test_preempted_requests_start_anew(name: str, tmp_path: Path) -> None:
    prompts = [prompt[:20] for prompt in PROMPTS]
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    wanted = run(make(tmp_path, MODELS[name]), prompts, long)
    small = make(tmp_path, MODELS[name], num_gpu_blocks_override=16)
    small.scheduler.estimator = Optimist()
    assert run(small, prompts, long) == wanted
    assert small.stats().preemptions > 0


def test_nothing_is_found_or_shared_before_a_state(tmp_path: Path) -> None:
    engine = make(tmp_path, MODELS["states"])
    several = SamplingParams(temperature=0, max_tokens=6, n=3, ignore_eos=True)
    first = run(engine, PROMPTS[:1], several)
    assert run(engine, PROMPTS[:1], several) == first
    assert engine.stats().prefix_hits == 0
    assert not engine.resolved.enable_prefix_caching
    search = SamplingParams(temperature=0, n=2, use_beam_search=True, max_tokens=4)
    with pytest.raises(RequestError, match="no beam search: layers with a recurrent state must"):
        engine.add(GenerateRequest(id="search", prompt=Prompt(PROMPTS[0]), params=search))


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"preemption_mode": "swap"}, "--preemption-mode swap: layers with a recurrent state"),
        ({"kv_offloading_size": 0.01}, "--kv-offloading-size: layers with a recurrent state"),
    ],
)
def test_states_stay_on_the_device(wish: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        make(tmp_path, MODELS["states"], **wish)
    with pytest.raises(ConfigError, match="heads are unlike stay on the device"):
        make(tmp_path, MODELS["wide"], **wish)


def test_a_model_of_states_alone_has_pages_for_all_its_requests(tmp_path: Path) -> None:
    engine = make(tmp_path, MODELS["states alone"], num_gpu_blocks_override=None)
    assert engine.resolved.group_pages == (4 * 128 // 8,)
    pages, states = engine.runner.kv
    assert all(plane.size == 0 for plane in pages.planes)
    assert states.layers == 2


@pytest.mark.parametrize("name", MODELS)
def test_a_spec_of_unlike_layers_comes_back_from_json(name: str) -> None:
    spec = models.make_spec(hybrid.config(*MODELS[name])).with_heads_of(32)
    assert models.make_spec(**json.loads(json.dumps(spec.to_dict()))) == spec


def test_groups_have_arrays_of_their_own_shapes(tmp_path: Path) -> None:
    engine = make(tmp_path, MODELS["all"])
    *paged, states = engine.runner.kv
    assert [[plane.shape[1:] for plane in arrays.planes] for arrays in paged] == [
        [(1, 8, 16)] * 2,
        [(2, 8, 8)] * 2,
        [(2, 8, 8)] * 2,
    ]
    assert [arrays.layers for arrays in paged] == [1, 1, 1]
    assert isinstance(states, StateArrays)
    assert [array.shape for array in states.arrays] == [(2, 5, 4, 3), (2, 5, 4)]
    assert engine.resolved.windows == (None, None, 12)


def test_keys_are_shared_within_a_stage(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layer 2 would be in another stage than layer 1"):
        make(tmp_path, MODELS["shared"], pipeline_parallel_size=2)
    layers = (FULL, SHARED, STATE, FULL)
    wanted = run(make(tmp_path, layers), PROMPTS, GREEDY)
    assert run(make(tmp_path, layers, pipeline_parallel_size=2), PROMPTS, GREEDY) == wanted


@pytest.mark.parametrize(("stages", "shards"), [(1, 1), (2, 1), (2, 2)])
def test_states_of_the_fullest_stage_are_counted(stages: int, shards: int) -> None:
    spec = models.make_spec(hybrid.config(STATE, STATE, STATE, FULL, STATE))
    config = EngineConfig(pipeline_parallel_size=stages)
    meshes = [make_mesh(shards) for _ in range(stages)]
    buckets = Buckets.build(4, 32, "cpu")
    slots = buckets.decode[-1] * stages + 1

    def resident(spec: ModelSpec) -> int:
        return measure_budget(config, spec, meshes, (), buckets, 4, 0).resident

    stateless = replace(spec, layers=(PagedKV(2, 8, 8),) * len(spec.layers))
    layers = {1: 4, 2: 3}[stages]
    size = layers * (hybrid.HEADS * hybrid.NUMBERS + hybrid.HEADS) * 4
    assert resident(spec) - resident(stateless) == size * slots // shards


@pytest.mark.parametrize("shards", [2, slow(4)])
def test_states_are_divided_over_devices(shards: int, tmp_path: Path) -> None:
    one = run(make(tmp_path, MODELS["states"]), PROMPTS[:3], GREEDY)
    several = make(tmp_path, MODELS["states"], tensor_parallel_size=shards)
    assert run(several, PROMPTS[:3], GREEDY) == one


def test_8_bit_pages_beside_states(tmp_path: Path) -> None:
    engine = make(tmp_path, MODELS["states"], kv_cache_dtype="fp8")
    found = run(engine, PROMPTS, GREEDY)
    assert all(len(tokens) == 12 for tokens in found)
    assert engine.runner.kv[-1].arrays[0].dtype == jnp.float32
