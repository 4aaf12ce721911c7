"""POST /v1/messages: scripted outputs of models become content blocks, whole and as events."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.messages import TextDelta
from jaxllm.server.anthropic.replies import MessagesReply, blocks_of
from jaxllm.server.errors import server_error
from jaxllm.server.openai.replies import NamelessTokens, ReplySpec
from jaxllm.server.parsing.formats import Formats
from jaxllm.server.parsing.parts import (
    Part,
    Reasoning,
    Text,
    ToolArguments,
    ToolEnd,
    ToolStart,
    merged,
)
from tests.server.anthropic.events import (
    BODY,
    CUSTOM,
    PATH,
    collected,
    events,
    script,
    streamed,
    whole,
    without_ids,
)
from tests.server.harness import Answer, Running
from tests.server.parsing.samples import SAMPLES

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = "<think>\nParis, so.\n</think>\n\n"


@pytest.fixture(autouse=True)
def scripted(server: Running) -> Iterator[None]:
    """Every test sets its formats and its output."""
    yield
    server.server_state.formats = Formats()
    server.control.pieces = []


@pytest.mark.parametrize("way", [whole, streamed])
def test_an_answer_thinks_then_speaks_then_calls(server: Running, way: type) -> None:
    script(server, THOUGHT + "Let me see.\n" + CALL + "\n" + CALL)
    message = way(server, tools=CUSTOM)
    thought, text, call, other = message["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Paris, so.")
    assert thought["signature"]
    assert text == {"type": "text", "text": "Let me see."}
    assert call["id"] != other["id"]
    for one in (call, other):
        assert one.keys() == {"type", "id", "name", "input"}
        assert (one["name"], one["input"]) == ("get_weather", {"city": "Paris"})
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "fake")
    assert message["id"].startswith("msg_")


@pytest.mark.parametrize("way", [whole, streamed])
def test_a_call_that_ends_an_open_thought_is_a_block(server: Running, way: type) -> None:
    script(server, THOUGHT.partition("</think>")[0] + CALL)
    message = way(server, tools=CUSTOM)
    thought, call = message["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Paris, so.")
    assert (call["name"], call["input"]) == ("get_weather", {"city": "Paris"})
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("name", ["llama3_json", "mistral", "qwen3_coder", "gpt_oss", "kimi_k2"])
def test_a_stream_makes_the_message_of_a_whole_reply_in_every_format(
    server: Running, name: str
) -> None:
    for sample in SAMPLES[name][:3]:
        script(server, sample.text, size=4, tools=name)
        one, other = whole(server, tools=CUSTOM), streamed(server, tools=CUSTOM)
        assert without_ids(one) == without_ids(other)
        calls = [block for block in one["content"] if block["type"] == "tool_use"]
        assert [(call["name"], call["input"]) for call in calls] == sample.calls


TEXTS = st.text('ab \n"{}<é', min_size=1, max_size=6)
CALLS = st.sampled_from([["{}"], ['{"a": ', "1}"], ['{"a', '": "', "é", '"}']])


@st.composite
def part_lists(draw: st.DrawFn) -> list[Part]:
    """Parts as pipelines make them."""
    parts: list[Part] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from("trc"), max_size=6)):
        if kind == "t":
            parts.append(Text(draw(TEXTS)))
        elif kind == "r":
            parts.append(Reasoning(draw(TEXTS)))
        else:
            parts.append(ToolStart(calls, "f", f"call_{calls}"))
            parts += [ToolArguments(calls, text) for text in draw(CALLS)]
            parts.append(ToolEnd(calls))
            calls += 1
    return parts


class Told:
    """A pipeline that has been told its parts, some for each delta."""

    thinking = False

    def __init__(self, parts: list[Part], sizes: list[int]):
        self._parts, self._sizes = parts, sizes
        self.called = any(isinstance(part, ToolStart) for part in parts)

    def feed(self, text: str) -> list[Part]:
        """The next parts."""
        size = self._sizes.pop() if self._sizes else 1
        found, self._parts = self._parts[:size], self._parts[size:]
        return found

    def finish(self) -> list[Part]:
        """The rest."""
        return self._parts


@given(part_lists(), st.lists(st.integers(0, 3), max_size=4))
@settings(max_examples=150, deadline=None)
def test_any_parts_in_any_deltas_stream_as_the_blocks_of_the_whole(
    parts: list[Part], sizes: list[int]
) -> None:
    def reply() -> MessagesReply:
        spec = ReplySpec(prompts=[[1, 2]], new_pipeline=lambda: Told(parts, list(sizes)))  # type: ignore[arg-type, return-value]
        return MessagesReply("id", "model", "print", spec, 1, NamelessTokens())

    deltas = [TextDelta(id="0", index=0, token_ids=[1], text="x") for _ in sizes]
    deltas.append(TextDelta(id="0", index=0, token_ids=[1], text="x", finish_reason="stop"))
    streaming, at_once = reply(), reply()
    data = b"".join(streaming.events(0, delta) for delta in deltas) + streaming.last_events()
    for delta in deltas:
        at_once.add_delta(0, delta)
    answer = Answer(200, {"content-type": "text/event-stream; charset=utf-8"}, data)
    message = collected(events(answer))
    assert message == at_once.full_reply()
    assert message["content"] == blocks_of(merged(parts))


def test_events_come_in_the_order_that_clients_expect(server: Running) -> None:
    script(server, THOUGHT + "So.", size=50)
    found = events(server.post(PATH, BODY | {"stream": True}))
    assert [event["type"] for event in found] == [
        "message_start", "ping",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    kinds = [event["delta"]["type"] for event in found if event["type"] == "content_block_delta"]
    assert kinds == ["thinking_delta", "signature_delta", "text_delta"]


@pytest.mark.parametrize("way", [whole, streamed])
def test_usage_counts_cached_tokens_and_thoughts_apart(server: Running, way: type) -> None:
    script(server, "<think>four tokens\n\n</think>yes", size=8)
    usage = way(server)["usage"]
    ids = len(server.control.added[-1].prompt.tokens)
    assert usage["cache_read_input_tokens"] == 16
    assert usage["input_tokens"] == ids - 16
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["output_tokens"] == 4
    assert usage["output_tokens_details"] == {"thinking_tokens": 3}


@pytest.mark.parametrize("way", [whole, streamed])
def test_each_end_has_its_reason(server: Running, way: type) -> None:
    script(server, "one two three")
    assert way(server)["stop_reason"] == "end_turn"
    assert way(server, max_tokens=2)["stop_reason"] == "max_tokens"
    stopped = way(server, stop_sequences=["two"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")


@pytest.mark.parametrize("way", [whole, streamed])
def test_a_server_without_parsers_answers_with_text(server: Running, way: type) -> None:
    server.control.pieces = ["a <think>", "b"]
    message = way(server)
    assert message["content"] == [{"type": "text", "text": "a <think>b"}]
    assert "output_tokens_details" not in message["usage"]


def test_a_call_that_is_cut_short_keeps_its_whole_members(server: Running) -> None:
    text = CALL.replace('"Paris"', '"Paris", "unit": "celsius"')
    script(server, text, size=1)
    message = whole(server, tools=CUSTOM, max_tokens=text.index("cels"))
    assert message["content"][0]["input"] == {"city": "Paris"}
    assert message["stop_reason"] == "max_tokens"


def test_thoughts_may_be_omitted(server: Running) -> None:
    script(server, THOUGHT + "Hello.")
    thinking = {"type": "adaptive", "display": "omitted"}
    for way in (whole, streamed):
        content = way(server, thinking=thinking)["content"]
        assert content == [{"type": "text", "text": "Hello."}]


def test_one_call_at_a_time_can_be_asked_for(server: Running) -> None:
    script(server, CALL + "\n" + CALL)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(whole(server, tools=CUSTOM)["content"]) == 2
    assert len(whole(server, tools=CUSTOM, tool_choice=choice)["content"]) == 1


def test_a_stream_that_fails_ends_with_an_error_event(server: Running) -> None:
    server.control.error_delta = True
    try:
        answer = server.post(PATH, BODY | {"stream": True})
    finally:
        server.control.error_delta = False
    assert answer.status == 500
    assert answer.json()["error"]["type"] == "api_error"
    spec = ReplySpec(prompts=[[1]])
    reply = MessagesReply("id", "model", "print", spec, 1, NamelessTokens())
    name, data = reply.error_events(server_error()).decode().removesuffix("\n\n").split("\n")
    assert name == "event: error"
    assert '"request_id":null' in data  # the head's, which is not the reply's


def test_tokens_are_counted_as_the_prompt_has_them(server: Running) -> None:
    script(server, "a")
    body = BODY | {"system": "Be brief.", "tools": CUSTOM}
    counted = server.post(f"{PATH}/count_tokens", body).json()
    server.post(PATH, body)
    assert counted == {"input_tokens": len(server.control.added[-1].prompt.tokens)}


def test_counting_needs_no_max_tokens_and_takes_what_exceeds_the_context(server: Running) -> None:
    long = [{"role": "user", "content": "x" * 1000}]
    counted = server.post(f"{PATH}/count_tokens", {"model": "fake", "messages": long})
    assert counted.json()["input_tokens"] > 1000 > server.server_state.resolved.max_model_len
    assert server.post(PATH, BODY | {"messages": long}).status == 400
