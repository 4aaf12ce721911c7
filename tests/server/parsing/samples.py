"""Outputs as models of each format write them, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxllm.grammar.meaning import Meaning
from jaxllm.grammar.pieces import (
    Arguments,
    Either,
    FreeText,
    Json,
    Layout,
    Literal,
    Maybe,
    OneOf,
    Pieces,
)

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "place": {"$ref": "#/$defs/Place"},
        "near": {"type": ["array", "null"], "items": {"type": "string"}},
        "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["city"],
    "$defs": {"Place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
}
TOOLS: dict[str, Any] = {
    "get_weather": WEATHER,
    "get_time": {"type": "object", "properties": {}},
    "run.code-2": {"type": "object", "properties": {"code": {"type": "string"}}},
}


@dataclass(frozen=True)
class Sample:
    """One output: its text, the reply and the calls in it, the ids that the model gave."""

    text: str
    calls: list[tuple[str, Any]]
    reply: str = ""
    ids: tuple[str | None, ...] = ()


ARGUMENTS = {"city": "Paris", "days": 3, "unit": "celsius", "exact": True}
PARIS = ("get_weather", {"city": "Paris"})
TIME = ("get_time", {})
CODE = 'if a < b and "</tool_call>" in c:\n\tprint(\'[TOOL_CALLS]\', {"x": [1]})\n'
CODE_JSON = CODE.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
TWICE = json.dumps(json.dumps({"city": "Paris"}))  # encoded as JSON, and the text of that again
WITHOUT_ARGUMENTS = [
    '{"name": "get_time"}',
    '{"name": "get_time", "arguments": null}',
    '{"name": "get_time", "arguments": ""}',
    '{"name": "get_time", "arguments": " "}',
    '{"name": "get_time", "arguments": "null"}',
    '{"name": "get_time", "arguments": "{}"}',
    '{"arguments": null, "name": "get_time"}',
    '{"arguments": "", "name": "get_time"}',
    '{"id": "a", "type": "function", "name": "get_time"}',
]
PARIS_TWICE = f'{{"name": "get_weather", "arguments": {TWICE}}}'
TWICE_PARIS = f'{{"arguments": {TWICE}, "name": "get_weather"}}'
LONG = "ünïcödé 🎉 " * 10

SAMPLES: dict[str, list[Sample]] = {
    "hermes": [
        Sample(
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
            [PARIS],
        ),
        Sample(
            'Let me see.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
            '</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\nDone.',
            [PARIS, TIME],
            "Let me see.Done.",
        ),
        Sample(
            '<tool_call>{"name": "run.code-2", "arguments": {"code": "'
            + CODE_JSON
            + '"}}</tool_call>',
            [("run.code-2", {"code": CODE})],
        ),
        Sample(  # the wrapper's last brace is missing, or there is one too many
            '<tool_call>\n{"name": "get_time", "arguments": {}\n</tool_call>'
            '<tool_call>\n{"name": "get_time", "arguments": {}}}\n</tool_call>',
            [TIME, TIME],
        ),
        Sample(
            '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>',
            [PARIS],
        ),
        *(Sample(f"<tool_call>\n{call}\n</tool_call>", [TIME]) for call in WITHOUT_ARGUMENTS),
        Sample(f"<tool_call>{PARIS_TWICE}</tool_call>", [PARIS]),
        Sample(f"<tool_call>{TWICE_PARIS}</tool_call>", [PARIS]),
        Sample(  # several objects or a list in one tag
            '<tool_call>\n{"name": "get_time"}\n{"name": "get_time", "arguments": {}}, '
            f"{PARIS_TWICE}}}\n</tool_call> ok",
            [TIME, TIME, PARIS],
            "ok",
        ),
        Sample(f'<tool_call>[{PARIS_TWICE}, {{"name": "get_time"}},]</tool_call>\n', [PARIS, TIME]),
        Sample(
            f'<tool_call>{{"type": "function", "function": {PARIS_TWICE}}}</tool_call>', [PARIS]
        ),
        Sample('<tool_call>{"name": "none.such-1"}</tool_call>', [("none.such-1", {})]),
        Sample(
            '<tool_call>{"name": "get_time"}, and so on</tool_call>',
            [TIME],
            ", and so on</tool_call>",
        ),
        Sample(
            "Use <tool_call> to call, <b>then</b> </tool_call>.",
            [],
            "Use <tool_call> to call, <b>then</b> </tool_call>.",
        ),
    ],
    "granite": [
        Sample('<|tool_call|> [{"name": "get_weather", "arguments": {"city": "Paris"}}]', [PARIS]),
        Sample(
            'Hm.\n<tool_call>[\n  {"arguments": {"city": "Paris"}, "name": "get_weather"},\n'
            '  {"name": "get_time", "arguments": {}}\n]<|end_of_text|>',
            [PARIS, TIME],
            "Hm.",
        ),
        Sample(f'<|tool_call|>[{PARIS_TWICE}, {{"name": "get_time"}}]', [PARIS, TIME]),
        Sample(f"<|tool_call|>{PARIS_TWICE}\n{WITHOUT_ARGUMENTS[1]}", [PARIS, TIME]),
        Sample('<|tool_call|> {"name": 1}', [], '<|tool_call|> {"name": 1}'),
    ],
    "phi4_mini": [
        Sample('functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]', [PARIS]),
        Sample(
            'I look.\nfunctools[\n {"name": "get_weather", "arguments": {"city": "Paris"}},\n'
            ' {"name": "get_time", "arguments": {}}\n]\nMore?',
            [PARIS, TIME],
            "I look.More?",
        ),
        Sample(
            '<|tool_call|>[{"type": "function", "name": "get_time", "parameters": {}}]'
            "<|/tool_call|>",
            [TIME],
        ),
        Sample(f"functools[{PARIS_TWICE}, {WITHOUT_ARGUMENTS[2]}]", [PARIS, TIME]),
        Sample(f"<|tool_call|>{WITHOUT_ARGUMENTS[0]}<|/tool_call|>", [TIME]),
        Sample("Python has functools[ This is text ]", [], "Python has functools[ This is text ]"),
    ],
    "llama3_json": [
        Sample('{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
        Sample(
            '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
            '{"name": "get_time", "parameters": {}}',
            [PARIS, TIME],
        ),
        *(Sample(call, [TIME]) for call in WITHOUT_ARGUMENTS),
        Sample(f"{PARIS_TWICE}; {WITHOUT_ARGUMENTS[0]};", [PARIS, TIME]),
        Sample(f"{PARIS_TWICE}\n{WITHOUT_ARGUMENTS[0]}, {PARIS_TWICE}", [PARIS, TIME, PARIS]),
        Sample(f"[{PARIS_TWICE}, {WITHOUT_ARGUMENTS[0]}]", [PARIS, TIME]),
        Sample('<|python_tag|>{"name": "none", "parameters": {}}', [("none", {})]),
        Sample("See [1] and [{}].", [], "See [1] and [{}]."),
        Sample(f'{PARIS_TWICE}, {{"x": 1}}', [PARIS], ', {"x": 1}'),
        Sample(
            'So {it} is {"name": "Bob", "parameters": {}}: {"name": "get_time", "arguments": {}}'
            " ok {",
            [TIME],
            'So {it} is {"name": "Bob", "parameters": {}}: ok {',
        ),
    ],
    "pythonic": [
        Sample("[get_weather(city='Paris')]", [PARIS]),
        Sample(
            r"""See [1] and [x](y). [get_weather(city="Martha's \x41\n", near=['a', None,], """
            "place={'lat': -1.5e3}, exact=True), get_time()]",
            [
                (
                    "get_weather",
                    {
                        "city": "Martha's A\n",
                        "near": ["a", None],
                        "place": {"lat": -1500.0},
                        "exact": True,
                    },
                ),
                TIME,
            ],
            "See [1] and [x](y). ",
        ),
        Sample("[unknown(a=1)]", [], "[unknown(a=1)]"),
    ],
    "llama4_pythonic": [
        Sample(
            "<|python_start|>[get_weather(city='Paris'), get_time()]<|python_end|>", [PARIS, TIME]
        ),
        Sample("[get_weather(city='Paris')]", [PARIS]),
        Sample("<|python_start|>[none(a=1)]<|python_end|>", [("none", {"a": 1})]),
        Sample("<|python_start|>none", [], "<|python_start|>none"),
        Sample("[none(a=1)]", [], "[none(a=1)]"),
    ],
    "mistral": [
        Sample('[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]', [PARIS]),
        Sample(
            'Hello[TOOL_CALLS][{"arguments": {"city": "Paris"}, "name": "get_weather"}, '
            '{"name": "get_time", "arguments": {}}]',
            [PARIS, TIME],
            "Hello",
        ),
        Sample('[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_time{}', [PARIS, TIME]),
        Sample(
            '[TOOL_CALLS]get_weather[CALL_ID]Ab3dEf7h9[ARGS]{"city": "Paris"}',
            [PARIS],
            ids=("Ab3dEf7h9",),
        ),
        Sample(f"[TOOL_CALLS][{PARIS_TWICE}, {WITHOUT_ARGUMENTS[0]}]", [PARIS, TIME]),
        Sample(f"[TOOL_CALLS]{PARIS_TWICE}", [PARIS]),
        Sample(f"[TOOL_CALLS]get_weather{TWICE}[TOOL_CALLS]get_time[ARGS]null", [PARIS, TIME]),
        Sample("[TOOL_CALLS]get_time[TOOL_CALLS]get_time{}", [TIME, TIME]),
        Sample("[TOOL_CALLS] not json at all", [], "[TOOL_CALLS] not json at all"),
    ],
    "qwen3_coder": [
        Sample(
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n<parameter=near>\nnull\n</parameter>\n"
            '<parameter=place>\n{"lat": 1.5}\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n'
            "</function>\n</tool_call>",
            [
                (
                    "get_weather",
                    {
                        "city": "Paris",
                        "days": 3,
                        "near": None,
                        "place": {"lat": 1.5},
                        "exact": True,
                    },
                )
            ],
        ),
        Sample(
            f"Ok.\n<tool_call>\n<function=run.code-2>\n<parameter=code>\n{CODE}\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
            [("run.code-2", {"code": CODE}), TIME],
            "Ok.",
        ),
        Sample(  # values, the function and the tag are not closed
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n"
            "<parameter=near>\n\n</parameter>\n<tool_call>\n<function=get_time>\n</tool_call>",
            [("get_weather", {"city": "Paris", "days": 3, "near": None}), TIME],
        ),
        Sample(  # one that is given, one that is not declared, and none at a line's beginning
            "<tool_call>\n<function=get_weather>\n<parameter=days>\n3\n</parameter>\n"
            "<parameter=city>\na\n<parameter=days>\nb\n<parameter=c>\nd <parameter=unit>\n"
            "<parameter=city>\n</function>\n</parameter>\n</function>\n</tool_call>",
            [
                (
                    "get_weather",
                    {
                        "days": 3,
                        "city": "a\n<parameter=days>\nb\n<parameter=c>\nd <parameter=unit>\n"
                        "<parameter=city>\n</function>",
                    },
                )
            ],
        ),
        Sample(  # empty values
            "<function=get_weather><parameter=days>\n</parameter><parameter=exact></parameter>"
            "<parameter=city>\n<parameter=place> </parameter></tool_call>",
            [("get_weather", {"exact": None, "city": ""})],
        ),
        Sample("<function=none>\n</function>", [("none", {})]),
        Sample(  # without the outer tag
            "<function=get_weather><parameter=city>Paris</parameter></function></tool_call>",
            [PARIS],
        ),
    ],
    "seed_oss": [
        Sample(
            "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
            "</function>\n</seed:tool_call>",
            [PARIS],
        ),
        Sample(
            "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris\n<parameter=days>3"
            "</parameter>\n</seed:tool_call>",
            [("get_weather", {"city": "Paris", "days": 3})],
        ),
    ],
    "minimax_m2": [
        Sample(
            'So.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
            '<parameter name="city">Paris</parameter>\n<parameter name="days">5</parameter>\n'
            '</invoke>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
            [("get_weather", {"city": "Paris", "days": 5}), TIME],
            "So.",
        ),
        Sample(
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris\n'
            '<parameter name="days"></parameter>\n</minimax:tool_call>',
            [PARIS],
        ),
    ],
    "glm45": [
        Sample(
            "Well\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>many</arg_value>\n</tool_call>",
            [("get_weather", {"city": "Paris", "days": "many"})],
            "Well",
        ),
        Sample("<tool_call>get_time</tool_call><tool_call>get_time\n</tool_call>", [TIME, TIME]),
        Sample(
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris\n"
            "<arg_key>days</arg_key>\n<arg_value></arg_value>\n<tool_call>get_time</tool_call>",
            [PARIS, TIME],
        ),
    ],
    "glm4": [
        Sample('get_weather\n{"city": "Paris"}', [PARIS]),
        Sample('I look.\nget_weather\n{"city": "Paris"}', [PARIS], "I look."),
        Sample("Tools:\nget_weather\nget_time\n", [], "Tools:\nget_weather\nget_time\n"),
        Sample("get_weather tells the weather", [], "get_weather tells the weather"),
        Sample("\nHello", [], "\nHello"),
    ],
    "deepseek3": [
        Sample(
            "Hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
            '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
            "<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [PARIS, TIME],
            "Hi",
        ),
        Sample(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            f"{TWICE}\n```<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n"
            "```json\n\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [PARIS, TIME],
        ),
    ],
    "deepseek31": [
        Sample(
            "Hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
            '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [PARIS, TIME],
            "Hi",
        ),
        Sample(
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{TWICE}"
            "<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜><｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
            [PARIS, TIME],
        ),
        Sample("<｜tool▁call▁begin｜>none<｜tool▁sep｜>null<｜tool▁call▁end｜>", [("none", {})]),
    ],
    "kimi_k2": [
        Sample(
            "Hi <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0 "
            '<|tool_call_argument_begin|>{"city": "Paris"} <|tool_call_end|><|tool_call_begin|>'
            "get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            [PARIS, TIME],
            "Hi ",
            ("functions.get_weather:0", "get_time:1"),
        ),
        Sample(
            "<|tool_call_section_begin|><|tool_call_begin|>functions.get_weather"
            '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>'
            "run.code-2:7<|tool_call_argument_begin|>null<|tool_call_end|>"
            "<|tool_call_begin|>functions.get_time-3<|tool_call_argument_begin|><|tool_call_end|>"
            "<|tool_call_begin|>get_time_4<|tool_call_end|><|tool_call_section_end|>",
            [PARIS, ("run.code-2", {}), TIME, TIME],
            "",
            (None, "run.code-2:7", "functions.get_time-3", "get_time_4"),
        ),
        Sample(
            f"<|tool_call_begin|>none-2<|tool_call_argument_begin|>{TWICE}<|tool_call_end|>"
            "<|tool_call_begin|>none:2<|tool_call_argument_begin|>{}<|tool_call_end|>",
            [("none-2", {"city": "Paris"}), ("none", {})],
            "",
            ("none-2", "none:2"),
        ),
        Sample(
            "<|tool_call_begin|>functions.:x,<|tool_call_argument_begin|>{}",
            [],
            "<|tool_call_begin|>functions.:x,<|tool_call_argument_begin|>{}",
        ),
    ],
    "gpt_oss": [
        Sample(
            "<|channel|>analysis<|message|>They ask <b>.<|end|><|start|>assistant<|channel|>"
            "commentary to=functions.get_weather <|constrain|>json<|message|>"
            '{"city": "Paris"}<|call|>',
            [PARIS],
        ),
        Sample(
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.get_time"
            "<|channel|>commentary json<|message|>{}<|call|><|start|>assistant<|channel|>final"
            "<|message|>Done.<|return|>",
            [TIME],
            "I look.Done.",
        ),
        Sample(" to=functions.get_time<|channel|>commentary<|message|><|call|>", [TIME]),
        Sample(
            "<|channel|>analysis<|message|>Hm.<|channel|>commentary to=functions.get_weather"
            f"<|message|>{TWICE}<|call|>",
            [PARIS],
        ),
        Sample("<|channel|>commentary to=functions.get_time<|message|>null<|call|>", [TIME]),
        Sample("Plain text.", [], "Plain text."),
    ],
    "function_gemma": [
        Sample(
            "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>",
            [PARIS],
        ),
        Sample(
            "<start_function_call>call:get_weather{city:<escape><escape>,days:<escape><escape>,"
            "exact: <escape><escape> }<end_function_call><start_function_call>call:none{}",
            [("get_weather", {"city": "", "exact": None}), ("none", {})],
        ),
        Sample(
            'So <start_function_call>call:get_weather{city:<escape>a,}{"b<escape>,'
            "days:<escape>3<escape>,place:{lat:1.5},near:[<escape>x<escape>,<escape>y<escape>],"
            "exact:true}<end_function_call><start_function_call>call:get_time{}<end_function_call>",
            [
                (
                    "get_weather",
                    {
                        "city": 'a,}{"b',
                        "days": 3,
                        "place": {"lat": 1.5},
                        "near": ["x", "y"],
                        "exact": True,
                    },
                ),
                TIME,
            ],
            "So ",
        ),
    ],
}
ALL = [
    (name, sample)
    for name, samples in SAMPLES.items()
    for sample in [*samples, Sample(LONG, [], LONG)]
]


def produced(pieces: Pieces, values: Iterator[Any], optional: bool = True) -> str:
    """A text that pieces allow, the first of several, with values in their order; arguments are
    one value."""
    out = []
    for piece in pieces:
        if isinstance(piece, Literal):
            out.append(piece.text)
        elif isinstance(piece, Maybe):
            out.append(produced(piece.pieces, values, optional) if optional else "")
        elif isinstance(piece, Json):
            out.append(json.dumps(next(values)))
        elif isinstance(piece, Arguments):
            out.append(laid_out(next(values), piece.schema, piece.layout))
        elif isinstance(piece, Either):
            out.append(produced(piece.options[0], values, optional))
        elif isinstance(piece, OneOf):
            value = next(values)
            assert value in piece.texts
            out.append(value)
        else:
            assert isinstance(piece, FreeText)
            value = next(values)
            out.append(value if isinstance(value, str) else json.dumps(value))
    return "".join(out)


def laid_out(arguments: dict[str, Any], schema: Any, layout: Layout) -> str:
    """Arguments as a format writes them: those that are required first, as in grammars."""
    cases = [case.required for case in Meaning(schema, schema).objects]
    needed = next((names for names in cases if {*names} <= arguments.keys()), [])
    required = [name for name in arguments if name in needed]
    optional = [name for name in arguments if name not in needed]
    written = [laid_out_one(name, arguments[name], layout) for name in required]
    others = [laid_out_one(name, arguments[name], layout) for name in optional]
    if written:
        return layout.comma.join([*written, *others])
    return "".join(other + layout.comma for other in others)


def laid_out_one(name: str, value: Any, layout: Layout) -> str:
    """One argument."""
    if layout.text is not None and isinstance(value, str):
        return layout.before_key + name + layout.text[0] + value + layout.text[1]
    written = json.dumps(value, ensure_ascii=False)
    return layout.before_key + name + layout.json[0] + written + layout.json[1]
