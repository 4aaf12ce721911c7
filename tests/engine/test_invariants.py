"""The same request gives the same tokens, ends and log-probabilities, however it is run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxllm import models, weights
from jaxllm.engine.engine import Engine
from jaxllm.engine.intake.request_factory import choice_seed
from jaxllm.engine.runtime.compilation.xla_options import XlaOptions
from jaxllm.mesh import make_mesh
from jaxllm.messages import GenerateRequest
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import TINY, Outcome, collect, outcomes
from tests.engine.fake_host import Optimist
from tests.engine.few_shapes import shared
from tests.sampling.oracle import OPTIMISED

MakeEngine = Callable[..., Engine]
Alone = dict[str, list[Outcome]]


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(96) for _ in range(n)] for n in lengths]


PROMPTS = prompts_of(1, 5, 8, 17, 40, 63)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
SEEDED: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 20,
    "seed": 7,
    "max_tokens": 20,
    "ignore_eos": True,
}
ASKING: tuple[dict[str, Any], ...] = (  # one request a prompt
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.8, "frequency_penalty": 0.5, "logprobs": 3},
    {"temperature": 0, "repetition_penalty": 1.5, "logit_bias": {"3": 4.0, "60": 3.0}},
    {},
    {"allowed_token_ids": list(range(0, 104, 3)), "frequency_penalty": 1.5},
    {"presence_penalty": -0.5, "logit_bias": {"9": -100}},
)
MODES = ("greedy", "seeded", "logprobs", "prompt", "stops", "asking")
HOW: dict[str, dict[str, Any]] = {
    "batched": {"enable_prefix_caching": False},
    "synchronous": {"async_scheduling": False},
    "chunked": {"max_num_batched_tokens": 16},
    "preempted": {"num_gpu_blocks_override": 16},
    "other page size": {"block_size": 16},
    "2 shards": {"tensor_parallel_size": 2},
    "4 shards": {"tensor_parallel_size": 4},
    "8 shards": {"tensor_parallel_size": 8},
    "2 stages": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 16},
    "2 stages preempted": {"pipeline_parallel_size": 2, "num_gpu_blocks_override": 16},
    "2 stages of 2 shards": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}
SHAPED = ("batched", "synchronous", "chunked")  # in these a request meets every shape
SLOW = ("other page size", "4 shards", "8 shards")
WAYS = [
    pytest.param(how, marks=pytest.mark.slow if how in SLOW or "stages" in how else [])
    for how in HOW
]
# Others are seeded, too
SHOWN = [pytest.param(mode, marks=pytest.mark.slow if mode == "seeded" else []) for mode in MODES]


def stopping(greedy: list[Outcome], seeded: list[Outcome]) -> list[SamplingParams]:
    """One request per prompt that the device must end by itself: tokens that the free runs said,
    end of sequence, min_tokens."""
    eos: dict[str, Any] = {"temperature": 1.2, "max_tokens": 24}
    return [
        SamplingParams(**eos, seed=1),
        SamplingParams(**GREEDY, stop_token_ids=[greedy[1].tokens[3], 95]),
        SamplingParams(**GREEDY, stop_token_ids=[greedy[2].tokens[1]], min_tokens=9),
        SamplingParams(**eos, seed=2, min_tokens=6),
        SamplingParams(**SEEDED, stop_token_ids=[seeded[4].tokens[17]], min_tokens=15),
        # The last two live long enough to run out of pages
        SamplingParams(**eos, seed=3, min_tokens=18, logprobs=2),
    ]


@pytest.fixture(scope="module", autouse=True)
def optimised() -> Iterator[None]:
    """As users run it: other tests compile with little optimisation, and what is optimised may
    round in other places."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(XlaOptions, "at", lambda *_: OPTIMISED)
        yield


@pytest.fixture(scope="session")
def every_shape(every_shape: MakeEngine) -> MakeEngine:
    """Most engines here have the same programs."""

    def make(**overrides: Any) -> Engine:
        with shared():
            return every_shape(**overrides)

    return make


@pytest.fixture(scope="module")
def quiet(make_engine: MakeEngine) -> Engine:
    """One request at a time, whole prefill, synchronous, no prefix cache, few shapes."""
    return make_engine(max_num_seqs=1, async_scheduling=False, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def alone(quiet: Engine) -> Alone:
    """Each prompt by itself: what every other way must equal."""

    def one_by_one(params: list[SamplingParams]) -> list[Outcome]:
        return [outcomes(quiet, [p], [s])[0] for p, s in zip(PROMPTS, params, strict=True)]

    found = {mode: one_by_one(params_of(mode, {})) for mode in MODES if mode != "stops"}
    return found | {"stops": one_by_one(params_of("stops", found))}


def params_of(mode: str, alone: Alone) -> list[SamplingParams]:
    """What each prompt asks for; the stops depend on what the model says when nothing stops it."""
    if mode == "stops":
        return stopping(alone["greedy"], alone["seeded"])
    if mode == "asking":
        return [SamplingParams(**SEEDED | options) for options in ASKING]
    options = {
        "greedy": GREEDY,
        "seeded": SEEDED,
        "logprobs": SEEDED | {"seed": 8, "logprobs": 5},
        "prompt": SEEDED | {"prompt_logprobs": 3},
    }[mode]
    return [SamplingParams(**options)] * len(PROMPTS)


@pytest.fixture(scope="module")
def engine_for(make_engine: MakeEngine, every_shape: MakeEngine) -> Callable[[str], Engine]:
    """One engine per way of running, shared by the modes: what costs is compiling its programs, so
    most have few shapes."""
    made: dict[str, Engine] = {}

    def get(how: str) -> Engine:
        if how not in made:
            made[how] = (every_shape if how in SHAPED else make_engine)(**HOW[how])
            made[how].scheduler.estimator = Optimist()
        return made[how]

    return get


def assert_same(engine: Engine, mode: str, alone: Alone) -> None:
    """All prompts at once equal each alone, and nothing is left behind."""
    for found, expected in zip(
        outcomes(engine, PROMPTS, params_of(mode, alone)), alone[mode], strict=True
    ):
        found.assert_like(expected)
    engine.scheduler.check()
    assert engine.stats().free_pages == engine.stats().num_pages


def test_the_reference_ends_in_every_way_that_the_device_decides(alone: Alone) -> None:
    ends = [(o.finish_reason, o.stop_reason is not None, len(o.tokens)) for o in alone["stops"]]
    assert [reason for reason, _, _ in ends].count("stop") >= 4
    assert {named for reason, named, _ in ends if reason == "stop"} == {True, False}, (
        "by a stop token, and by end of sequence"
    )
    assert len(alone["stops"][2].tokens) >= 9
    assert all(len(o.logprobs) == 20 for o in alone["logprobs"])
    assert [len(o.prompt_logprobs) for o in alone["prompt"]] == [len(p) - 1 for p in PROMPTS]


@pytest.mark.parametrize("mode", SHOWN)
@pytest.mark.parametrize("how", WAYS)
def test_a_request_gets_the_same_however_it_is_run(
    engine_for: Callable[[str], Engine], alone: Alone, how: str, mode: str
) -> None:
    engine = engine_for(how)
    before = engine.stats().preemptions
    assert_same(engine, mode, alone)
    assert (engine.stats().preemptions > before) == ("preempted" in how)


@pytest.fixture(scope="module")
def choices_alone(quiet: Engine) -> list[list[Outcome]]:
    """Per prompt the outcomes of requests of their own with the seeds that its choices get."""
    seeds = [(choice_seed(7, index) + 2**63) % 2**64 - 2**63 for index in range(3)]
    return [
        [outcomes(quiet, [p], [SamplingParams(**(SEEDED | {"seed": seed}))])[0] for seed in seeds]
        for p in PROMPTS
    ]


@pytest.mark.parametrize("how", WAYS)
def test_the_choices_of_a_prompt_are_those_of_requests_of_their_own(
    engine_for: Callable[[str], Engine], choices_alone: list[list[Outcome]], how: str
) -> None:
    engine = engine_for(how)
    params = SamplingParams(**SEEDED, n=3)
    requests = [
        GenerateRequest(id=str(i), prompt=Prompt(p), params=params) for i, p in enumerate(PROMPTS)
    ]
    deltas = collect(engine, requests)
    for i, expected in enumerate(choices_alone):
        assert len({tuple(outcome.tokens) for outcome in expected}) == 3
        for index, outcome in enumerate(expected):
            Outcome.of(deltas, str(i), index).assert_like(outcome)
    engine.scheduler.check()
    assert engine.stats().free_pages == engine.stats().num_pages


def test_the_vocabulary_of_these_models_is_split_over_shards() -> None:
    assert TINY["vocab_size"] % max(h.get("tensor_parallel_size", 1) for h in HOW.values()) == 0


def test_a_cached_prefix_changes_nothing(every_shape: MakeEngine, alone: Alone) -> None:
    engine = every_shape()
    assert_same(engine, "logprobs", alone)
    assert engine.stats().prefix_hits == 0
    for mode in MODES:
        before = engine.stats().prefix_hits
        assert_same(engine, mode, alone)
        # Prompts that are scored are computed
        used = 0 if mode == "prompt" else sum((len(p) - 1) // 8 * 8 for p in PROMPTS)
        assert engine.stats().prefix_hits - before == used


def test_paged_steps_equal_the_dense_model(tiny_dir: str, alone: Alone) -> None:
    spec, mesh = models.read_spec(tiny_dir), make_mesh(1)
    graphdef, state = weights.load(tiny_dir, weights.outline(spec, mesh, jnp.float32), "dummy")

    @jax.jit
    def next_token(state: nnx.State, token_T: jax.Array, length: jax.Array) -> jax.Array:
        module = nnx.merge(graphdef, state)
        context = DenseContext()
        hidden = module(token_T, jnp.arange(token_T.shape[0]), context)
        return jnp.argmax(module.logits(hidden[length - 1][None], context))

    for prompt, expected in zip(PROMPTS, alone["greedy"], strict=True):
        tokens = list(prompt)
        for _ in expected.tokens:
            padded = jnp.array(tokens + [0] * (96 - len(tokens)))
            tokens.append(int(next_token(state, padded, jnp.array(len(tokens)))))
        assert tokens[len(prompt) :] == expected.tokens
