"""Input items become the messages of a chat."""

from __future__ import annotations

import time
from typing import Any

import pytest

from jaxllm.server.errors import ApiError
from jaxllm.server.responses.items import MAX_ITEMS, SUMMARY, Chat, read_input
from jaxllm.server.responses.sealed import seal, unseal
from jaxllm.server.responses.tools import Tools


def messages(value: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    chat = Chat(instructions, Tools())
    for at, item in enumerate(read_input(value)):
        chat.add(item, f"input[{at}]")
    return chat.messages


def refusal(value: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        messages(value)
    return caught.value


def says(role: str, text: Any) -> dict[str, Any]:
    return {"role": role, "content": text}


CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "2"}


def test_instructions_are_joined_in_linear_time():
    began = time.process_time()
    (found,) = messages([says("system", "x" * 4000)] * MAX_ITEMS)
    assert len(found["content"]) == 4002 * MAX_ITEMS - 2
    assert time.process_time() - began < 2  # joined one by one: a minute


def test_a_string_is_a_message_of_the_user():
    assert messages("hi") == [says("user", "hi")]


def test_messages_need_no_type_and_take_text_or_text_parts():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages([says("user", "x"), {"role": "user", "content": parts}]) == [
        says("user", "x"),
        says("user", "a\nb"),
    ]


def test_leading_instructions_are_one_system_message():
    given = [says("developer", "two"), says("system", "three"), says("user", "x")]
    assert messages(given, "one") == [says("system", "one\n\ntwo\n\nthree"), says("user", "x")]


def test_later_instructions_stay_where_they_are():
    given = [says("user", "x"), says("developer", "y")]
    assert messages(given) == [says("user", "x"), says("system", "y")]


def test_text_behind_a_call_keeps_the_call_beside_its_result():
    text = {"type": "message", "role": "assistant", "content": "Done."}
    said, result = messages([CALL, text, RESULT])
    assert said["content"] == "Done." and [call["id"] for call in said["tool_calls"]] == ["c1"]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "2"}
    roles = [one["role"] for one in messages([CALL, RESULT, text])]
    assert roles == ["assistant", "tool", "assistant"]


def test_an_answer_is_one_message_of_the_assistant_again():
    thought = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "t"}],
    }
    text = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "x"}],
    }
    found = messages([thought, text, CALL, CALL | {"call_id": "c2"}, RESULT])
    assert [one["role"] for one in found] == ["assistant", "tool"]
    assert (found[0]["reasoning_content"], found[0]["content"]) == ("t", "x")
    assert [call["id"] for call in found[0]["tool_calls"]] == ["c1", "c2"]
    function = {"name": "add", "arguments": '{"a":1}'}
    assert found[0]["tool_calls"][0] == {"id": "c1", "type": "function", "function": function}
    assert found[1] == {"role": "tool", "tool_call_id": "c1", "content": "2"}


def test_two_answers_in_a_row_stay_apart():
    text = says("assistant", "x")
    assert messages([text, text]) == [text, text]
    thought = {"type": "reasoning", "summary": [], "encrypted_content": seal("t")}
    assert len(messages([CALL, thought, CALL])) == 2


@pytest.mark.parametrize(
    "item",
    [
        {"content": [{"type": "reasoning_text", "text": "é"}]},
        {"encrypted_content": seal("é")},
        {"summary": [{"type": "summary_text", "text": "é"}]},
        {"encrypted_content": "gAAA", "summary": [{"type": "summary_text", "text": "é"}]},
    ],
)
def test_reasoning_is_read_from_its_content_what_was_sealed_or_its_summary(item):
    found = messages([{"type": "reasoning", "summary": []} | item])
    assert found == [{"role": "assistant", "content": None, "reasoning_content": "é"}]


def test_reasoning_of_another_server_is_left_out():
    item = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    assert messages([item, says("user", "x")]) == [says("user", "x")]


@pytest.mark.parametrize("content", ["", "gAAA", "jaxllm-1.*", "jaxllm-1.gA==", "jaxllm-1.é"])
def test_only_what_was_sealed_is_unsealed(content):
    assert unseal(content) is None
    assert unseal(seal("a\n😀")) == "a\n😀"


def test_a_summary_stands_for_what_came_before():
    for kind in ("compaction", "compaction_summary"):
        item = {"type": kind, "encrypted_content": seal("we said hi")}
        assert messages([item]) == [says("user", SUMMARY + "we said hi")]


def test_a_summary_of_another_server_is_refused():
    error = refusal([{"type": "compaction", "encrypted_content": "gAAA"}])
    assert (error.code, error.param) == ("invalid_encrypted_content", "input[0].encrypted_content")


def test_custom_calls_are_calls_with_one_text():
    custom = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a"b'}
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    found = messages([custom, output])
    assert found[0]["tool_calls"][0]["function"]["arguments"] == '{"input":"a\\"b"}'
    assert found[1]["content"] == "done"


def test_calls_of_a_namespace_have_the_joined_name():
    found = messages([CALL | {"namespace": "mcp__docs__"}])
    assert found[0]["tool_calls"][0]["function"]["name"] == "mcp__docs__add"


def test_items_may_bring_tools():
    tools = Tools()
    chat = Chat(None, tools)
    item = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [{"type": "function", "name": "add"}],
    }
    chat.add(read_input([item])[0], "input[0]")
    assert list(tools.origins) == ["add"]
    assert chat.messages == []


def image(role: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "input_image", "image_url": "data:"}]}


@pytest.mark.parametrize(
    ("value", "param", "words"),
    [
        (5, "input", "string or a list"),
        (["x"], "input[0]", "object"),
        ([{}], "input[0]", "no type"),
        ([{"type": "web_search_call"}], "input[0]", "'web_search_call'"),
        ([{"type": ["message"]}], "input[0]", "a list of 1"),
        ([{"role": "tool", "content": "x"}], "input[0].role", "'tool'"),
        ([{"role": ["user"], "content": "x"}], "input[0].role", "a list of 1"),
        ([image("user")], "input[0].content[0]", "'input_image'"),
        ([{"role": "user"}], "input[0].content", "null"),
        ([{"role": "user", "content": ["x"]}], "input[0].content[0]", "'x'"),
        ([says("user", "x"), RESULT | {"call_id": None}], "input[1].call_id", "null"),
        ([RESULT | {"output": [{"type": "input_file"}]}], "input[0].output[0]", "'input_file'"),
        ([CALL | {"arguments": {"a": 1}}], "input[0].arguments", "a dict of 1"),
        ([CALL | {"name": ""}], "input[0].name", "''"),
        ([{"type": "custom_tool_call", "input": 5}], "input[0].input", "5"),
        ([{"type": "compaction_trigger"}, says("user", "x")], "input[0]", "last item"),
        ([{"id": "msg_1"}], "input[0]", "not stored"),
        ([says("user", "x")] * (MAX_ITEMS + 1), "input", str(MAX_ITEMS)),
    ],
)
def test_bad_items_are_refused_by_their_place(value, param, words):
    error = refusal(value)
    assert error.param == param
    assert words in error.message
