"""The streams of the streaming benchmark, and its figures."""

from __future__ import annotations

import pytest

from benchmarks.paced_engine import TURN_SECONDS, Plan
from benchmarks.streaming import TOOL, Server, ended, figures, said, tokens_of
from jaxllm.server.parsing.parts import Reasoning, Text, ToolArguments, ToolEnd, ToolStart
from jaxllm.server.parsing.pipeline import pipeline
from jaxllm.server.parsing.registry import find_reasoning, find_tools
from tests.server.parsing.feeding import fed


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("count", [100, 768])
def test_a_stream_has_as_many_tokens_as_asked_for(count: int, calls: bool) -> None:
    assert len(said(count, calls)) == count


def test_no_token_cuts_an_escape() -> None:
    text = r"a\n\"bcdef\\"
    assert "".join(tokens_of(text)) == text
    assert tokens_of(text) == ["a", r"\n", r"\"", "bcde", "f", r"\\"]


def test_the_parsers_find_a_thought_a_reply_and_a_whole_call() -> None:
    schemas = {"run": TOOL["function"]["parameters"]}
    own = pipeline(
        find_reasoning("qwen3", None), find_tools("hermes", None), "<assistant>", schemas
    )
    parts = fed(own, said(300, calls=True))
    assert [type(part) for part in parts] == [Reasoning, Text, ToolStart, ToolArguments, ToolEnd]
    assert parts[-1] == ToolEnd(0, complete=True)


def test_servers_take_turns() -> None:
    plans = [Plan(1, 1.0, [], 3, turn) for turn in range(3)]
    for step in range(60):
        now = 1000 + (step + 0.5) * TURN_SECONDS / 5
        waits = [plan.seconds_to_turn(now) for plan in plans]
        assert waits.count(0.0) == 1
        assert max(waits) <= 2 * TURN_SECONDS


def test_a_stream_ends_with_its_last_event_however_it_is_cut() -> None:
    seen = bytearray()
    assert not ended(b"HTTP/1.1 200 OK\r\n", seen)
    assert not ended(b"x" * 100 + b"data: [DO", seen)
    assert ended(b"NE]\n\n", seen)


def test_a_request_that_is_refused_or_broken_off_ends_the_run() -> None:
    with pytest.raises(SystemExit, match="400 Bad Request"):
        ended(b"HTTP/1.1 400 Bad Request", bytearray())
    with pytest.raises(SystemExit, match="broke off"):
        ended(b"", bytearray(b"HTTP/1.1 200 OK"))


def test_shares_are_of_the_same_second() -> None:
    off = Server(1, 1, b"", costs=[10.0, 20.0], windows=[1.0, 2.0, 4.0])
    on = Server(2, 2, b"", costs=[11.0, 22.0], windows=[1.1, 2.2, 4.2])
    found = figures({"off": off, "on": on})
    assert (found["off"]["more_percent"], found["on"]["more_percent"]) == (0, 10)
    assert (found["on"]["lower_quartile"], found["on"]["upper_quartile"]) == (5, 10)
    assert (found["on"]["cpu_us_per_token"], found["on"]["lowest"]) == (16.5, 11)
