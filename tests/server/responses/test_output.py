"""Parts become items and events. What a client adds up from the events is the whole response, for
openai-python's stream accumulator and for every way in which parts follow each other."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import openai
import pytest
from hypothesis import given, settings
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from jaxllm.server.parsing.parts import Part, Reasoning, Text, ToolArguments, ToolEnd, ToolStart
from jaxllm.server.responses.output import Output
from jaxllm.server.responses.sealed import unseal
from jaxllm.server.responses.tools import Origin

ORIGINS = {
    "add": Origin("function", "add", None),
    "mcp__docs__find": Origin("function", "find", "mcp__docs__"),
    "patch": Origin("custom", "patch", None),
}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "fake",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}


def output(summarised: bool = False, sealed: bool = False) -> Output:
    return Output(ORIGINS, summarised, sealed)


def numbered(events: list[dict[str, Any]], items: list[Any], status: str) -> list[dict[str, Any]]:
    """A whole stream: the first events, these, and the last."""
    first = RESPONSE | {"status": "in_progress", "output": []}
    last = RESPONSE | {"status": status, "output": items}
    whole = [
        {"type": "response.created", "response": first},
        {"type": "response.in_progress", "response": first},
        *events,
        {"type": f"response.{status}", "response": last},
    ]
    return [event | {"sequence_number": number} for number, event in enumerate(whole)]


def accumulated(events: list[dict[str, Any]]) -> Any:
    """What the SDK's accumulator makes of a stream."""
    state: Any = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    for event in events:
        state.handle_event(EVENT.validate_python(event))
    return state


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


TEXT_EVENTS = (
    "output_item.added content_part.added output_text.delta output_text.delta output_text.done "
    "content_part.done output_item.done"
).split()


def test_text_is_one_message():
    out = output()
    events = out.feed([Text("Hel"), Text("lo")], []) + out.finish(True)
    assert kinds(events) == TEXT_EVENTS
    assert [item["content"][0]["text"] for item in out.items] == ["Hello"]
    assert out.items[0]["status"] == "completed"


def test_text_that_was_cut_short_is_an_incomplete_message():
    out = output()
    out.feed([Text("Hel")], [])
    events = out.finish(False)
    assert events[-1]["item"]["status"] == out.items[0]["status"] == "incomplete"


def test_nothing_is_an_empty_message_unless_it_was_cut_short():
    out = output()
    assert kinds(out.finish(True)) == [kind for kind in TEXT_EVENTS if "delta" not in kind]
    assert out.items[0]["content"][0]["text"] == ""
    assert output().finish(False) == []


def test_reasoning_is_content_that_can_be_sent_back():
    out = output(sealed=True)
    events = out.feed([Reasoning("hm"), Reasoning("m"), Text("5")], []) + out.finish(True)
    assert (
        kinds(events)[:7]
        == (
            "output_item.added content_part.added reasoning_text.delta reasoning_text.delta "
            "reasoning_text.done content_part.done output_item.done"
        ).split()
    )
    thought = out.items[0]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hmm"}]
    assert thought["summary"] == []
    assert unseal(thought["encrypted_content"]) == "hmm"


def test_reasoning_is_the_summary_for_clients_that_want_one():
    out = output(summarised=True)
    events = out.feed([Reasoning("hm"), Text("5")], []) + out.finish(True)
    assert (
        kinds(events)[:6]
        == (
            "output_item.added reasoning_summary_part.added reasoning_summary_text.delta "
            "reasoning_summary_text.done reasoning_summary_part.done output_item.done"
        ).split()
    )
    thought = out.items[0]
    assert thought["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert "content" not in thought
    assert "encrypted_content" not in thought


def call(name: str, arguments: str, complete: bool = True) -> list[Part]:
    return [ToolStart(0, name, "call_7"), ToolArguments(0, arguments), ToolEnd(0, complete)]


def test_a_call_has_the_model_s_id_and_streams_its_arguments():
    out = output()
    events = out.feed(call("add", '{"a": 1}'), []) + out.finish(True)
    assert (
        kinds(events)
        == (
            "output_item.added function_call_arguments.delta function_call_arguments.done "
            "output_item.done"
        ).split()
    )
    item = out.items[0]
    assert (item["call_id"], item["name"], item["arguments"]) == ("call_7", "add", '{"a": 1}')
    assert "namespace" not in item


def test_a_call_of_a_namespace_names_it():
    out = output()
    out.feed(call("mcp__docs__find", "{}"), [])
    assert (out.items[0]["name"], out.items[0]["namespace"]) == ("find", "mcp__docs__")


def test_a_custom_call_has_plain_text():
    out = output()
    events = out.feed(call("patch", '{"input": "*** Begin\\n\\"x\\""}'), [])
    assert (
        kinds(events)
        == (
            "output_item.added custom_tool_call_input.delta custom_tool_call_input.done "
            "output_item.done"
        ).split()
    )
    assert events[0]["item"]["input"] == ""
    assert out.items[0]["input"] == events[1]["delta"] == '*** Begin\n"x"'
    assert out.items[0]["type"] == "custom_tool_call"


@pytest.mark.parametrize("arguments", ['{"inp', '{"input": 5}', "[]", "", '{"text": "x"}'])
def test_a_broken_custom_call_shows_what_there_is(arguments):
    out = output()
    out.feed(call("patch", arguments, complete=False), [])
    assert (out.items[0]["input"], out.items[0]["status"]) == (arguments, "incomplete")


def test_an_unknown_tool_is_a_function():
    out = output()
    out.feed(call("other", "{}"), [])
    assert (out.items[0]["type"], out.items[0]["name"]) == ("function_call", "other")


def test_log_probabilities_are_those_of_the_text():
    out = output()
    one, two = ({"token": t, "logprob": -1, "bytes": [], "top_logprobs": []} for t in "ab")
    events = out.feed([Text("a")], [one]) + out.feed([Text("b")], [two]) + out.finish(True)
    assert [e["logprobs"] for e in events if e["type"].endswith("text.delta")] == [[one], [two]]
    assert out.items[0]["content"][0]["logprobs"] == [one, two]


def test_a_snapshot_shows_the_open_item_without_text():
    out = output()
    out.feed([Reasoning("x"), Text("y")], [])
    assert [item["status"] for item in out.snapshot()] == ["completed", "in_progress"]


TEXTS = st.text(min_size=1, max_size=4)


@st.composite
def calls(draw: st.DrawFn) -> list[Part]:
    """A call in fragments; it may break off."""
    index, name = 0, draw(st.sampled_from([*ORIGINS, "unknown"]))
    fragments = draw(st.lists(TEXTS, max_size=3))
    return [
        ToolStart(index, name, draw(st.sampled_from([None, "call_1", "functions.add:0"]))),
        *(ToolArguments(index, text) for text in fragments),
        ToolEnd(index, draw(st.booleans())),
    ]


def in_a_row(runs: list[list[Part]]) -> list[Part]:
    """The parts of one output, whose calls have ids that differ, as parsers make them."""
    return [
        ToolStart(part.index, part.name, f"{part.id}{at}")
        if isinstance(part, ToolStart) and part.id is not None
        else part
        for at, run in enumerate(runs)
        for part in run
    ]


PARTS = st.lists(
    st.one_of(TEXTS.map(lambda t: [Text(t)]), TEXTS.map(lambda t: [Reasoning(t)]), calls()),
    max_size=8,
).map(in_a_row)


@settings(max_examples=100, deadline=None)
@given(PARTS, st.booleans(), st.booleans(), st.booleans(), st.lists(st.integers(0, 30)))
def test_events_add_up_to_the_items(parts, summarised, sealed, complete, cuts):
    out = output(summarised, sealed)
    events, at = [], 0
    for cut in [*sorted(cuts), len(parts)]:
        events += out.feed(parts[at:cut], [])
        at = max(at, cut)
    events += out.finish(complete)
    status = "completed" if complete else "incomplete"
    stream = numbered(events, out.items, status)
    state = accumulated(stream)
    Response.model_validate(stream[-1]["response"], strict=True)
    assert [event["item"] for event in events if event["type"].endswith("item.done")] == out.items
    grown = [item.to_dict() for _, item in sorted(state._output_items.items())]
    for item, final in zip(grown, out.items, strict=True):
        if final["type"] == "message":
            assert item["content"][0]["text"] == final["content"][0]["text"]
        if final["type"] == "function_call":
            assert item["arguments"] == final["arguments"]
    for name, final in (("reasoning", "text"), ("custom_tool_call_input", "input")):
        deltas: dict[str, str] = {}
        for event in events:
            if name in event["type"] and event["type"].endswith(".delta"):
                deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
        done = [
            e for e in events if name in e["type"] and e["type"].endswith(("t.done", "put.done"))
        ]
        assert deltas == {event["item_id"]: event[final] for event in done if final in event}


@settings(max_examples=100, deadline=None)
@given(PARTS)
def test_nothing_is_lost_or_doubled(parts):
    out = output()
    out.feed(parts, [])
    out.finish(False)
    texts = [item["content"][0]["text"] for item in out.items if item["type"] == "message"]
    thoughts = [item["content"][0]["text"] for item in out.items if item["type"] == "reasoning"]
    assert "".join(texts) == "".join(part.text for part in parts if isinstance(part, Text))
    assert "".join(thoughts) == "".join(p.text for p in parts if isinstance(p, Reasoning))
    assert sum("call" in item["type"] for item in out.items) == sum(
        isinstance(part, ToolStart) for part in parts
    )
    assert len({item["id"] for item in out.items}) == len(out.items)


def test_log_probabilities_of_markers_and_calls_are_left_out():
    out = output()
    out.feed([], ["<think>"])
    out.feed([Reasoning("a")], [])
    out.feed([], ["<"])  # may begin a marker, and does not
    out.feed([Text("<b")], ["b"])
    out.feed([], ["<tool_call>"])
    out.feed(call("add", "{}"), ["x"])
    out.finish(True)
    assert out.items[1]["content"][0]["logprobs"] == ["<", "b"]


def test_a_token_that_ends_a_thought_and_begins_the_text_keeps_its_log_probability():
    out = output()
    out.feed([Reasoning("a")])
    out.feed([Reasoning("b"), Text("c")], ["b</think>c"])
    out.feed([Text("d")], ["d"])
    out.finish(True)
    assert out.items[1]["content"][0]["logprobs"] == ["b</think>c", "d"]


def test_what_seemed_text_before_a_hidden_thought_leaves_no_log_probability():
    out = output()
    out.feed([], ["<"])
    out.feed([], None)
    out.feed([Text("d")], ["d"])
    out.finish(True)
    assert out.items[0]["content"][0]["logprobs"] == ["d"]
