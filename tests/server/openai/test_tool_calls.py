"""Scripted outputs of models become reasoning, tool calls and text of a chat's reply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jaxllm.messages import ThinkingBudget
from jaxllm.server.parsing.formats import Formats, find_formats
from tests.server.harness import Running
from tests.server.parsing.samples import SAMPLES, TOOLS

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
FUNCTIONS = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": schema}}
    for name, schema in TOOLS.items()
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = "<think>\nParis, so.\n</think>\n\n"
WEATHER = ("get_weather", {"city": "Paris"})


@pytest.fixture(autouse=True)
def scripted(server: Running) -> Iterator[None]:
    """Every test sets its formats and its output."""
    yield
    server.server_state.formats = Formats()
    server.control.pieces = []


def script(server: Running, text: str, size: int = 3, tools: str = "hermes") -> None:
    """Let the model write this text, in pieces, and the server read it."""
    server.server_state.formats = find_formats("qwen3", tools, None)
    server.control.pieces = [text[at : at + size] for at in range(0, len(text), size)]


def ask(client: openai.OpenAI, **options: Any) -> Any:
    """The whole reply's choice."""
    options = {"model": "fake", "messages": USER, "tools": FUNCTIONS} | options
    return client.chat.completions.create(**options).choices[0]


def streamed(client: openai.OpenAI, **options: Any) -> Any:
    """The choice that the client collects of a stream."""
    options = {"model": "fake", "messages": USER, "tools": FUNCTIONS} | options
    with client.chat.completions.stream(**options) as stream:
        return stream.get_final_completion().choices[0]


def calls(choice: Any) -> list[tuple[str, Any]]:
    """Names and arguments of a choice's calls, whose ids and types are checked."""
    found = choice.message.tool_calls or []
    assert len({call.id for call in found}) == len(found)
    assert all(call.id and call.type == "function" for call in found)
    return [(call.function.name, json.loads(call.function.arguments)) for call in found]


def reasoning(choice: Any) -> str | None:
    """The reasoning, which both names have."""
    assert choice.message.reasoning == choice.message.reasoning_content
    thought: str | None = choice.message.reasoning
    return thought


@pytest.mark.parametrize("way", [ask, streamed])
def test_an_answer_thinks_then_speaks_then_calls(
    server: Running, client: openai.OpenAI, way: Any
) -> None:
    script(server, THOUGHT + "Let me see.\n" + CALL)
    choice = way(client)
    assert (reasoning(choice), choice.message.content) == ("Paris, so.", "Let me see.")
    assert calls(choice) == [WEATHER]
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("way", [ask, streamed])
def test_a_call_that_ends_an_open_thought_is_a_call(
    server: Running, client: openai.OpenAI, way: Any
) -> None:
    thought = "<think>\nParis, so.\n"
    script(server, thought + CALL + "\n", size=4)
    choice = way(client)
    assert (reasoning(choice), choice.message.content or None) == ("Paris, so.", None)
    assert calls(choice) == [WEATHER]
    assert choice.finish_reason == "tool_calls"
    for behind in (" No.", "\n</think>"):
        script(server, thought + CALL + behind, size=4)
        choice = way(client)
        text = thought.removeprefix("<think>\n") + CALL + behind.removesuffix("\n</think>")
        assert (reasoning(choice), calls(choice)) == (text, [])
        assert choice.finish_reason == "stop"
        script(server, thought + CALL + behind, size=4)
        assert calls(way(client, tool_choice="none")) == []


def test_tokens_of_a_call_within_a_thought_are_no_reasoning(
    server: Running, client: openai.OpenAI
) -> None:
    for behind in ("", "</think>", "No."):
        script(server, "<think>Hm." + CALL + behind, size=1)
        reply = client.chat.completions.create(
            model="fake",
            messages=USER,  # type: ignore[arg-type]
            tools=FUNCTIONS,  # type: ignore[arg-type]
        )
        assert reply.usage is not None and reply.usage.completion_tokens_details is not None
        # One token a character; those of a marker count as the text before it, until it is whole
        thought = "Hm." + CALL + behind if behind else "Hm.<tool_call"
        assert reply.usage.completion_tokens_details.reasoning_tokens == len(thought)


@pytest.mark.parametrize(
    "name", ["llama3_json", "mistral", "qwen3_coder", "deepseek3", "glm45", "kimi_k2", "gpt_oss"]
)
def test_streamed_calls_are_those_of_a_whole_reply_in_every_format(
    server: Running, client: openai.OpenAI, name: str
) -> None:
    for sample in SAMPLES[name][:3]:
        script(server, sample.text, size=4, tools=name)
        whole, stream = ask(client), streamed(client)
        assert calls(whole) == calls(stream) == sample.calls
        assert (stream.message.content or "") == (whole.message.content or "") == sample.reply
        assert whole.finish_reason == stream.finish_reason


def test_chunks_tell_a_call_first_and_then_its_arguments(server: Running) -> None:
    script(server, CALL)
    events = server.post(
        CHAT, {"messages": USER, "model": "fake", "tools": FUNCTIONS, "stream": True}
    ).events()
    chunks = [event["choices"][0] for event in events]
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    first, *rest = [chunk["delta"]["tool_calls"][0] for chunk in chunks[1:-1]]
    assert first.keys() == {"index", "id", "type", "function"}
    assert first["function"] == {"name": "get_weather", "arguments": ""}
    assert all(part.keys() == {"index", "function"} for part in rest)
    assert "".join(part["function"]["arguments"] for part in rest) == '{"city": "Paris"}'
    assert len(rest) > 3
    assert (chunks[-1]["delta"], chunks[-1]["finish_reason"]) == ({}, "tool_calls")
    assert all(chunk["finish_reason"] is None for chunk in chunks[:-1])


def test_content_is_null_beside_calls_alone(server: Running, client: openai.OpenAI) -> None:
    script(server, CALL)
    assert ask(client).message.content is None
    script(server, "No.")
    choice = ask(client)
    assert (choice.message.content, choice.message.tool_calls) == ("No.", None)
    assert choice.finish_reason == "stop"


def test_usage_counts_the_tokens_of_reasoning(server: Running, client: openai.OpenAI) -> None:
    script(server, "<think>four tokens\n\n</think>yes", size=8)
    reply = client.chat.completions.create(model="fake", messages=USER)  # type: ignore[arg-type]
    assert reply.usage is not None and reply.usage.completion_tokens_details is not None
    assert (
        reply.usage.completion_tokens,
        reply.usage.completion_tokens_details.reasoning_tokens,
    ) == (4, 3)


def test_log_probabilities_cover_every_token(server: Running, client: openai.OpenAI) -> None:
    script(server, THOUGHT + CALL)
    count = len(server.control.pieces)
    assert len(ask(client, logprobs=True, top_logprobs=1).logprobs.content) == count
    assert len(streamed(client, logprobs=True).logprobs.content) == count


def test_the_end_of_a_prompt_is_decoded_once(
    server: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(server, THOUGHT + CALL)
    state, decoded = server.server_state, []

    def decode_prompt(ids: list[int]) -> str:
        decoded.append(ids)
        return ""

    monkeypatch.setattr(state, "decode_prompt", decode_prompt)
    assert calls(ask(client, extra_body={"thinking_token_budget": 99})) == [WEATHER]
    assert len(decoded) == 1


def test_reasoning_may_be_left_out(server: Running, client: openai.OpenAI) -> None:
    script(server, THOUGHT + "Hello.")
    for way in (ask, streamed):
        choice = way(client, extra_body={"include_reasoning": False})
        assert choice.message.content == "Hello."
        assert getattr(choice.message, "reasoning", None) is None


@pytest.mark.parametrize("size", [8, 40])
def test_reasoning_that_is_left_out_has_no_log_probabilities(
    server: Running, client: openai.OpenAI, size: int
) -> None:
    script(server, THOUGHT + "Hello, you.", size=size)
    texts = [
        size * at + size > THOUGHT.index("</think>") + len("</think>")
        for at in range(len(server.control.pieces))
    ]
    for way in (ask, streamed):
        shown = way(client, logprobs=True, extra_body={"include_reasoning": False})
        assert shown.message.content == "Hello, you."
        assert len(shown.logprobs.content) <= sum(texts)
        assert len(shown.logprobs.content) >= -(-len("Hello, you.") // size)
        assert len(way(client, logprobs=True).logprobs.content) == len(texts)


def test_without_parallel_calls_the_first_is_told(server: Running, client: openai.OpenAI) -> None:
    script(server, CALL + "\n" + CALL)
    assert calls(ask(client)) == [WEATHER, WEATHER]
    for way in (ask, streamed):
        assert calls(way(client, parallel_tool_calls=False)) == [WEATHER]


@pytest.mark.parametrize(("stop", "reason"), [("city", "stop"), ("</tool_call>", "tool_calls")])
def test_a_stop_string_within_a_call_is_no_call_to_wait_for(
    server: Running, client: openai.OpenAI, stop: str, reason: str
) -> None:
    script(server, CALL, size=4)
    for way in (ask, streamed):
        choice = way(client, stop=stop)
        assert choice.finish_reason == reason
        assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]


def test_an_answer_cut_short_has_the_beginning_of_its_call(
    server: Running, client: openai.OpenAI
) -> None:
    script(server, CALL, size=1)
    choice = ask(client, max_tokens=CALL.index("Par") + 1)
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "P'


def test_calls_stay_text_where_none_may_be_made(server: Running, client: openai.OpenAI) -> None:
    script(server, THOUGHT + CALL)
    for options in ({"tools": openai.omit}, {"tool_choice": "none"}):
        choice = ask(client, **options)
        assert (choice.message.content, choice.message.tool_calls) == (CALL, None)
        assert reasoning(choice) == "Paris, so."


@pytest.mark.parametrize(
    ("prompt", "output", "thought", "content"),
    [
        ("a <think>", "b</think>c", "b", "c"),
        ("a <think>b</think>", "c<think>d", None, "c<think>d"),
        ("a", "b", None, "b"),
    ],
)
def test_a_continued_message_goes_on_where_it_was(
    server: Running,
    client: openai.OpenAI,
    prompt: str,
    output: str,
    thought: str | None,
    content: str,
) -> None:
    script(server, output)
    server.server_state.formats = find_formats("deepseek_r1", "none", None)
    messages = [*USER, {"role": "assistant", "content": prompt}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    choice = ask(client, messages=messages, tools=openai.omit, extra_body=options)
    assert (reasoning(choice), choice.message.content) == (thought, content)


def test_text_has_special_tokens_only_where_they_are_markers(
    server: Running, client: openai.OpenAI
) -> None:
    for tools, tool_choice, skips in (
        ("hermes", "auto", True), ("mistral", "auto", False), ("mistral", "none", True),
    ):  # fmt: skip
        script(server, "a", tools=tools)
        ask(client, tool_choice=tool_choice)
        assert server.control.added[-1].params.skip_special_tokens is skips


def test_ids_of_calls_count_on_from_those_of_the_conversation(
    server: Running, client: openai.OpenAI
) -> None:
    script(server, CALL)
    server.server_state.formats = find_formats("none", "kimi_k2", None)
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "noon"}]},
    ]
    text = "<|tool_call_begin|>get_weather<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = text.replace("get_weather", "functions.get_weather:1")
    server.control.pieces = list(text)
    assert ask(client, messages=messages).message.tool_calls[0].id == "functions.get_weather:1"


NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize(
    ("options", "holds", "lacks"),
    [
        ({"tool_choice": "required"}, "get_weather", "@nested"),
        ({"tool_choice": NAMED}, "get_time", "get_weather"),
        ({"response_format": {"type": "json_object"}}, "@nested", "FREE <"),
    ],
)
def test_a_demanded_call_is_a_grammar_of_the_engine(
    server: Running, client: openai.OpenAI, options: dict[str, Any], holds: str, lacks: str
) -> None:
    script(server, CALL)
    assert calls(ask(client, **options)) == [WEATHER]
    grammar = server.control.added[-1].grammar or ""
    assert holds in grammar
    assert lacks not in grammar
    ask(client)
    assert server.control.added[-1].grammar is None


def test_arguments_that_no_grammar_can_hold_are_refused(server: Running) -> None:
    script(server, CALL)
    schema = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
    for demand in (
        {"tool_choice": "required"},
        {"tools": [function(parameters=schema, strict=True)]},
    ):
        body = {"model": "fake", "messages": USER, "tools": [function(parameters=schema)]} | demand
        answer = server.post(CHAT, body)
        assert (answer.status, answer.error["param"]) == (400, "tools")
        assert "uniqueItems" in answer.error["message"]
        assert "llguidance" not in answer.error["message"]


@pytest.mark.parametrize(
    ("reasoning", "begun"), [("qwen3", False), ("deepseek_r1", True), ("none", None)]
)
def test_a_budget_of_thought_reaches_the_engine(
    server: Running, client: openai.OpenAI, reasoning: str, begun: bool | None
) -> None:
    script(server, CALL)
    server.server_state.formats = find_formats(reasoning, "hermes", None)
    ask(client, extra_body={"thinking_token_budget": 7})
    limit = ThinkingBudget(tokens=7, begun=bool(begun), starts=("<think>",), ends=("</think>",))
    assert server.control.added[-1].thinking == (None if begun is None else limit)
    ask(client)
    assert server.control.added[-1].thinking is None


@pytest.mark.parametrize(
    ("reasoning", "tools", "ends"),
    [
        ("granite", "hermes", ("Here is my response:", "Here's my response:")),
        ("qwen3", "granite", ("</think>", "<|tool_call|>")),
        ("gpt_oss", "gpt_oss", ("<|end|>",)),
    ],
)
def test_a_budget_knows_all_that_ends_a_thought(
    server: Running, client: openai.OpenAI, reasoning: str, tools: str, ends: tuple[str, ...]
) -> None:
    script(server, "x")
    server.server_state.formats = find_formats(reasoning, tools, None)
    ask(client, extra_body={"thinking_token_budget": 7})
    thinking = server.control.added[-1].thinking
    assert thinking is not None and thinking.ends == ends


def test_tools_without_a_known_format_are_refused(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        ask(client)
    assert ask(client, tool_choice="none").finish_reason == "stop"


def function(**members: Any) -> dict[str, Any]:
    """A tool with these members of its function."""
    return {"type": "function", "function": {"name": "f"} | members}


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    """The `tool_choice` that leaves other tools out."""
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [function(name=None)]}, "tools[0].function.name"),
        ({"tools": [function(name="two\nlines")]}, "tools[0].function.name"),
        ({"tools": [function(name="x" * 129)]}, "tools[0].function.name"),
        ({"tools": [function(), function()]}, "tools[1].function.name"),
        ({"tools": [function(description=5)]}, "tools[0].function.description"),
        ({"tools": [function(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [function(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [function(parameters={"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [function(name=f"f{at}") for at in range(257)]}, "tools"),
        ({"tools": [function(description="x" * 600_000)]}, "tools"),
        ({"tools": [function(parameters=json.loads('{"not":' * 100 + "{}" + "}" * 100))]}, "tools"),
        ({"tools": [function()], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [function()], "tool_choice": {}}, "tool_choice"),
        ({"tools": [function()], "tool_choice": function(name="g")}, "tool_choice"),
        ({"tools": [function()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [function()], "tool_choice": allowed("none", function())}, "tool_choice"),
        ({"tools": [function()], "tool_choice": allowed("auto", NAMED)}, "tool_choice"),
        ({"tools": [function()], "tool_choice": allowed("auto", 5)}, "tool_choice"),
        ({"tools": [function()], "tool_choice": allowed("required")}, "tool_choice"),
        ({"tools": [function()], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ],
    ids=range(27),
)  # fmt: skip
def test_bad_tools_are_refused_by_name(server: Running, body: dict[str, Any], param: str) -> None:
    script(server, "a")
    answer = server.post(CHAT, {"model": "fake", "messages": USER} | body)
    assert (answer.status, answer.error["param"]) == (400, param)
