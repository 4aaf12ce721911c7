"""Bodies of /v1/responses: what is refused, what is shortened, and what becomes a summary."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import pytest

from jaxllm.server.responses import items
from jaxllm.server.responses.history import Shortened, fitting, room_for_prompt
from jaxllm.server.responses.sealed import unseal
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running
from tests.server.responses.conftest import Script, prompt_of

PATH = "/v1/responses"
HI = {"model": "fake", "input": "hi"}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
BAD_SCHEMA = ADD | {"parameters": {"type": "array"}}
SPACE = {"type": "namespace", "name": "n", "description": "", "tools": [BAD_SCHEMA]}


@pytest.fixture(autouse=True)
def short_summons(monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks for a summary, in few of the fake engine's 256 tokens."""
    monkeypatch.setattr(items, "SUMMARISE", "Sum up.")


def says(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": "x" * 100_000}, "input"),
        ({"input": "raise"}, "input"),
        ({"model": "other"}, "model"),
        ({"messages": [says("user", "x")]}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"include": ["everything"]}, "include"),
        ({"include": "x"}, "include"),
        ({"store": "yes"}, "store"),
        ({"background": 1}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"truncation": "left"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"reasoning": "high"}, "reasoning"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 5}}}, "text.format"),
        ({"tools": [ADD | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [ADD, SPACE]}, "tools[1].tools[0].parameters"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template": "x"}, "chat_template"),
        *(
            ({name: 5}, name)
            for name in ("user", "service_tier", "safety_identifier", "prompt_cache_key")
        ),
        *(({"max_tool_calls": wrong}, "max_tool_calls") for wrong in ("5", True, 1.5, [1])),
        ({"client_metadata": "x"}, "client_metadata"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ],
)
def test_bad_bodies_are_refused_by_their_field(server: Running, body, param):
    reply = server.post(PATH, HI | body)
    assert reply.status in (400, 404)
    assert reply.error["param"] == param


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            {"text": {"format": {"type": "json_object"}}, "guided_regex": "a"},
            "guided_regex and text.format both",
        ),
        ({"min_tokens": 9, "max_output_tokens": 3}, "at most max_output_tokens (3)"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort must be"),
    ],
)
def test_errors_name_the_fields_of_this_endpoint(server: Running, body, words):
    assert words in server.post(PATH, HI | body).error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_body_that_nests_too_deeply_to_be_repeated_is_refused(
    server: Running, stream: bool
) -> None:
    deep: Any = 1
    for _ in range(250):
        deep = {"a": deep}
    item = {"role": "user", "content": "hi", "more": deep}
    for more in ({"input": [item]}, {"text": {"more": deep}}, {"max_tool_calls": deep}):
        answer = server.post(PATH, HI | {"stream": stream} | more)
        assert answer.status == 400
        assert "nest it less deeply" in answer.error["message"]
    nearly = deep["a"]["a"]["a"]["a"]["a"]["a"]
    assert server.post(PATH, HI | {"stream": stream, "text": {"more": nearly}}).status == 200


def test_what_clients_send_beside_the_request_is_taken(server: Running, script: Script):
    script("x")
    beside = {
        "tools": [],
        "include": ["reasoning.encrypted_content", "file_search_call.results"],
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
        "service_tier": "auto",
        "text": {"verbosity": "low"},
        "reasoning": {"effort": None, "summary": None},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "metadata": None,
        "stream": True,
        "stream_options": {"include_obfuscation": False},
        "top_k": 3,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    unknown = server.server_state.edge_metrics.unknown_fields
    assert server.post(PATH, HI | beside).status == 200
    assert server.server_state.edge_metrics.unknown_fields == unknown
    assert server.control.added[-1].params.top_k == 3


def test_the_oldest_messages_are_left_out_on_request(server: Running, script: Script):
    script("x")
    turns = [says(role, f"{number} " * 10) for number in range(8) for role in ("user", "assistant")]
    body = HI | {"input": [*turns, says("user", "now")], "instructions": "Be brief."}
    reply = server.post(PATH, body)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert server.post(PATH, body | {"truncation": "auto"}).status == 200
    shown = prompt_of(server)
    assert "Be brief." in shown and "now" in shown
    assert "7 7 7" in shown and "0 0 0" not in shown


@pytest.mark.parametrize("turns", [[says("user", "x" * 100_000)], [says("user", "x")] * 5000])
def test_messages_beyond_every_limit_are_left_out_too(server: Running, script: Script, turns):
    script("x")
    body = HI | {"input": [*turns, says("assistant", "y"), says("user", "now")]}
    assert server.post(PATH, body).status == 400
    assert server.post(PATH, body | {"truncation": "auto"}).status == 200
    assert "now" in prompt_of(server)


def test_a_long_turn_is_compacted_without_its_oldest_calls(server: Running, script: Script):
    script("We did it.")
    calls: list[dict[str, Any]] = []
    for number in range(20):
        ids = {"call_id": f"call_{number}"}
        calls.append({"type": "function_call", "name": "add", "arguments": "{}"} | ids)
        calls.append({"type": "function_call_output", "output": f"sum {number}."} | ids)
    body = {"model": "fake", "input": [says("user", "Do it."), *calls]}
    assert server.post(f"{PATH}/compact", body).status == 200
    assert "Do it." in prompt_of(server) and "sum 19." in prompt_of(server)
    assert "sum 0." not in prompt_of(server) and "Sum up." in prompt_of(server)


def test_truncation_does_not_shorten_what_cannot_be_left_out(server: Running):
    reply = server.post(PATH, HI | {"input": "x" * 300, "truncation": "auto"})
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


CALLS = [{"id": "c"}]
LONG = [
    says("system", "s"),
    says("user", "a"),
    says("assistant", "b"),
    says("user", "c"),
    says("assistant", "") | {"tool_calls": CALLS},
    says("tool", "d"),
    says("tool", "e"),
    says("assistant", "") | {"tool_calls": CALLS},
    says("tool", "f"),
]


def test_messages_are_shortened_by_turns_and_then_by_calls():
    found = ["".join(one["role"][0] for one in messages) for messages in Shortened(LONG)]
    assert found == ["suauattat", "suattat", "suat"]


def test_what_asks_for_a_summary_is_no_turn_and_stays():
    asked = [*LONG, says("user", "z")]
    found = ["".join(one["role"][0] for one in messages) for messages in Shortened(asked, after=1)]
    assert found == ["suauattatu", "suattatu", "suatu", "suu"]
    assert all(messages[-1] == asked[-1] for messages in Shortened(asked, after=1))


@pytest.mark.parametrize("messages", [LONG, LONG[:1], LONG[:2], LONG[4:], [says("user", "x")]])
def test_the_longest_that_fits_is_taken_and_the_shortest_if_none_does(messages):
    lengths = [len(one) for one in Shortened(messages)]

    async def render(one: list[Any]) -> list[int]:
        return [0] * len(one)

    for room in range(12):
        taken = len(asyncio.run(fitting(Shortened(messages), room, render)))
        assert taken == next((one for one in lengths if one <= room), lengths[-1])
    assert (room_for_prompt(800, None), room_for_prompt(800, 90)) == (700, 710)
    assert room_for_prompt(800, 5000) == 400


STRICT = """{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}
{{ raise_exception('system must be first') }}
{%- endif -%}
{{ message.role }}:{{ message.content }}
{% endfor -%}"""


def test_late_instructions_are_text_of_the_users_next_turn(model_dir: pathlib.Path):
    messages = [says("user", "a"), says("user", "b"), says("system", "c"), says("user", "d")]
    with Running(Tokenizer.load(model_dir, STRICT)) as server:
        assert server.post(PATH, HI | {"input": messages}).status == 200
        assert prompt_of(server) == "user:a\nuser:b\nuser:c\n\nd\n"
        assert server.post(PATH, HI | {"input": messages[:2]}).status == 200
        assert prompt_of(server) == "user:a\nuser:b\n"


CONVERSATION = [says("user", "Do it."), says("assistant", "Done."), says("user", "More.")]


def test_a_conversation_is_compacted(server: Running, client, script: Script):
    script("<think>\nhm\n</think>\n\nWe did it.")
    body = {"model": "fake", "input": CONVERSATION[:2], "tools": [ADD], "stream": False}
    made = server.post(f"{PATH}/compact", body).json()
    assert "Do it." in prompt_of(server) and "Done." in prompt_of(server)
    assert made["object"] == "response.compaction"
    user, summary = made["output"]
    assert user["content"] == [{"type": "input_text", "text": "Do it."}]
    assert (summary["type"], unseal(summary["encrypted_content"])) == ("compaction", "We did it.")
    assert made["usage"]["output_tokens"] == len(server.control.pieces)
    script("x")
    assert client.responses.create(model="fake", input=made["output"]).output_text == "x"
    assert "Do it." in prompt_of(server) and "We did it." in prompt_of(server)


def test_a_stored_conversation_is_compacted(server: Running, client, script: Script):
    script("x")
    first = client.responses.create(**HI)
    made = client.responses.compact(model="fake", previous_response_id=first.id)
    assert [item.type for item in made.output] == ["message", "compaction"]
    assert server.get(f"{PATH}/{made.id}").status == 404


@pytest.mark.parametrize("stream", [False, True])
def test_a_trigger_asks_for_a_summary(server: Running, client, script: Script, stream):
    script("We did it.")
    body: dict[str, Any] = {
        "model": "fake",
        "input": [says("user", "Do it."), {"type": "compaction_trigger"}],
        "tools": [ADD],
        "tool_choice": "required",
        "store": False,
    }
    if stream:
        with client.responses.stream(**body) as events:
            made = events.get_final_response()
    else:
        made = client.responses.create(**body)
    (summary,) = made.output
    assert (summary.type, unseal(summary.encrypted_content)) == ("compaction", "We did it.")
