"""Grammars of whole answers: thought, then calls that validate, or text of a structure."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from jaxllm.grammar.compiler import ByteTokens, convert
from jaxllm.server.errors import ApiError
from jaxllm.server.openai.answer_structure import answer_structure
from jaxllm.server.parsing.formats import find_formats
from jaxllm.server.parsing.pipeline import pipeline
from jaxllm.server.parsing.registry import tool_formats
from jaxllm.server.requests.chat import parse_chat
from jaxllm.server.requests.limits import Rules
from tests.server.fake import RESOLVED
from tests.server.parsing.feeding import fed, meant
from tests.server.parsing.samples import ARGUMENTS, WEATHER, produced

RULES = Rules(resolved=RESOLVED, served=("fake",), longest_token=100)
SCHEMA = {
    "type": "object",
    "properties": {key: WEATHER["properties"][key] for key in ARGUMENTS},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {}, "additionalProperties": False}
MARKERS = re.compile(r"<[^<>\s=]+>|\[[A-Z_]+\]")
REQUIRED, SUM = {"tool_choice": "required"}, {"type": "json_object"}


def tool(name: str, schema: dict[str, Any], **members: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema} | members}


class Answer:
    """What one request allows, in the formats of one model."""

    def __init__(self, name: str, reasoning: str = "none", prompt: str = "", /, **fields: Any):
        given = {"tools": [tool("get_weather", SCHEMA), tool("get_time", TIME)]}
        body = {"model": "fake", "messages": [{"role": "user", "content": "a"}]} | given | fields
        self.formats = find_formats(reasoning, name, None)
        self.request = parse_chat(body, RULES)
        self.prompt = prompt
        self.structure = answer_structure(self.request, self.formats, prompt)

    def allows(self, text: str, special: bool = False) -> bool:
        """Whether the answer may be this text; with `special`, its markers are special tokens."""
        assert self.structure is not None
        names = sorted({*MARKERS.findall(text)}) if special else []
        tokens = ByteTokens({name: 300 + at for at, name in enumerate(names)})
        job = json.loads(json.dumps(self.structure.params.job()))
        matcher = LLMatcher(
            LLTokenizer(TokenizerWrapper(tokens)),
            convert(job, {name: 300 + at for at, name in enumerate(names)}),
            log_level=0,
        )
        assert not matcher.is_error(), matcher.get_error()
        for part in re.split(f"({MARKERS.pattern})", text):
            ids = [300 + names.index(part)] if part in names else tokens(part)
            if not all(matcher.consume_token(id) for id in ids):
                return False
        return matcher.is_accepting()

    def calls(self, text: str) -> list[Any]:
        """The calls that the parser reads in it."""
        parser = pipeline(
            self.formats.reasoning, self.formats.tools, self.prompt, self.request.tools.schemas
        )
        return meant(fed(parser, text))


def call_of(name: str, arguments: dict[str, Any], number: int = 0) -> str:
    """One call as the format's grammar allows it: of get_weather, without arguments of
    get_time."""
    schema = SCHEMA if arguments else TIME
    function = "get_weather" if arguments else "get_time"
    pieces = tool_formats()[name].pieces(function, schema, number)
    return produced(pieces, iter([arguments]))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", sorted(tool_formats()))
def test_a_required_call_is_allowed_and_read_and_nothing_else(name: str, special: bool) -> None:
    answer, section = Answer(name, **REQUIRED), tool_formats()[name].section
    text = section.begin + call_of(name, ARGUMENTS) + section.end
    assert answer.allows(text, special)
    assert answer.calls(text) == [("get_weather", ARGUMENTS)]
    assert not answer.allows("I will not.", special)
    assert not answer.allows(text + "And more.", special)
    assert not answer.allows(text.replace("celsius", "kelvin"), special)
    assert not answer.allows(text.replace("get_weather", "get_weathers"), special)
    calls = (call_of(name, ARGUMENTS), call_of(name, {}, 1))
    two = section.begin + section.between.join(calls) + section.end
    several = tool_formats()[name].several and name != "kimi_k2"
    assert answer.allows(two, special) is several
    assert not Answer(name, parallel_tool_calls=False, **REQUIRED).allows(two, special)


@pytest.mark.parametrize("called", ["météo", "a.b:c/d-e", "١٢", "__proto__", "n" * 128])
@pytest.mark.parametrize("name", sorted(tool_formats()))
def test_every_name_that_a_tool_may_have_is_read_as_it_is_written(name: str, called: str) -> None:
    parser = tool_formats()[name]
    text = produced(parser.pieces(called, TIME, 0), iter([{}]), optional=False)
    answer = Answer(name, tools=[tool(called, TIME)], **REQUIRED)
    whole = parser.section.begin + text + parser.section.end
    assert answer.allows(whole) and answer.calls(whole) == [(called, {})]


def test_a_named_tool_is_called_once() -> None:
    answer = Answer("hermes", tool_choice=tool("get_time", {}) | {"function": {"name": "get_time"}})
    one = call_of("hermes", {})
    assert answer.allows(one)
    assert not answer.allows(call_of("hermes", ARGUMENTS))
    assert not answer.allows(f"{one}\n{one}")


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("reasoning", "prompt", "thought", "allowed"),
    [
        ("qwen3", "", "", True),
        ("qwen3", "", "<think>\nso 1 < 2 it is\n</think>\n\n", True),
        ("qwen3", "<think>\n", "so it is</think>\n", True),
        ("qwen3", "<think>\n", "", False),
        ("qwen3", "<think>\n\n</think>\n\n", "", True),
        ("qwen3", "<think>\n\n</think>\n\n", "<think>\nso\n</think>\n\n", False),
        ("deepseek_r1", "", "so it is</think>", True),
        ("granite", "", "Here is my thought process: a. Here is my response:\n", True),
        ("mistral", "", "[THINK]a[/THINK]", True),
        ("qwen3", "", "Well: <think>\na\n</think>\n\n", False),
    ],
)
def test_a_required_call_may_be_thought_about_first(
    reasoning: str, prompt: str, thought: str, allowed: bool, special: bool
) -> None:
    answer = Answer("hermes", reasoning, prompt, **REQUIRED)
    text = thought + call_of("hermes", ARGUMENTS)
    assert answer.allows(text, special) is allowed
    if allowed:
        assert answer.calls(text) == [("get_weather", ARGUMENTS)]


def test_harmony_thinks_in_a_channel_and_answers_in_another() -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = call_of("gpt_oss", ARGUMENTS)
    for text in (call, thought + call):
        assert Answer("gpt_oss", "gpt_oss", **REQUIRED).allows(text, special=True)
    final = '<|channel|>final<|message|>{"a": 1}'
    for text in (final, thought + final):
        answer = Answer("gpt_oss", "gpt_oss", response_format=SUM, tool_choice="none")
        assert answer.allows(text, special=True)
        assert not answer.allows('{"a": 1}', special=True)


def test_harmony_binds_calls_behind_free_messages() -> None:
    call, next_message = call_of("gpt_oss", ARGUMENTS), "<|end|><|start|>assistant"
    thought = f"<|channel|>analysis<|message|>Hm.{next_message}"
    preface = f"<|channel|>commentary<|message|>I look.{next_message}"
    reply = "<|channel|>final<|message|>No."
    strict = Answer("gpt_oss", "gpt_oss", tools=[tool("get_weather", SCHEMA, strict=True)])
    for text in (call, thought + call, thought + preface + call, reply, thought + preface + reply):
        assert strict.allows(text, special=True), text
    assert not strict.allows(call.replace("celsius", "kelvin"), special=True)
    assert not strict.allows(thought + "\n" + call, special=True)
    both = Answer("gpt_oss", "gpt_oss", response_format=SUM)
    assert both.allows(call, special=True)
    assert both.allows('<|channel|>final<|message|>{"a": 1}', special=True)
    assert not both.allows(reply, special=True)


def test_a_tool_without_parameters_takes_no_arguments() -> None:
    answer = Answer("hermes", tools=[{"type": "function", "function": {"name": "now"}}], **REQUIRED)
    assert answer.allows('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not answer.allows('<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>')


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"properties": {"a": {"type": "integer"}}},
        {"$ref": "#/$defs/f", "$defs": {"f": {"properties": {"a": {"type": "integer"}}}}},
        {"anyOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"a": {}}}]},
    ],
)
def test_arguments_are_an_object_where_a_schema_names_no_type(schema: dict[str, Any]) -> None:
    answer = Answer("hermes", tools=[tool("now", schema)], **REQUIRED)
    call = '<tool_call>\n{"name": "now", "arguments": %s}\n</tool_call>'
    assert answer.allows(call % '{"a": 1}')
    assert not any(answer.allows(call % wrong) for wrong in ("5", '"a"', "[]", "null"))


def test_only_allowed_tools_may_be_called() -> None:
    allowed = {"type": "function", "function": {"name": "get_time"}}
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [allowed]}}
        use = Answer("hermes", tool_choice=choice).request.tools
        assert ([tool.name for tool in use.tools], use.mode) == (["get_time"], mode)


@pytest.mark.parametrize("special", [False, True])
def test_strict_tools_leave_text_free_and_bind_calls(special: bool) -> None:
    tools = [tool("get_weather", SCHEMA, strict=True)]
    answer = Answer("hermes", "qwen3", tools=tools)
    call = call_of("hermes", ARGUMENTS)
    for text in ("Just text.", "Let me see.\n" + call, call, f"{call}\n{call}",
                 f"<think>\nHm.\n</think>\n\nSo: {call}", "1 < 2", ""):  # fmt: skip
        assert answer.allows(text, special), text
    for wrong in ("kelvin", "celsiu"):
        assert not answer.allows("So: " + call.replace("celsius", wrong), special)


def test_what_is_free_needs_no_grammar() -> None:
    assert Answer("hermes").structure is None
    assert Answer("hermes", "qwen3", "<think>").structure is None
    strict = [tool("get_weather", SCHEMA, strict=True)]
    assert Answer("hermes", tools=strict, tool_choice="none").structure is None
    # A reply may begin as its calls do
    assert Answer("llama3_json", tools=strict).structure is None


@pytest.mark.parametrize(
    "structure",
    [
        {"response_format": SUM},
        {"structured_outputs": {"regex": "[0-9]+|\\{\"a\": 1\\}"}},
        {"guided_choice": ['{"a": 1}', "b"]},
        {"guided_grammar": 'start: "{" INNER "}"\nINNER: /[^}]*/'},
    ],
    ids=str,
)  # fmt: skip
def test_structured_text_may_be_thought_about_or_replaced_by_calls(
    structure: dict[str, Any],
) -> None:
    text, call = '{"a": 1}', call_of("hermes", ARGUMENTS)
    thinking = Answer("hermes", "qwen3", "<think>\n", tools=None, **structure)
    assert thinking.allows(f"Hm.\n</think>\n\n{text}")
    assert not thinking.allows(text)
    both = Answer("hermes", "qwen3", **structure)
    assert both.allows(text)
    assert both.allows(f"<think>\nHm.\n</think>\n\n{text}")
    assert both.allows(call)
    assert not both.allows("Hello")
    assert not Answer("hermes", **REQUIRED, **structure).allows(text)


def test_structured_text_alone_is_the_structure_as_it_was_sent() -> None:
    answer = Answer("hermes", "qwen3", "<think>\n\n</think>\n\n", tools=None, response_format=SUM)
    assert answer.structure is answer.request.generation.structure


@pytest.mark.parametrize(
    ("tools", "fields", "param"),
    [
        ("llama3_json", {"response_format": SUM}, "response_format"),
        ("hermes", {"use_beam_search": True, "n": 2, "temperature": 0} | REQUIRED, "tools"),
    ],
)
def test_what_cannot_be_combined_is_refused(tools: str, fields: Any, param: str) -> None:
    with pytest.raises(ApiError) as error:
        Answer(tools, **fields)
    assert (error.value.status, error.value.param) == (400, param)
