"""Entering is all or nothing: a request whose entering fails leaves nothing behind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import jaxllm
from jaxllm.engine.engine import Engine
from jaxllm.grammar.checker import Checker
from jaxllm.grammar.structure import StructuredOutputsParams
from jaxllm.messages import GenerateRequest
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import collect, tokens_of, write_random

SOURCE = str(Path(jaxllm.__file__).parent)
PROMPT = [27, 18, 28, 18, 28, 45, 90, 4]
PLAIN = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}


class Fault(Exception):
    """Raised where a test wants it."""


@pytest.fixture(scope="module")
def engine(
    make_engine: Callable[..., Engine], repo: Path, tmp_path_factory: pytest.TempPathFactory
) -> Engine:
    path = tmp_path_factory.mktemp("random")
    return make_engine(model=write_random(path, repo), skip_tokenizer_init=False, max_logprobs=8)


@pytest.fixture(scope="module")
def grammar() -> Iterator[str]:
    checker = Checker({})
    yield checker.compile_params(StructuredOutputsParams(regex="[a-z]{3,9}"))
    checker.end_processes()


def request(id: str, grammar: str | None = None, **params: Any) -> GenerateRequest:
    return GenerateRequest(
        id=id, prompt=Prompt(PROMPT), params=SamplingParams(**PLAIN | params), grammar=grammar
    )


def fails(engine: Engine, request: GenerateRequest, event: str, number: int) -> bool | None:
    """Enter a request while the `number`-th call of a function of jaxllm fails: before it begins
    (`event` "call") or when it has done its work ("return"). None when there are fewer calls."""
    seen = 0

    def trace(frame: FrameType, happens: str, _: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(SOURCE) or frame.f_code is Engine.enter.__code__:
            return trace
        if happens == event:
            seen += 1
            if seen == number:
                raise Fault
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        engine.enter(request)
    except Fault:
        return True
    finally:
        sys.settrace(before)
    return False if seen >= number else None


@pytest.mark.parametrize("event", ["call", "return"])
@pytest.mark.parametrize(
    "params",
    [
        {"n": 2, "prompt_logprobs": 1},
        {"n": 1, "best_of": 3, "temperature": 1},
        {"n": 3, "use_beam_search": True},
        {"n": 2, "structured": True},
    ],
    ids=["choices", "ranked", "beams", "grammar"],
)
def test_whichever_call_of_entering_fails_nothing_is_left_of_the_request(
    engine: Engine, grammar: str, params: dict[str, Any], event: str
) -> None:
    params = dict(params)
    wanted = grammar if params.pop("structured", False) else None
    (expected,) = (tokens_of(collect(engine, [request("alone")]), "alone"),)
    counted = engine.stats().prompt_tokens
    failures = 0
    for number in range(1, 1000):
        failed = fails(engine, request(f"r{number}", wanted, **params), event, number)
        if not failed:
            # A fault in a callback is swallowed: the request has entered
            engine.abort(f"r{number}")
            collect(engine, [])
            counted = engine.stats().prompt_tokens
            if failed is None:
                break
            continue
        failures += 1
        assert not engine.has_work and not engine.requests.states and not engine.requests.beams.open
        assert not engine.requests.holders and engine.stats().waiting == 0
        assert engine.stats().prompt_tokens == counted
        engine.scheduler.check()
        if number % 8 == 0:
            assert tokens_of(collect(engine, [request("again")]), "again") == expected
            counted = engine.stats().prompt_tokens
    assert failures > 10
    assert tokens_of(collect(engine, [request("last")]), "last") == expected
    engine.self_check()
    assert engine.stats().self_check_failures == 0


def test_a_scheduler_that_refuses_the_second_choice_keeps_nothing_of_the_first(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks: list[float] = []

    def rank(request: Any) -> float:
        if ranks:
            raise Fault
        ranks.append(0.0)
        return 0.0

    monkeypatch.setattr(engine.scheduler, "rank", rank)
    with pytest.raises(Fault):
        engine.enter(request("r", n=2, temperature=1))
    monkeypatch.undo()
    assert not engine.has_work and engine.scheduler.waiting == 0
    assert len(tokens_of(collect(engine, [request("next")]), "next")) == 4
