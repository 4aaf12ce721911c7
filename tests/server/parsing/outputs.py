"""Outputs by format, well-formed and malformed, and what each means: rows of the table that
test_outputs.py reads.

Formats that write calls in the same notation share their rows, each in its own markers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

TOOLS: dict[str, Any] = {
    "look": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "near": {"type": ["array", "null"], "items": {"type": "string"}},
            "where": {"type": "object"},
            "exact": {"type": "boolean"},
        },
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}},
    "run.code-2": {"type": "object", "properties": {"code": {"type": "string"}}},
}
CITY = {"city": "Łódź \U0001f389"}
LOOK = ("look", CITY)
NOW = ("now", {})


class Output(NamedTuple):
    """One row.

    Attributes:
        format: of tool calls.
        about: what is special.
        text: what the model wrote.
        calls: names and arguments; a text where a call breaks off.
        reply: the text beside the calls, without white space around it.
        prompt: the end of the prompt; the format of reasoning is then qwen3.
        thought: the reasoning, without white space around it.
    """

    format: str
    about: str
    text: str
    calls: tuple[tuple[str, Any], ...] = ()
    reply: str = ""
    prompt: str | None = None
    thought: str = ""

    @property
    def name(self) -> str:
        """A name for tests."""
        return f"{self.format}-{self.about}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# What stands before and behind an object with name and arguments
WRAPPED = {
    "hermes": ("<tool_call>\n", "\n</tool_call>"),
    "granite": ("<|tool_call|>[", "]"),
    "phi4_mini": ("functools[", "]"),
    "mistral": ("[TOOL_CALLS][", "]"),
}


def json_objects() -> Iterator[Output]:
    """Formats whose calls are objects with a name and arguments."""
    city, twice = _json(CITY), _json(_json(CITY))
    for name, (begin, end) in WRAPPED.items():

        def row(about: str, inside: str, *calls: Any, reply: str = "", name: Any = name) -> Output:
            before, after = WRAPPED[name]
            return Output(name, about, before + inside + after, calls, reply)

        yield row("a call", f'{{"name": "look", "arguments": {city}}}', LOOK)
        yield row("keys in another order", f'{{"arguments": {city}, "name": "look"}}', LOOK)
        yield row("parameters for arguments", f'{{"name": "look", "parameters": {city}}}', LOOK)
        yield row(
            "type and id beside",
            '{"type": "function", "id": "1", "name": "now", "arguments": {}}',
            NOW,
        )
        yield row("no arguments", '{"name": "now"}', NOW)
        yield row("arguments null", '{"name": "now", "arguments": null}', NOW)
        yield row("the name under function", f'{{"function": "look", "arguments": {city}}}', LOOK)
        yield row("arguments an empty text", '{"name": "now", "arguments": ""}', NOW)
        yield row("arguments encoded twice", f'{{"name": "look", "arguments": {twice}}}', LOOK)
        yield row(
            "a name that nobody has", '{"name": "rain", "arguments": {"a": 1}}', ("rain", {"a": 1})
        )
        yield row(
            "markers within a text",
            f'{{"name": "run.code-2", "arguments": {{"code": {_json(begin + end)}}}}}',
            ("run.code-2", {"code": begin + end}),
        )
        yield row(
            "nested objects",
            '{"name": "look", "arguments": {"where": {"a": [{}, {"b": 1}]}}}',
            ("look", {"where": {"a": [{}, {"b": 1}]}}),
        )
        for broken in (
            "no JSON at all",
            '{"name": 5}',
            '{"arguments": {}}',
            '["look"]',
            "",
        ):
            yield Output(name, f"broken {broken}", begin + broken + end, (), begin + broken + end)
        cut = f'{begin}{{"name": "look", "arguments": {{"city": "Łó'
        yield Output(name, "cut within a text", cut, (("look", '{"city": "Łó'),))
        whole = f'{begin}{{"name": "look", "arguments": {city}}}'
        yield Output(name, "without its closer", whole, (LOOK,))
        yield Output(name, "text before", f"I look.\n\n{whole}{end}", (LOOK,), "I look.")


def hermes() -> Iterator[Output]:
    """Several calls in one tag, and what only hermes has."""
    look, now = f'{{"name": "look", "arguments": {_json(CITY)}}}', '{"name": "now"}'
    both = (LOOK, NOW)
    begin, end = WRAPPED["hermes"]
    yield Output("hermes", "two tags", f"{begin}{look}{end}\n{begin}{now}{end}", both)
    yield Output("hermes", "objects in one tag", f"{begin}{look}\n{now}{end}", both)
    yield Output("hermes", "a list in one tag", f"{begin}[{look}, {now}]{end}", both)
    yield Output("hermes", "a brace too many", f"{begin}{look}}}{end}", (LOOK,))
    thought = "Hm.\n"
    call = f"{begin}{look}{end}"
    opened = "<think>\n"
    yield Output(
        "hermes",
        "a call in a thought that is not closed",
        thought + call,
        (LOOK,),
        prompt=opened,
        thought="Hm.",
    )
    yield Output(
        "hermes",
        "calls in a thought that is not closed",
        f"{thought}{call}\n{call}",
        (LOOK, LOOK),
        prompt=opened,
        thought="Hm.",
    )
    rehearsed = f"{thought}{call}\nOr not."
    yield Output(
        "hermes",
        "a call that a thought rehearses",
        f"{rehearsed}\n</think>\n\n{call}",
        (LOOK,),
        prompt=opened,
        thought=rehearsed,
    )
    yield Output(
        "hermes",
        "text behind a call in a thought",
        f"{thought}{call}\nNo.",
        (),
        prompt=opened,
        thought=f"{thought}{call}\nNo.",
    )
    yield Output(
        "hermes",
        "a call in a thought of no tool",
        thought + '<tool_call>\n{"name": "rain"}\n</tool_call>',
        (),
        prompt=opened,
        thought=thought + '<tool_call>\n{"name": "rain"}\n</tool_call>',
    )
    yield Output(
        "hermes",
        "half a call in a thought",
        f"{thought}{begin}{look[:20]}",
        (),
        prompt=opened,
        thought=f"{thought}{begin}{look[:20]}",
    )


class Tags(NamedTuple):
    """The tags of one format; `{}` is the name.

    Attributes:
        lines: values stand on lines of their own.
    """

    begin: str
    call: str
    key: str
    value_end: str
    call_end: str
    end: str
    lines: bool = True


TAGGED = {
    "qwen3_coder": Tags(
        "<tool_call>\n",
        "<function={}>\n",
        "<parameter={}>\n",
        "\n</parameter>\n",
        "</function>\n",
        "</tool_call>",
    ),
    "seed_oss": Tags(
        "<seed:tool_call>\n",
        "<function={}>\n",
        "<parameter={}>\n",
        "\n</parameter>\n",
        "</function>\n",
        "</seed:tool_call>",
    ),
    "minimax_m2": Tags(
        "<minimax:tool_call>\n",
        '<invoke name="{}">\n',
        '<parameter name="{}">',
        "</parameter>\n",
        "</invoke>\n",
        "</minimax:tool_call>",
        lines=False,
    ),
    "glm45": Tags(
        "<tool_call>",
        "{}\n",
        "<arg_key>{}</arg_key>\n<arg_value>",
        "</arg_value>\n",
        "",
        "</tool_call>",
        lines=False,
    ),
}


def tagged() -> Iterator[Output]:
    """Formats whose arguments are tagged text."""
    for name, tags in TAGGED.items():
        look, now = tags.call.format("look"), tags.call.format("now")
        close = tags.call_end + tags.end

        def arguments(tags: Tags = tags, **values: str) -> str:
            return "".join(
                tags.key.format(key) + text + tags.value_end for key, text in values.items()
            )

        def row(about: str, text: str, *calls: Any, reply: str = "", name: str = name) -> Output:
            return Output(name, about, text, calls, reply)

        begin, key = tags.begin, tags.key
        whole = begin + look + arguments(city=CITY["city"], days="3", exact="true") + close
        meant = ("look", {**CITY, "days": 3, "exact": True})
        yield row("a call", whole, meant)
        yield row("text before", f"I look.\n{whole}", meant, reply="I look.")
        yield row("two calls", f"{whole}\n{begin}{now}{close}", meant, NOW)
        yield row(
            "a name that nobody has",
            begin + tags.call.format("rain") + arguments(a="1") + close,
            ("rain", {"a": "1"}),
        )
        yield row(
            "a list and an object",
            begin + look + arguments(near='["a", "b"]', where='{"x": [1]}') + close,
            ("look", {"near": ["a", "b"], "where": {"x": [1]}}),
        )
        tagged_texts = [f"a{tags.value_end}{key.format('days')}7", close]
        yield row(
            "tags within the texts of a list",
            begin + look + arguments(near=_json(tagged_texts), days="3") + close,
            ("look", {"near": tagged_texts, "days": 3}),
        )
        yield row(
            "a list that breaks off",
            begin + look + arguments(near='["a', days="3") + close,
            ("look", {"near": '["a', "days": 3}),
        )
        yield row(
            "an object with text behind it",
            begin + look + arguments(where='{"a": "b"} or so', days="3") + close,
            ("look", {"where": '{"a": "b"} or so', "days": 3}),
        )
        yield row(
            "no value of its type",
            begin + look + arguments(days="many") + close,
            ("look", {"days": "many"}),
        )
        yield row(
            "an empty text", begin + look + arguments(city="") + close, ("look", {"city": ""})
        )
        yield row(
            "an empty number",
            begin + look + arguments(city="a", days="", exact="") + close,
            ("look", {"city": "a"}),
        )
        yield row(
            "nothing where null is allowed",
            begin + look + arguments(near="") + close,
            ("look", {"near": None}),
        )
        yield row(
            "no closer of the call",
            begin + look + arguments(city="a") + tags.end,
            ("look", {"city": "a"}),
        )
        yield row(
            "nothing behind a value",
            begin + look + arguments(city="a").rstrip("\n"),
            ("look", '{"city": "a"'),
        )
        yield row(
            "cut within a text", begin + look + key.format("city") + "Łó", ("look", '{"city": "Łó')
        )
        yield row(
            "a marker and text",
            f"{begin}is the marker of {close}",
            reply=f"{begin}is the marker of {close}".strip(),
        )
        code = 'if a < b and "</function" != x:\n\tprint("{}")  # <parameter'
        yield row(
            "code",
            begin + tags.call.format("run.code-2") + arguments(code=code) + close,
            ("run.code-2", {"code": code}),
        )
        if tags.lines:
            missing = key.format("city") + "ls\n" + key.format("days") + "5" + tags.value_end
            yield row(
                "no closer before a parameter that is declared",
                begin + look + missing + close,
                ("look", {"city": "ls", "days": 5}),
            )
            unknown = key.format("city") + "ls\n" + key.format("other") + "5" + tags.value_end
            yield row(
                "no closer before one that is not",
                begin + look + unknown + close,
                ("look", {"city": "ls\n<parameter=other>\n5"}),
            )
            again = arguments(days="3") + key.format("city") + "ls\n" + key.format("days")
            yield row(
                "no closer before one that is given",
                begin + look + again + "5" + tags.value_end + close,
                ("look", {"days": 3, "city": "ls\n<parameter=days>\n5"}),
            )
            within = arguments(city="a <parameter=days> b")
            yield row(
                "a parameter's tag within a line",
                begin + look + within + close,
                ("look", {"city": "a <parameter=days> b"}),
            )
            yield row(
                "no outer tag", look + arguments(city="a") + "</function>", ("look", {"city": "a"})
            )


# Formats that write a name and then arguments: what stands before the name, between and behind
NAMED = {
    "deepseek3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "mistral": ("[TOOL_CALLS]", "", ""),
    "gpt_oss": (
        "<|channel|>commentary to=functions.",
        " <|constrain|>json<|message|>",
        "<|call|>",
    ),
    "glm4": ("", "\n", ""),
}


def named() -> Iterator[Output]:
    """Formats that write a name, and arguments as JSON."""
    for name, (begin, between, end) in NAMED.items():
        look = begin + "look" + between

        def row(about: str, text: str, *calls: Any, reply: str = "", name: str = name) -> Output:
            return Output(name, about, text, calls, reply)

        yield row("a name and JSON", look + _json(CITY) + end, LOOK)
        yield row("nothing to give", begin + "now" + between + "{}" + end, NOW)
        yield row(
            "markers within JSON",
            begin + "run.code-2" + between + _json({"code": begin + end + "```"}) + end,
            ("run.code-2", {"code": begin + end + "```"}),
        )
        yield row("cut within JSON", look + '{"city": "Łó', ("look", '{"city": "Łó'))
        yield row("cut behind the arguments", look + _json(CITY), LOOK)
        if name not in ("glm4", "gpt_oss"):
            yield row(
                "text before a name", "I look." + look + _json(CITY) + end, LOOK, reply="I look."
            )
        if name != "glm4":  # where only a tool's name makes a call
            yield row(
                "another name that nobody has",
                begin + "rain" + between + '{"a": 1}' + end,
                ("rain", {"a": 1}),
            )


def one_by_one() -> Iterator[Output]:
    """What only one format has."""
    call, argument = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
    kimi = f"{argument}{_json(CITY)}<|tool_call_end|>"
    for word in ("calls", "call"):
        text = f"<|tool_{word}_section_begin|>{call}functions.look:0{kimi}"
        text += f"{call}functions.now:1{argument}{{}}<|tool_call_end|><|tool_{word}_section_end|>"
        yield Output("kimi_k2", f"a section of {word}", text, (LOOK, NOW))
    for id in ("look:0", "functions.look", "look"):
        text = f"<|tool_calls_section_begin|>{call}{id}{kimi}<|tool_calls_section_end|>"
        yield Output("kimi_k2", f"the id {id}", text, (LOOK,))
    yield Output("kimi_k2", "no section", f"{call}functions.look:0{kimi}", (LOOK,))
    yield Output(
        "mistral",
        "several by name",
        f"[TOOL_CALLS]look{_json(CITY)}[TOOL_CALLS]now{{}}",
        (LOOK, NOW),
    )
    yield Output(
        "mistral",
        "with id and arguments' mark",
        f"[TOOL_CALLS]look[CALL_ID]Ab3dEf7h9[ARGS]{_json(CITY)}",
        (LOOK,),
    )
    final = "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    yield Output(
        "gpt_oss",
        "a reply behind a call",
        f"<|channel|>commentary to=functions.now <|constrain|>json<|message|>{{}}<|call|>{final}",
        (NOW,),
        "Done.",
    )
    yield Output(
        "gpt_oss",
        "the recipient first",
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        (NOW,),
    )
    yield Output(
        "gpt_oss",
        "a recipient without its namespace",
        "<|channel|>commentary to=now <|constrain|>JSON<|message|>{}<|call|>",
        (NOW,),
    )
    unknown = "<|channel|>commentary to=rain <|constrain|>json<|message|>{}"
    yield Output("gpt_oss", "a recipient that nobody is", unknown, (), unknown)
    yield Output("glm4", "a name within a text", "look at {}", (), "look at {}")
    for name in ("pythonic", "llama4_pythonic"):
        yield Output(
            name,
            "two calls",
            f"[look(city={_json(CITY['city'])}, days=3), now()]",
            (("look", {**CITY, "days": 3}), NOW),
        )
        yield Output(
            name,
            "Python's values",
            "[look(city='a', near=None, exact=True, where={'x': [1, 2.5]})]",
            (("look", {"city": "a", "near": None, "exact": True, "where": {"x": [1, 2.5]}}),),
        )
        yield Output(name, "a name that nobody has", "[rain(a=1)]", (), "[rain(a=1)]")
        yield Output(name, "cut within a text", "[look(city='Łó", (("look", '{"city": "Łó'),))
        yield Output(name, "a link", "See [1] and [look](x).", (), "See [1] and [look](x).")
    yield Output(
        "llama4_pythonic", "between markers", "<|python_start|>[now()]<|python_end|>", (NOW,)
    )
    look = f'{{"name": "look", "parameters": {_json(CITY)}}}'
    now = '{"name": "now", "parameters": {}}'
    yield Output("llama3_json", "a call", look, (LOOK,))
    yield Output("llama3_json", "two calls", f"<|python_tag|>{look}; {now}", (LOOK, NOW))
    for begin in ("<|python_start|>", "<|python_start|><|python_end|>"):
        yield Output("llama3_json", f"behind {begin}", begin + look, (LOOK,))
    yield Output(
        "llama3_json", "between Python's marks", f"<|python_start|>{look}<|python_end|>", (LOOK,)
    )
    yield Output(
        "llama3_json",
        "other code",
        "<|python_start|>1<|python_end|>",
        (),
        "<|python_start|>1<|python_end|>",
    )
    yield Output(
        "llama3_json", "arguments for parameters", look.replace("parameters", "arguments"), (LOOK,)
    )
    yield Output(
        "llama3_json",
        "an object of no tool",
        '{"name": "Bob", "parameters": {}}',
        (),
        '{"name": "Bob", "parameters": {}}',
    )
    yield Output("llama3_json", "another object", 'It is {"a": 1}.', (), 'It is {"a": 1}.')
    yield Output("llama3_json", "cut within a text", look[:-6], (("look", None),))
    gemma = "<start_function_call>call:look{city:<escape>a, {b}<escape>,days:3,near:[<escape>x"
    yield Output(
        "function_gemma",
        "a call",
        gemma + "<escape>]}<end_function_call>",
        (("look", {"city": "a, {b}", "days": 3, "near": ["x"]}),),
    )
    yield Output(
        "function_gemma",
        "no arguments",
        "<start_function_call>call:now{}<end_function_call>",
        (NOW,),
    )
    yield Output(
        "function_gemma",
        "cut within a text",
        "<start_function_call>call:look{city:<escape>Łó",
        (("look", '{"city": "Łó'),),
    )


OUTPUTS = [*json_objects(), *hermes(), *tagged(), *named(), *one_by_one()]
