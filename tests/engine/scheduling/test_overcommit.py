"""A pool a third as large as all requests need: they take turns, and little is computed twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.cache.pool import PagePool
from jaxllm.engine.scheduling.admission import (
    HISTORY,
    MIN_HISTORY,
    UNKNOWN_LENGTH,
    AdmissionEstimator,
    PageDemand,
    bounded,
    peak,
    peak_bound,
)
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.scheduling.plan import Limits, Plan
from jaxllm.engine.scheduling.request import Request
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.fake_host import Optimist

PAGE = 16
STEP, ROW = 4e-3, 2.5e-5  # seconds of a step and of a decode row
SEQS = 32


@dataclass(frozen=True)
class Work:
    """A request, and the number of tokens after which it ends by itself."""

    prompt: int
    output: int
    most: int  # max_tokens


@dataclass
class Simulation:
    """A scheduler and a clock."""

    pages: int
    seqs: int
    token: float  # seconds of a chunk token: 3.5e-5 for a 7B model on a large GPU
    estimator: AdmissionEstimator = field(default_factory=AdmissionEstimator)
    seconds: float = 0.0

    def run(self, work: list[Work]) -> Scheduler:
        """Runs all requests, added at once, to their end."""
        limits = Limits(max_num_seqs=self.seqs, max_num_batched_tokens=2048, max_model_len=10**6)
        pool = PagePool(self.pages, PAGE)
        scheduler = Scheduler(limits, [pool], Buckets.build(self.seqs, 2048, "gpu"))
        scheduler.estimator = self.estimator
        ends: dict[Request, int] = {}
        for number, one in enumerate(work):
            prompt = [number, *range(one.prompt - 1)]
            request = Request(
                id=str(number),
                index=0,
                prompt=Prompt(prompt),
                params=SamplingParams(),
                seed=0,
                arrival=0.0,
                max_tokens=one.most,
            )
            ends[request] = one.output
            scheduler.add(request)
        while scheduler.has_work:
            plan = scheduler.plan()
            assert not plan.empty
            self.seconds += (
                STEP
                + ROW * len(plan.decodes)
                + self.token * sum(chunk.length for chunk in plan.chunks)
            )
            for request in drawing(plan):
                request.output.append(7)
                scheduler.commit_tokens(request, 1)
                if len(request.output) == ends[request]:
                    scheduler.finish(request)
        assert pool.free == pool.num_pages
        return scheduler


def drawing(plan: Plan) -> list[Request]:
    return [*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.final)]


def alike(rng: random.Random) -> list[Work]:
    return [Work(64, 128, 128) for _ in range(128)]


def varied(rng: random.Random) -> list[Work]:
    return [Work(rng.randrange(16, 128), rng.randrange(16, 193), 192) for _ in range(128)]


def unknown(rng: random.Random) -> list[Work]:
    """The clients have not limited the output."""
    return [
        Work(rng.randrange(16, 128), min(800, int(rng.lognormvariate(4.4, 0.7)) + 1), 2048)
        for _ in range(128)
    ]


def long_prompts(rng: random.Random) -> list[Work]:
    return [Work(1024, 200, 200) for _ in range(64)]


@pytest.mark.parametrize("token", [3.5e-5, 2e-4])
@pytest.mark.parametrize("workload", [alike, varied, unknown, long_prompts])
def test_an_overcommitted_pool_is_shared_in_turns(
    workload: Callable[[random.Random], list[Work]], token: float
) -> None:
    work = workload(random.Random(1))
    held = sum(one.prompt + one.output for one in work) // len(work)
    pages = max(SEQS * held // 3 // PAGE, max(one.prompt + one.most for one in work) // PAGE + 2)
    crowded = Simulation(pages, SEQS, token)
    preemptions = crowded.run(work).preemptions
    most, none = 1, SEQS  # requests at once so that nothing is ever preempted
    while none - most > 1:
        middle = (most + none) // 2
        quiet = Simulation(pages, middle, token, Optimist()).run(work).preemptions == 0
        most, none = (middle, none) if quiet else (most, middle)
    calm = Simulation(pages, most, token, Optimist())
    assert calm.run(work).preemptions == 0
    assert crowded.seconds <= calm.seconds / 0.9
    naive = Simulation(pages, SEQS, token, Optimist())
    assert preemptions < naive.run(work).preemptions, (
        "the estimator preempts less than admitting whatever fits"
    )
    assert preemptions <= len(work) // 2


def test_the_estimator_learns_which_part_of_max_tokens_is_used() -> None:
    estimator, running = AdmissionEstimator(), a_request(2000, done=0)
    assert estimator.expected_tokens(running) == 2000, "nothing is known: all of it, up to a bound"
    assert estimator.expected_tokens(a_request(10_000, done=0)) == UNKNOWN_LENGTH
    assert estimator.expected_tokens(a_request(10_000, done=3000)) == 3000, "and as much again"
    for _ in range(MIN_HISTORY):
        estimator.record(a_request(1000, done=100))
        estimator.record(a_request(1000, done=500))
    assert estimator.expected_tokens(running) == 600
    assert estimator.expected_tokens(a_request(2000, done=300)) == 700, (
        "it has outlived the short ones"
    )
    assert estimator.expected_tokens(a_request(2000, done=1200)) == 800, (
        "it has outlived all: as much again, within max_tokens"
    )
    for _ in range(HISTORY):
        estimator.record(a_request(1000, done=1000))
    assert estimator.expected_tokens(running) == 2000, "what is long ago is forgotten"


def a_request(most: int, done: int) -> Request:
    request = Request(
        id="x",
        index=0,
        prompt=Prompt([1]),
        params=SamplingParams(),
        seed=0,
        arrival=0.0,
        max_tokens=most,
        output=[5] * done,
    )
    request.num_scheduled_outputs = done
    return request


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(1, 40),
    st.none() | st.integers(1, 9),
)
def test_the_peak_is_what_really_happens_but_for_half_a_page_each(
    page_size: int, requests: list[tuple[int, int]], horizon: int, limit: int | None
) -> None:
    demands, used = list[PageDemand](), 0
    for to_come, tokens in requests:
        pages = -(-tokens // page_size)
        used += pages
        demands += bounded(
            PageDemand(to_come, pages, pages * page_size - tokens), pages, limit, page_size
        )

    def held(tokens: int, step: int) -> int:
        return min(-(-(tokens + step) // page_size), max(limit or 10**6, -(-tokens // page_size)))

    real = max(
        sum(held(tokens, step) for to_come, tokens in requests if to_come >= step)
        for step in range(min(horizon, max(to_come for to_come, _ in requests)) + 1)
    )
    assert abs(peak(used, demands, page_size, horizon) - real) <= len(requests) * (
        page_size + 1
    ) / (2 * page_size)
    assert peak(used, demands, page_size, 0) == used
    assert (
        used
        <= peak(used, demands, page_size, horizon)
        <= peak_bound(used, len(demands), page_size, horizon)
    )
