"""Bodies of the Messages API become chat requests, or are refused by name."""

from __future__ import annotations

import time
from typing import Any

import orjson
import pytest

from jaxllm.server.anthropic.messages import read_conversation
from jaxllm.server.anthropic.requests import MESSAGES_FIELDS, parse_messages
from jaxllm.server.anthropic.salvage import read_arguments
from jaxllm.server.errors import ApiError
from jaxllm.server.requests.chat import ChatRequest
from jaxllm.server.requests.limits import Rules
from jaxllm.templates.arguments import MAX_DEPTH
from tests.server.anthropic.events import CUSTOM, USER
from tests.server.fake import RESOLVED

RULES = Rules(resolved=RESOLVED, served=("fake",), longest_token=100)
CACHE = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
BODY: dict[str, Any] = {"model": "fake", "max_tokens": 5, "messages": USER}


def parsed(**more: Any) -> ChatRequest:
    """The chat request of a body."""
    return parse_messages(BODY | more, RULES)


def user(*blocks: Any) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    """An assistant's message."""
    return {"role": "assistant", "content": list(blocks)}


def text(value: str) -> dict[str, Any]:
    """A block of text."""
    return {"type": "text", "text": value, **CACHE}


CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}, **CACHE}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "one", **CACHE}


def test_an_agents_conversation_becomes_messages_of_a_chat() -> None:
    thinking = {"type": "thinking", "thinking": "so", "signature": "x"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    second = CALL | {"id": "toolu_2", "name": "g"}
    listed = {"type": "tool_result", "tool_use_id": "toolu_2", "content": [text("x"), text("y")]}
    messages = [
        {"role": "user", "content": "do"},
        assistant(thinking, redacted, text("I will."), CALL, second),
        user(RESULT, listed | {"is_error": True}, text("go on")),
    ]
    found = read_conversation({"system": [text("Be"), text("brief.")], "messages": messages})
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    other = {"type": "function", "function": {"name": "g", "arguments": {"a": 1}}}
    assert found == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "do"},
        {
            "role": "assistant",
            "content": "I will.",
            "reasoning_content": "so",
            "tool_calls": [{"id": "toolu_1"} | call, {"id": "toolu_2"} | other],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "one", "name": "f"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: x\ny", "name": "g"},
        {"role": "user", "content": "go on"},
    ]
    request = parsed(messages=messages, tools=CUSTOM)
    assert request.conversation.messages == found[1:]


def test_a_text_and_a_list_of_one_text_are_the_same() -> None:
    plain = {"system": "Be brief.", "messages": [{"role": "user", "content": "hi"}]}
    blocks = {"system": [text("Be brief.")], "messages": [user(text("hi"))]}
    assert read_conversation(plain) == read_conversation(blocks)


def test_neighbours_of_one_role_are_one_message() -> None:
    messages = [
        user(text("a")),
        user(text("b")),
        assistant(text("c")),
        assistant(CALL),
        user(RESULT),
    ]
    found = read_conversation({"messages": messages})
    assert [message["role"] for message in found] == ["user", "assistant", "tool"]
    assert found[0]["content"] == "a\nb"
    assert found[1]["content"] == "c" and len(found[1]["tool_calls"]) == 1


def test_neighbours_are_joined_in_linear_time() -> None:
    began = time.process_time()
    (message,) = read_conversation({"messages": [{"role": "user", "content": "x" * 1000}] * 8000})
    assert len(message["content"]) == 8000 * 1001 - 1
    assert time.process_time() - began < 2  # joined one by one: 25 s


def test_a_line_of_accounting_is_left_out_of_the_prompt() -> None:
    lines = [text("x-anthropic-billing-header: cch=1"), text("Be brief.")]
    found = read_conversation({"system": lines, "messages": USER})
    assert found[0] == {"role": "system", "content": "Be brief."}


def test_system_messages_may_stand_among_the_others() -> None:
    messages = [*USER, {"role": "system", "content": "now this"}]
    found = read_conversation({"messages": messages})
    assert found[-1] == {"role": "system", "content": "now this"}


def test_an_answer_that_has_begun_is_continued() -> None:
    request = parsed(messages=[*USER, {"role": "assistant", "content": "The best is ("}])
    assert request.conversation.continue_final_message
    assert not request.conversation.add_generation_prompt
    assert not parsed().conversation.continue_final_message


def test_options_reach_the_engine() -> None:
    request = parsed(
        temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["a", "b"], max_tokens=9, stream=True
    )
    params = request.generation.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 7, 9)
    assert list(params.stop_strings) == ["a", "b"]
    assert request.generation.streaming.enabled


@pytest.mark.parametrize(
    ("choice", "mode", "named"),
    [
        (None, "auto", None),
        ({"type": "auto"}, "auto", None),
        ({"type": "any"}, "required", None),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": CUSTOM[0]["name"]}, "required", CUSTOM[0]["name"]),
    ],
)
def test_tool_choices_have_their_modes(choice: Any, mode: str, named: str | None) -> None:
    tools = parsed(tools=CUSTOM, tool_choice=choice).tools
    assert (tools.mode, tools.named, tools.parallel) == (mode, named, True)
    assert [tool.name for tool in tools.tools] == [tool["name"] for tool in CUSTOM]
    assert tools.tools[0].parameters == CUSTOM[0]["input_schema"]


def test_one_tool_at_a_time() -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    assert not parsed(tools=CUSTOM, tool_choice=choice).tools.parallel


@pytest.mark.parametrize(
    ("thinking", "kwargs", "budget", "included"),
    [
        (None, {}, None, True),
        ({"type": "adaptive"}, {}, None, True),
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}, None, True),
        (
            {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
            {"enable_thinking": True, "thinking": True},
            1024,
            False,
        ),
    ],
)
def test_thinking_is_told_to_the_template(
    thinking: Any, kwargs: dict[str, Any], budget: int | None, included: bool
) -> None:
    request = parsed(thinking=thinking)
    found = request.conversation.template_kwargs
    assert {name: found.get(name) for name in kwargs} == kwargs
    assert request.thinking_budget == budget and request.include_reasoning is included


def test_output_config_sets_effort_and_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    request = parsed(output_config={"effort": "low", "format": form})
    assert request.conversation.template_kwargs["reasoning_effort"] == "low"
    structure = request.generation.structure
    assert structure is not None and structure.params.json == schema
    assert structure.field == "output_config.format"
    older = parsed(output_format=form)
    assert older.generation.structure == structure


def test_fields_that_change_nothing_are_accepted() -> None:
    parsed(
        metadata={"user_id": "x"}, service_tier="auto", container=None, mcp_servers=[],
        speed="fast", context_management={"edits": []}, inference_geo="eu", **CACHE,
    )  # fmt: skip
    assert {"metadata", "system", "thinking", "output_config"} <= MESSAGES_FIELDS


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens must be an integer"),
        ({"messages": None}, "messages is required"),
        ({"messages": []}, "messages is required"),
        ({"messages": [5]}, "messages.0 must be an object"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role must be one of"),
        ({"messages": [{"role": "user"}]}, "messages.0.content must be a string or a list"),
        ({"messages": [user({"type": "image", "source": {}})]}, "messages.0.content.0 is a block"),
        ({"messages": [user({"type": "document"})]}, "'document'"),
        ({"messages": [user({"type": "text", "text": 5})]}, "messages.0.content.0.text"),
        ({"messages": [user(RESULT | {"tool_use_id": None})]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [user(RESULT | {"is_error": "x"})]}, "messages.0.content.0.is_error"),
        (
            {"messages": [user(RESULT | {"content": [{"type": "image"}]})]},
            "messages.0.content.0.content.0",
        ),
        ({"messages": [assistant(CALL | {"input": "x"})]}, "messages.0.content.0.input"),
        ({"messages": [assistant({"type": "server_tool_use"})]}, "'server_tool_use'"),
        ({"system": 5}, "system must be"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"tools": "x"}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, "'web_search_20250305'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name must be"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema must be"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.type must be"),
        ({"tool_choice": {"type": "any"}}, "tool_choice of type any needs tools"),
        ({"tools": CUSTOM, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice names 'g'"),
        ({"thinking": "on"}, "thinking"),
        ({"thinking": {"type": "on"}}, "thinking.type must be"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is required"),
        ({"output_config": {"effort": "much"}}, "output_config.effort must be"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format must be"),
        ({"stop_sequences": "a"}, "stop_sequences must be"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences takes at most"),
        ({"messages": [user(text("a")), assistant(CALL)]}, "messages must not end with tool_use"),
        ({"temperature": 3}, "temperature"),
        ({"container": "c_1"}, "container is not supported"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(more: dict[str, Any], named: str) -> None:
    with pytest.raises(ApiError) as refused:
        parsed(**more)
    assert refused.value.status == 400
    assert named in refused.value.message


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ('{"a": 1, "b": [2]}', {"a": 1, "b": [2]}),
        ("", {}),
        ("[1]", {}),
        ('{"a": 12', {}),
        ('{"a": 12, "b": 3', {"a": 12}),
        ('{"a": "x", "b": "y [z', {"a": "x"}),
        ('{"a": "x\\"", "b": "y\\"', {"a": 'x"'}),
        ('{"a": {"b": [1, 2', {"a": {"b": [1]}}),
        ('{"a": {"b": [1]}', {"a": {"b": [1]}}),
        ('{"a": {', {"a": {}}),
        ('{"a": "{,", "c": tr', {"a": "{,"}),
    ],
)
def test_arguments_cut_short_keep_their_whole_members(given: str, found: dict[str, Any]) -> None:
    assert read_arguments(given) == found


def test_arguments_that_nest_deeply_take_linear_time_and_fit_into_a_reply() -> None:
    whole = '{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH
    assert orjson.dumps({"content": [{"input": read_arguments(whole)}]}).count(b"a") == MAX_DEPTH
    assert read_arguments(f'{{"a": {whole}}}') == {}
    began = time.process_time()
    assert read_arguments('{"a":' * 40_000 + '"x') == {}
    assert time.process_time() - began < 2  # with the closers of each mark: 12 s
