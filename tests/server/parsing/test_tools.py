"""Every format reads what its models write, wherever the text is cut."""

from __future__ import annotations

import json

import pytest

from jaxllm.server.parsing.parts import Text, ToolArguments, ToolEnd, ToolStart
from jaxllm.server.parsing.registry import tool_formats
from tests.server.parsing.feeding import calls, cut, fed, meant, reply
from tests.server.parsing.samples import ALL, SAMPLES, TOOLS, Sample


def parser(name):
    return tool_formats()[name](TOOLS)


def test_every_format_has_samples():
    assert set(SAMPLES) == set(tool_formats())


@pytest.mark.parametrize(("name", "sample"), ALL)
def test_outputs_mean_what_they_should(name: str, sample: Sample):
    parts = fed(parser(name), [sample.text])
    assert meant(parts) == sample.calls
    assert reply(parts) == sample.reply
    ids = tuple(part.id for part in parts if isinstance(part, ToolStart))
    assert ids == (sample.ids or (None,) * len(sample.calls))


@pytest.mark.parametrize(("name", "sample"), ALL)
def test_every_cut_gives_the_same_parts(name: str, sample: Sample):
    text = sample.text
    whole = fed(parser(name), [text])
    assert fed(parser(name), text) == whole
    for at in range(1, len(text)):
        assert fed(parser(name), cut(text, [at])) == whole


@pytest.mark.parametrize(("name", "sample"), ALL)
def test_an_output_that_ends_early_loses_no_call_and_invents_none(name: str, sample: Sample):
    for end in range(len(sample.text)):
        parts = fed(parser(name), sample.text[:end])
        made = calls(parts)
        complete = [part.index for part in parts if isinstance(part, ToolEnd) and part.complete]
        assert complete == list(range(len(complete)))
        assert [(name, json.loads(text)) for name, text in made[: len(complete)]] == sample.calls[
            : len(complete)
        ]
        assert len(made) - len(complete) <= 1


@pytest.mark.parametrize("name", sorted(set(SAMPLES) - {"gpt_oss"}))
def test_plain_text_passes_at_once_but_for_what_may_be_a_marker(name: str):
    own = parser(name)
    longest = max(max(map(len, own.markers.words), default=0), max(map(len, TOOLS)) + 2)
    text = "Some words, <b>tags</b>, [lists], {braces};\n\nand\nlines. " * 3
    said = 0
    for at, char in enumerate(text):
        said += len(reply(own.feed(char)))
        assert at + 1 - said <= longest
    assert said + len(reply(own.finish())) == len(text)


def test_arguments_stream():
    own = parser("hermes")
    own.feed('<tool_call>\n{"name": "run.code-2", "arguments": ')
    assert own.feed('{"code": "a') == [
        ToolStart(0, "run.code-2"),
        ToolArguments(0, '{"code": "a'),
    ]
    assert own.feed("b") == [ToolArguments(0, "b")]
    assert own.feed('"}') == [ToolArguments(0, '"}'), ToolEnd(0)]


def test_strings_in_tags_stream():
    own = parser("qwen3_coder")
    own.feed("<tool_call>\n<function=run.code-2>\n<parameter=code>\n")
    assert own.feed('a"b') == [ToolArguments(0, 'a\\"b')]
    assert own.feed("\n") == []
    assert own.feed("</parameter>\n") == [ToolArguments(0, '"')]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral", "kimi_k2", "function_gemma"])
def test_arguments_of_100_kB_stream(name: str):
    code = "x = '<y>' # é\n" * 7_500
    text = {
        "hermes": '<tool_call>{"name": "run.code-2", "arguments": {"code": %s}}</tool_call>',
        "mistral": '[TOOL_CALLS]run.code-2{"code": %s}',
        "kimi_k2": "<|tool_call_begin|>functions.run.code-2:3<|tool_call_argument_begin|>"
        '{"code": %s}<|tool_call_end|>',
        "qwen3_coder": "<function=run.code-2><parameter=code>%s</parameter></function>",
        "function_gemma": "<start_function_call>call:run.code-2{code:<escape>%s<escape>}"
        "<end_function_call>",
    }[name] % (json.dumps(code) if name in ("hermes", "mistral", "kimi_k2") else code)
    parts = fed(parser(name), cut(text, range(0, len(text), 4)))
    assert calls(parts)[0][0] == "run.code-2"
    assert meant(parts)[0][1]["code"].rstrip("\n") == code.rstrip("\n")
    assert reply(parts) == ""


@pytest.mark.parametrize(
    "body",
    [
        "",
        "null",
        "{}",
        '{"name": 5, "arguments": {}}',
        '{"name": "get_time", "arguments": []}',
        '{"name": "get_time", "arguments": "[]"}',
        '{"name": "get_time", "arguments": "{"a": 1}"}',
        '{"name": "get_time", "reason": "none"}',
        '{"name": "", "arguments": {}}',
        '{"name": "' + "n" * 300 + '", "arguments": {}}',
        '{"arguments": {}}',
        '{"arguments": {"a": ' + "[" * 70_000 + ', "name": "get_time"}',
        "[" * 100_000,
    ],
)
def test_what_is_no_call_stays_text(body: str):
    text = f"a\n<tool_call>{body}</tool_call>b"
    parts = fed(parser("hermes"), [text])
    assert parts == [Text(text)]
    assert fed(parser("hermes"), cut(text, range(0, len(text), 7))) == parts


def test_arguments_that_turn_out_malformed_end_incomplete_and_the_rest_is_text():
    text = '<tool_call>{"name": "get_time", "arguments": {"a": oops}}</tool_call>'
    assert fed(parser("hermes"), text) == [
        ToolStart(0, "get_time"),
        ToolArguments(0, '{"a": '),
        ToolEnd(0, complete=False),
        Text("oops}}</tool_call>"),
    ]


def test_a_tool_that_is_not_there_is_a_call_where_a_marker_says_so():
    parts = fed(parser("hermes"), '<tool_call>{"name": "no", "arguments": {}}</tool_call>')
    assert meant(parts) == [("no", {})]


def test_a_schema_that_is_none_makes_strings():
    tools = {"get_weather": {"properties": [1], "type": 5}}
    text = "<function=get_weather><parameter=days>3</parameter></function>"
    assert meant(fed(tool_formats()["qwen3_coder"](tools), text)) == [
        ("get_weather", {"days": "3"})
    ]


@pytest.mark.parametrize(
    ("name", "call", "value"),
    [
        ("qwen3_coder", "<function=f>%s</function>", "<parameter={key}>{blank}</parameter>"),
        ("seed_oss", "<function=f>%s</function>", "<parameter={key}>{blank}</parameter>"),
        (
            "minimax_m2",
            '<invoke name="f">%s</invoke>',
            '<parameter name="{key}">{blank}</parameter>',
        ),
        (
            "glm45",
            "<tool_call>f%s</tool_call>",
            "<arg_key>{key}</arg_key><arg_value>{blank}</arg_value>",
        ),
        (
            "function_gemma",
            "<start_function_call>call:f{%s}<end_function_call>",
            "{key}:<escape>{blank}<escape>,",
        ),
    ],
)
def test_an_empty_value_is_text_or_null_or_left_out(name: str, call: str, value: str):
    parts = {
        "text": {"type": "string"},
        "either": {"type": ["string", "null"]},
        "any": {},
        "number": {"type": "integer"},
        "list": {"type": "array"},
        "may_be": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    }
    tools = {"f": {"type": "object", "properties": parts}}
    body = "".join(value.format(key=key, blank="") for key in [*parts, "undeclared"])
    parts_of = fed(tool_formats()[name](tools), call % body)
    assert meant(parts_of) == [
        ("f", {"text": "", "either": "", "any": "", "may_be": None, "undeclared": ""})
    ]


@pytest.mark.parametrize("blank", [" ", "  \t"])
def test_blank_text_is_kept_where_text_is_allowed(blank: str):
    tools = {"f": {"type": "object", "properties": {"a": {"type": ["string", "null"]}}}}
    text = f"<function=f><parameter=a>{blank}</parameter></function>"
    assert meant(fed(tool_formats()["qwen3_coder"](tools), text)) == [("f", {"a": blank})]
