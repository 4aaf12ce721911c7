"""The whole engine under random traffic: whoever comes, waits, is preempted, stops or leaves, each
request gets what it gets alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.engine.engine import Engine
from jaxllm.messages import GenerateRequest, TextDelta
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import Outcome, assert_same_logprobs, collect, reading_words
from tests.engine.fake_host import Optimist

MakeEngine = Callable[..., Engine]
REQUESTS, SEARCHES = 56, 8
IDS = 96  # prompts hold no end of sequence


WAYS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "swap": {"preemption_mode": "swap", "swap_space": 0.001, "kv_offloading_size": 0.001},
    "swap without prefixes": {
        "preemption_mode": "swap",
        "swap_space": 0.001,
        "enable_prefix_caching": False,
    },
}


@pytest.fixture(
    scope="module",
    params=[
        "recompute",
        *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way != "recompute"),
    ],
)
def crowded(request: pytest.FixtureRequest, make_engine: MakeEngine) -> Engine:
    """Small chunks and few pages, overlapped, with a prefix cache; interrupted in every way."""
    engine = make_engine(
        max_num_batched_tokens=16,
        num_gpu_blocks_override=12,
        max_model_len=96,
        **WAYS[request.param],
    )
    engine.scheduler.estimator = Optimist()
    return reading_words(engine)


@pytest.fixture(scope="module")
def quiet(make_engine: MakeEngine) -> Engine:
    """One request at a time, nothing shared or overlapped."""
    return reading_words(
        make_engine(max_num_seqs=1, async_scheduling=False, enable_prefix_caching=False)
    )


@pytest.fixture(scope="module")
def wide(make_engine: MakeEngine) -> Engine:
    """The same for the beams of one search."""
    return make_engine(async_scheduling=False, enable_prefix_caching=False)


def some_request(rng: random.Random, number: int, openings: list[list[int]]) -> GenerateRequest:
    """Any legal mix of options; prompts share openings of two pages and a half."""
    prompt = rng.choice(openings)[: rng.choice((1, 7, 16, 20, 20))] + [
        rng.randrange(IDS) for _ in range(rng.randrange(1, 24))
    ]
    options: dict[str, Any] = {
        "seed": rng.choice((number, -number, 2**63 - 1 - number)),
        "temperature": rng.choice((0, 0.5, 1.0, 1.5)),
        "max_tokens": rng.randrange(1, 32),
        "ignore_eos": rng.random() < 0.5,
        "n": rng.choice((1, 1, 1, 2, 3)),
    }
    if rng.random() < 0.4:
        options |= {
            "top_p": rng.uniform(0.3, 1),
            "top_k": rng.choice((-1, 3, 40)),
            "min_p": rng.choice((0.0, 0.05)),
        }
    if rng.random() < 0.4:
        options["stop_token_ids"] = rng.sample(range(104), rng.randrange(1, 12))
    if rng.random() < 0.3:
        options["min_tokens"] = rng.randrange(options["max_tokens"] + 1)
    if rng.random() < 0.3:
        options["logprobs"] = rng.randrange(6)
    if rng.random() < 0.4:
        options |= {
            "repetition_penalty": rng.uniform(0.8, 1.5),
            "frequency_penalty": rng.uniform(0, 1),
        }
        options["presence_penalty"] = rng.uniform(-1, 2)
    if rng.random() < 0.2:
        options["logit_bias"] = {
            str(token): rng.uniform(-5, 5) for token in rng.sample(range(104), 9)
        }
    if number % 5 == 0:
        own = random.Random(number)
        options["bad_words"] = [
            " ".join(str(own.randrange(104)) for _ in range(own.choice((1, 2, 2, 3))))
            for _ in range(40)
        ]
    if rng.random() < 0.2:
        options["allowed_token_ids"] = [*rng.sample(range(104), 40), 103]
    if number % 8 == 7:
        options["prompt_logprobs"] = number % 3
    if options["temperature"] and rng.random() < 0.3:
        options["best_of"] = options["n"] + 1
    return GenerateRequest(id=f"r{number}", prompt=Prompt(prompt), params=SamplingParams(**options))


def some_search(
    rng: random.Random, number: int, openings: list[list[int]], widest: int
) -> GenerateRequest:
    """A beam search over a prompt of the same kind, of at most so many beams."""
    prompt = rng.choice(openings)[: rng.choice((1, 7, 16, 20))] + [
        rng.randrange(IDS) for _ in range(rng.randrange(1, 12))
    ]
    params = SamplingParams(
        use_beam_search=True,
        n=rng.choice((1, 2)),
        best_of=min(widest, rng.choice((2, 3))),
        max_tokens=rng.randrange(1, 13),
        stop_token_ids=rng.sample(range(104), 4),
        ignore_eos=True,
        length_penalty=rng.choice((0.0, 1.0, 2.0)),
        early_stopping=rng.choice((True, False, "never")),
        logprobs=rng.choice((None, 2)),
    )
    return GenerateRequest(id=f"s{number}", prompt=Prompt(prompt), params=params)


def traffic(engine: Engine, rng: random.Random, requests: list[GenerateRequest]) -> list[TextDelta]:
    """Add the requests between steps, in bursts, and abort some, until nothing is left; everything
    that the engine said."""
    waiting, live, deltas = list(reversed(requests)), set[str](), list[TextDelta]()
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.5:
            request = waiting.pop()
            engine.add(request)
            live.add(request.id)
        if live and rng.random() < 0.04:
            engine.abort(rng.choice(sorted(live)))
        said = engine.step()
        engine.scheduler.check()
        live -= {delta.id for delta in said if delta.finish_reason}
        deltas += said
    return deltas


@pytest.mark.parametrize(("seed", "depth"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_random_traffic_gives_every_request_what_it_gets_alone(
    crowded: Engine, quiet: Engine, wide: Engine, seed: int, depth: int
) -> None:
    crowded.runner.depth = depth  # two on accelerators
    preemptions, hits = compare(crowded, quiet, wide, seed)
    assert preemptions > 3 and (hits > 100 or not crowded.resolved.enable_prefix_caching)
    assert crowded.stats().pages_loaded > 0 or not crowded.resolved.host_pages


@pytest.mark.slow
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    rng=st.randoms(use_true_random=False),
    count=st.integers(1, 6),
    searches=st.integers(0, 1),
    order=st.integers(0, 99),
)
def test_any_few_requests_get_what_they_get_alone(
    crowded: Engine,
    quiet: Engine,
    wide: Engine,
    rng: random.Random,
    count: int,
    searches: int,
    order: int,
) -> None:
    openings = [[rng.randrange(IDS) for _ in range(20)]]
    crowded.runner.depth = 1 + order % 2
    requests = [some_request(rng, number, openings) for number in range(3, 3 + count)]
    requests += [some_search(rng, number, openings, widest=3) for number in range(searches)]
    assert_each_gets_what_it_gets_alone(
        traffic(crowded, random.Random(order), requests), requests, quiet, wide
    )
    crowded.scheduler.check()


def compare(
    crowded: Engine, quiet: Engine, wide: Engine, seed: int, widest: int = 3
) -> tuple[int, int]:
    """Random traffic through one engine gives every request what it gets alone in the others; how
    often it preempted, and how many tokens it found."""
    rng = random.Random(seed)
    openings = [[rng.randrange(IDS) for _ in range(20)] for _ in range(3)]
    requests = [some_request(rng, number, openings) for number in range(REQUESTS)]
    requests += [some_search(rng, number, openings, widest) for number in range(SEARCHES)]
    rng.shuffle(requests)
    before = crowded.stats()
    reasons = assert_each_gets_what_it_gets_alone(
        traffic(crowded, rng, requests), requests, quiet, wide
    )
    after = crowded.stats()
    assert min(reasons.count(reason) for reason in ("stop", "length", "abort")) >= 3
    assert after.free_pages == after.num_pages
    assert after.running == after.waiting == 0
    return after.preemptions - before.preemptions, after.prefix_hits - before.prefix_hits


def assert_each_gets_what_it_gets_alone(
    deltas: list[TextDelta], requests: list[GenerateRequest], quiet: Engine, wide: Engine
) -> list[str | None]:
    """Why their choices ended."""
    reasons: list[str | None] = []
    for request in requests:
        alone = collect(wide if request.params.use_beam_search else quiet, [request])
        for index in range(request.params.n):
            found, expected = (Outcome.of(said, request.id, index) for said in (deltas, alone))
            reasons.append(found.finish_reason)
            if request.params.samples > request.params.n and "abort" in (
                delta.finish_reason for delta in deltas if delta.id == request.id
            ):
                continue  # which of them leads is another matter before all have ended
            if found.finish_reason == "abort":
                expected = expected_until(expected, len(found.tokens))
                assert_same_logprobs(found.logprobs, expected.logprobs)
                assert found.tokens == expected.tokens
            else:
                found.assert_like(expected)
    return reasons


def expected_until(outcome: Outcome, tokens: int) -> Outcome:
    """What a request that left had been told."""
    return replace(outcome, tokens=outcome.tokens[:tokens], logprobs=outcome.logprobs[:tokens])
