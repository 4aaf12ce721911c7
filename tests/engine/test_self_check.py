"""An engine looks at its own accounts: in order, nothing happens; broken, it says so, owes nobody
an answer, and starts over."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jaxllm.engine.engine import Engine
from jaxllm.engine.scheduling.request import PromptSharing
from jaxllm.messages import GenerateRequest
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import collect, run

type MakeEngine = Callable[..., Engine]

PROMPT = [5, 17, 40, 8, 23]


def request(params: SamplingParams, id: str) -> GenerateRequest:
    return GenerateRequest(id=id, prompt=Prompt(PROMPT), params=params)


def test_an_engine_in_order_passes_its_self_check(make_engine: MakeEngine) -> None:
    engine = make_engine()
    run(engine, [PROMPT * 4], SamplingParams(max_tokens=4))
    before = engine.stats()
    engine.self_check()
    after = engine.stats()
    assert (after.self_checks, after.self_check_failures, after.self_check_problem) == (
        before.self_checks + 1,
        0,
        "",
    )
    assert len(engine.scheduler.pools[0].index or ()) > 0, "it forgets nothing"


@pytest.mark.parametrize(
    "fault",
    [
        "a page is lost",
        "a page is held by nobody",
        "a slot is lost",
        "a findable page is blank",
        "a request is lost",
        "a search is gone",
    ],
)
def test_a_broken_engine_says_so_and_starts_over(make_engine: MakeEngine, fault: str) -> None:
    engine, params = make_engine(), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = run(engine, [PROMPT * 4], params)
    pool, scheduler = engine.scheduler.pools[0], engine.scheduler
    if fault == "a page is lost":
        pool._blank.pop()
    elif fault == "a page is held by nobody":
        pool.allocate(1)
    elif fault == "a slot is lost":
        scheduler._slots._free.pop()
    elif fault == "a findable page is blank":
        pool.index.register(b"x" * 32, pool._blank[0])  # type: ignore[union-attr]
    elif fault == "a search is gone":
        scheduler._slots.searches.append(PromptSharing([], slots=2))
    else:
        engine.add(request(params, "lost"))
        scheduler._waiting.pop_all()
    engine.self_check()
    stats = engine.stats()
    assert stats.self_check_failures == 1
    assert any(word in stats.self_check_problem for word in ("page", "slot", "lost"))
    assert [delta.finish_reason for delta in collect(engine, [])] == (
        ["error"] if fault == "a request is lost" else []
    )
    assert run(engine, [PROMPT * 4], params) == expected
    assert engine.stats().prefix_hits == 0
    engine.self_check()
    assert engine.stats().self_check_failures == 1


@pytest.mark.parametrize("fault", ["a count", "a table", "a check that breaks"])
def test_a_self_check_ends_requests_that_live_on_broken_pages_without_touching_these(
    make_engine: MakeEngine, fault: str
) -> None:
    engine, params = make_engine(), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = run(engine, [PROMPT * 4], params)
    engine.add(request(params, "plain"))
    engine.add(request(SamplingParams(n=2, best_of=3, max_tokens=20, ignore_eos=True), "best"))
    engine.add(
        request(SamplingParams(n=2, use_beam_search=True, max_tokens=20, ignore_eos=True), "beams")
    )
    while not all(
        choice.output for live in engine.requests.states.values() for choice in live.choices
    ):
        engine.step()
    pool = engine.scheduler.pools[0]
    pages = next(live.choices[0].pages for live in engine.requests.states.values())
    if fault == "a count":
        pool._references[pages[0]] = 0  # to give it back once more raises
    elif fault == "a table":
        pages[0] = pool.num_pages + 7
    else:
        engine.scheduler.check = lambda: [][0]  # type: ignore[method-assign, index]
    engine.self_check()
    assert engine.stats().self_check_failures == 1 and engine.stats().self_check_problem
    engine.scheduler.__dict__.pop("check", None)
    ends = collect(engine, [])
    assert sorted((delta.id, delta.index) for delta in ends) == [
        ("beams", 0),
        ("beams", 1),
        ("best", 0),
        ("best", 1),
        ("plain", 0),
    ]
    assert all(
        (delta.finish_reason, delta.error) == ("error", "the engine lost this request")
        for delta in ends
    )
    assert len({id(delta.token_ids) for delta in ends}) == len(ends), (
        "who writes to one writes to that one"
    )
    assert run(engine, [PROMPT * 4], params) == expected
    engine.scheduler.check()
