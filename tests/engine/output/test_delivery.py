"""`stream_interval`: tokens of a choice are sent so many at a time, the first at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from jaxllm.engine.engine import Engine
from jaxllm.engine.output.delivery import StreamInterval, deliverable, holder
from jaxllm.logprobs import packed_from
from jaxllm.messages import PromptLogprobs, TextDelta, TokenLogprobs
from jaxllm.sampling.options import OptionError, SamplingParams
from tests.engine.conftest import Outcome, collect, entries_of
from tests.engine.test_engine import request


def delta(token: int, index: int = 0, finish: str | None = None, id: str = "r") -> TextDelta:
    entry = TokenLogprobs(token_id=token, logprob=-token, rank=1, top=[])
    return TextDelta(
        id=id,
        index=index,
        token_ids=[token],
        text=chr(97 + token),
        logprobs=packed_from([entry], 0),
        finish_reason=finish,
    )


def sent(interval: int, tokens: int) -> list[list[int]]:
    """The tokens of each delta that the client of one choice gets."""
    holds = StreamInterval(SamplingParams(stream_interval=interval))
    given = [delta(at, finish="length" if at == tokens - 1 else None) for at in range(tokens)]
    found = [one.token_ids for each in given for one in holds.hold(each)]
    assert holds.ended
    return found


def test_the_first_token_goes_at_once_and_the_end_takes_the_rest_along() -> None:
    assert sent(3, 9) == [[0], [1, 2, 3], [4, 5, 6], [7, 8]]
    assert sent(3, 7) == [[0], [1, 2, 3], [4, 5, 6]]
    assert sent(3, 2) == [[0], [1]]
    assert sent(100, 5) == [[0], [1, 2, 3, 4]]
    assert sent(2, 1) == [[0]]


def test_what_is_joined_is_all_of_its_deltas() -> None:
    holds = StreamInterval(SamplingParams(stream_interval=3))
    scores = PromptLogprobs(top=0, packed=b"")
    assert holds.hold(delta(0))
    first = delta(1)
    first.prompt_logprobs = scores
    assert not holds.hold(first)
    last = TextDelta(
        id="r", index=0, token_ids=[], text="!", finish_reason="abort", num_cached_tokens=16
    )
    (found,) = holds.hold(last)
    assert found == TextDelta(
        id="r",
        index=0,
        token_ids=[1],
        text="b!",
        logprobs=delta(1).logprobs,
        prompt_logprobs=scores,
        finish_reason="abort",
        num_cached_tokens=16,
    )


def test_choices_are_counted_apart_and_other_requests_go_at_once() -> None:
    params = SamplingParams(stream_interval=2, n=2)
    made = holder(params)
    assert made is not None
    assert holder(replace(params, stream_interval=1)) is None
    holders = {"r": made}
    assert len(deliverable(holders, [delta(0), delta(0, 1), delta(0, id="other")])) == 3
    assert deliverable(holders, [delta(1), delta(1, 1, finish="stop")])[0].index == 1
    assert holders
    ended = deliverable(holders, [delta(2, finish="stop")])
    assert [one.token_ids for one in ended] == [[1, 2]]
    assert not holders


def test_an_engine_says_the_same_in_fewer_deltas(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_logprobs=2)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)
    every = collect(engine, [request(params)])
    fewer = collect(engine, [request(replace(params, stream_interval=4))])
    assert [len(one.token_ids) for one in every] == [1] * 10
    assert [len(one.token_ids) for one in fewer] == [1, 4, 4, 1]
    assert Outcome.of(fewer, "r") == Outcome.of(every, "r")
    assert entries_of(fewer) == entries_of(every)
    # An abort takes along what was held
    engine.add(request(replace(params, stream_interval=4)))
    deltas = engine.step()
    while len(engine.requests.states["r"].choices[0].output) < 3:
        deltas += engine.step()
    said = list(engine.requests.states["r"].choices[0].output)
    engine.abort("r")
    deltas += collect(engine, [])
    assert [token for one in deltas for token in one.token_ids] == said
    assert deltas[-1].finish_reason == "abort"
    assert not engine.requests.holders


def test_a_beam_search_takes_no_interval() -> None:
    with pytest.raises(OptionError, match="stream_interval cannot be used in a beam search"):
        SamplingParams(use_beam_search=True, n=2, stream_interval=2)
