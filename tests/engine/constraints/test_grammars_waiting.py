"""Requests that wait for their grammar, and what their ends tell."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from jaxllm import (
    LLM,
)
from jaxllm.engine.scheduling.request import Status
from jaxllm.grammar.matcher import Matcher
from tests.engine.conftest import Outcome, collect, write_random
from tests.engine.constraints.test_grammars import load, request


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, repo: Path) -> LLM:
    return load(write_random(tmp_path_factory.mktemp("random"), repo))


def test_waiting_for_a_grammar_does_not_hold_others_up(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, later = llm.engine, Future[Matcher]()
    matchers, waits = engine.grammars.matchers, request(llm, "waits", {"regex": "later"})
    with monkeypatch.context() as patch:
        patch.setattr(matchers, "start_matcher", lambda grammar: later)
        engine.add(waits)
    engine.add(request(llm, "free", max_tokens=3, ignore_eos=True))
    deltas = []
    while not any(d.finish_reason for d in deltas):
        deltas += engine.step()
    assert {d.id for d in deltas} == {"free"}
    assert waits.grammar is not None
    later.set_result(matchers.start_matcher(waits.grammar).result(60))
    assert Outcome.of(collect(engine, []), "waits").finish_reason == "stop"
    assert all(
        c.status is Status.FINISHED
        for live in engine.requests.states.values()
        for c in live.choices
    )


def test_an_engine_that_waits_for_a_grammar_alone_says_so_and_its_driver_hears_when_it_is_built(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, heard = llm.engine, []
    matchers, later = engine.grammars.matchers, [Future[Matcher](), Future[Matcher]()]
    waits = request(llm, "waits", {"regex": "later"}, n=2)
    futures = iter(later)
    with monkeypatch.context() as patch:
        patch.setattr(matchers, "start_matcher", lambda grammar: next(futures))
        engine.when_built(lambda: heard.append(len(heard)))
        engine.add(waits)
    assert engine.has_work and engine.awaits_grammar
    engine.add(request(llm, "free", max_tokens=1, ignore_eos=True))
    assert not engine.awaits_grammar
    while not engine.awaits_grammar:
        engine.step()
    assert waits.grammar is not None and heard == []
    later[1].set_result(matchers.start_matcher(waits.grammar).result(60))
    assert heard == [0] and engine.awaits_grammar, "choices of a request run in their order"
    later[0].set_result(matchers.start_matcher(waits.grammar).result(60))
    assert heard == [0, 1] and not engine.awaits_grammar
    deltas = collect(engine, [])
    assert [Outcome.of(deltas, "waits", index).finish_reason for index in range(2)] == [
        "stop",
        "stop",
    ]


@pytest.mark.parametrize(
    "options", [{}, {"n": 2}, {"n": 2, "best_of": 3}, {"n": 1, "best_of": 2, "logprobs": 1}]
)
@pytest.mark.parametrize(
    ("structure", "extra"),
    [
        ({"choice": ["the quick brown fox jumps over the lazy dog"]}, {}),
        ({"regex": "x{1,3}"}, {"max_tokens": 1}),
        ({"regex": "x{0,3}"}, {"allowed_token_ids": [5], "ignore_eos": True}),
        ({"regex": "x"}, {"allowed_token_ids": [5]}),
        ({"regex": "[a-z]{9}"}, {}),
    ],
    ids=["forced", "one token", "ends without a token", "no token", "many tokens"],
)
def test_log_probabilities_of_a_prompt_are_told_once_with_every_choice_however_it_ends(
    llm: LLM, structure: dict[str, Any], extra: dict[str, Any], options: dict[str, Any]
) -> None:
    plain = collect(llm.engine, [request(llm, "p", max_tokens=1, prompt_logprobs=2)])[
        0
    ].prompt_logprobs
    assert plain is not None
    deltas = collect(
        llm.engine, [request(llm, "r", structure, prompt_logprobs=2, **options, **extra)]
    )
    ends = {delta.index: delta for delta in deltas if delta.finish_reason}
    assert sorted(ends) == list(range(options.get("n", 1)))
    for index in ends:
        told = [
            delta.prompt_logprobs
            for delta in deltas
            if delta.index == index and delta.prompt_logprobs is not None
        ]
        assert [one.packed for one in told] == [plain.packed]
        assert next(delta for delta in deltas if delta.index == index).prompt_logprobs is not None


def test_an_abort_tells_the_log_probabilities_that_are_there(llm: LLM) -> None:
    engine = llm.engine
    engine.add(request(llm, "r", {"regex": "[a-z]{99}"}, prompt_logprobs=2, n=1, best_of=2))
    while engine.stats().running < 2 or not all(
        choice.output for choice in engine.requests.states["r"].choices
    ):
        assert engine.step() == []
    engine.abort("r")
    (end,) = collect(engine, [])
    assert end.finish_reason == "abort" and end.prompt_logprobs is not None


def test_an_end_that_is_to_be_told_waits_for_no_grammar(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, told = llm.engine, []
    requests = [request(llm, id, {"regex": "later"}) for id in ("waits", "leaves")]
    with monkeypatch.context() as patch:
        patch.setattr(engine.grammars.matchers, "start_matcher", lambda grammar: Future[Matcher]())
        for one in requests:
            engine.add(one)
    engine.abort("leaves")
    stepping = threading.Thread(target=lambda: told.extend(engine.step()), daemon=True)
    stepping.start()
    stepping.join(20)
    assert [(delta.id, delta.finish_reason) for delta in told] == [("leaves", "abort")]
    engine.abort("waits")
    assert [delta.id for delta in collect(engine, [])] == ["waits"]
