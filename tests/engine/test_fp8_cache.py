"""The engine over 8-bit pages: a request gets the same however it is run, the pool holds more, and
nothing else changes hands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.messages import GenerateRequest
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.by_layer import by_layer
from tests.engine.conftest import Outcome, collect, outcomes, tokens_of
from tests.engine.fake_host import Optimist
from tests.engine.test_invariants import HOW, PROMPTS

MakeEngine = Callable[..., Engine]
PARAMS = [
    SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=20, ignore_eos=True, logprobs=3)
] * len(PROMPTS)
# A test below runs batches
WAYS = (
    "chunked",
    *(pytest.param(how, marks=pytest.mark.slow) for how in ("batched", "preempted", "2 shards")),
)


@pytest.fixture(scope="module")
def quiet(make_engine: MakeEngine) -> Engine:
    """One request at a time over pages of fp8."""
    return make_engine(
        max_num_seqs=1, async_scheduling=False, enable_prefix_caching=False, kv_cache_dtype="fp8"
    )


@pytest.fixture(scope="module")
def sharing(make_engine: MakeEngine) -> Engine:
    """Several at once, with a prefix cache."""
    return make_engine(kv_cache_dtype="fp8")


@pytest.fixture(scope="module")
def alone(quiet: Engine) -> list[Outcome]:
    """Each prompt by itself."""
    return [outcomes(quiet, [p], [s])[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]


def assert_same(engine: Engine, alone: list[Outcome]) -> None:
    for found, expected in zip(outcomes(engine, PROMPTS, PARAMS), alone, strict=True):
        found.assert_like(expected)
    engine.scheduler.check()
    assert engine.stats().free_pages == engine.stats().num_pages


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.slow
def test_a_request_gets_the_same_however_it_is_run(
    make_engine: MakeEngine, alone: list[Outcome], how: str
) -> None:
    engine = make_engine(kv_cache_dtype="fp8", **HOW[how])
    assert_same(engine, alone)
    assert (engine.stats().preemptions > 0) == (how == "preempted")


@pytest.mark.slow
def test_pages_go_to_host_memory_and_come_back_with_their_scales(
    make_engine: MakeEngine, alone: list[Outcome]
) -> None:
    small = {"num_gpu_blocks_override": 11, "max_model_len": 88}
    engine = make_engine(kv_cache_dtype="fp8", preemption_mode="swap", swap_space=0.01, **small)
    engine.scheduler.estimator = Optimist()
    assert_same(engine, alone)
    assert engine.stats().pages_loaded > 0


@pytest.mark.slow
def test_a_cached_prefix_changes_nothing(sharing: Engine, alone: list[Outcome]) -> None:
    assert_same(sharing, alone)
    before = sharing.stats().prefix_hits
    assert_same(sharing, alone)
    assert sharing.stats().prefix_hits - before == sum((len(p) - 1) // 8 * 8 for p in PROMPTS)


def test_choices_that_share_a_prompts_pages_get_what_each_gets_alone(
    sharing: Engine, quiet: Engine
) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, n=3)
    shared = collect(sharing, [GenerateRequest(id="a", prompt=Prompt(PROMPTS[3]), params=params)])
    alone = collect(quiet, [GenerateRequest(id="a", prompt=Prompt(PROMPTS[3]), params=params)])
    assert [tokens_of(shared, "a", i) for i in range(3)] == [
        tokens_of(alone, "a", i) for i in range(3)
    ]
    assert len({tuple(tokens_of(shared, "a", i)) for i in range(3)}) == 3


def test_what_is_computed_differs_from_full_precision_by_little(
    make_engine: MakeEngine, alone: list[Outcome]
) -> None:
    exact = outcomes(make_engine(), PROMPTS, PARAMS)
    errors = [
        abs(a.logprobs[0].top[0][1] - e.logprobs[0].top[0][1])
        for a, e in zip(alone, exact, strict=True)
    ]
    assert 0 < sum(errors) / len(errors) < 0.1  # heads of 8 numbers average little out


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8", "float8_e4m3fn"), ("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")],
)
def test_the_pool_is_made_of_what_was_asked_for(
    make_engine: MakeEngine, name: str, dtype: str
) -> None:
    engine = make_engine(kv_cache_dtype=name)
    kv = engine.runner.kv
    assert {x.dtype for x in kv[0].planes} == {jnp.dtype(dtype)}
    assert [s.shape for s in by_layer(kv)[2:]] == [(2, 96, 2, 2, 8)]
    assert engine.resolved.kv_dtype == dtype


def test_the_same_memory_holds_more_pages(make_engine: MakeEngine) -> None:
    def pages(name: str) -> int:
        engine = make_engine(
            num_gpu_blocks_override=None,
            kv_cache_memory_bytes=2**18,
            dtype="bfloat16",
            kv_cache_dtype=name,
        )
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner.kv))
        assert 2**18 * 0.95 < size <= 2**18
        return engine.stats().num_pages

    # Heads of 8 numbers: 8 bytes and 2 of scale, where 16 were
    assert pages("fp8") == pages("auto") * 16 // 10


def test_pages_of_another_type_are_another_identity(make_engine: MakeEngine) -> None:
    tokens = list(range(16))
    found = [
        make_engine(kv_cache_dtype=name).scheduler.pools[0].index
        for name in ("auto", "fp8", "fp8_e5m2")
    ]
    keys: list[list[bytes]] = [[], [], []]
    for index, own in zip(found, keys, strict=True):
        assert index is not None
        index.extend(own, tokens)
    assert len({own[-1] for own in keys}) == 3


@pytest.mark.parametrize("value", ["int8", "float64", "", None, ["fp8"], 8])
def test_a_type_that_is_not_there_is_refused_by_name(value: Any) -> None:
    with pytest.raises(
        ConfigError,
        match="--kv-cache-dtype must be one of auto, bfloat16, float16, float32, fp8, fp8_e4m3, "
        "fp8_e5m2, got",
    ):
        EngineConfig(kv_cache_dtype=value)
