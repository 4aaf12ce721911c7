"""Formats are found by name, by alias and by the chat template; the pipeline joins them."""

from __future__ import annotations

import re

import pytest

from jaxllm.server.parsing.formats import chosen_format, find_formats
from jaxllm.server.parsing.parts import Reasoning, Text, ToolArguments, ToolEnd, ToolStart, merged
from jaxllm.server.parsing.pipeline import new_ids, pipeline
from jaxllm.server.parsing.registry import (
    find_reasoning,
    find_tools,
    reasoning_formats,
    tool_formats,
)
from tests.server.parsing.feeding import fed, meant, reply
from tests.server.parsing.samples import ARGUMENTS, SAMPLES, TOOLS, WEATHER, produced

TEMPLATES = {
    # signs as the published templates have them
    "hermes": '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}',
    "qwen3_coder": "<tool_call>\\n<function=example>\\n<parameter=p>\\nv\\n</parameter>",
    "glm45": "<tool_call>{function-name}\\n<arg_key>{k}</arg_key>\\n<arg_value>",
    "mistral": "{{ '[TOOL_CALLS]' }}",
    "deepseek3": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '```json'",
    "deepseek31": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name']",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "gpt_oss": "<|start|>assistant<|channel|>analysis<|message|>",
    "minimax_m2": "<minimax:tool_call>\\n<invoke name=",
    "llama4_pythonic": "<|python_start|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_tells_the_format(name):
    assert find_tools("auto", TEMPLATES[name]) is tool_formats()[name]


def test_a_template_without_signs_has_no_format():
    assert find_tools("auto", "{{ messages }}") is None
    assert find_reasoning("auto", None) is None
    assert find_tools("none", TEMPLATES["hermes"]) is None


def test_the_template_tells_the_reasoning():
    assert find_reasoning("auto", "<think>…</think>") is reasoning_formats()["qwen3"]
    r1 = "'</think>' … '<｜Assistant｜><think>\\n'"
    assert find_reasoning("auto", r1) is reasoning_formats()["deepseek_r1"]
    assert (
        find_reasoning("auto", "<think> <minimax:tool_call>") is reasoning_formats()["minimax_m2"]
    )


@pytest.mark.parametrize(
    ("template", "name", "signs"),
    [
        ("{% set content = content.split('</think>')|last %}", "qwen3", ("</think>",)),
        ("'</think>' '<｜Assistant｜>' '<｜tool▁calls▁begin｜>'", "qwen3", ("</think>",)),
        ("content.split('</think>') <minimax:tool_call>", "qwen3", ("</think>",)),
        ("<think> </think>", "qwen3", ("<think>",)),
        ("</think> <arg_key>", "glm45", ("</think>", "<arg_key>")),
        ("[/THINK]", "mistral", ("[/THINK]",)),
        ("</seed:think>", "seed_oss", ("</seed:think>",)),
    ],
)
def test_a_template_may_hold_only_the_end_of_a_thought(
    template: str, name: str, signs: tuple[str, ...]
):
    chosen = find_formats("auto", "none", template)
    assert chosen.reasoning is reasoning_formats()[name]
    assert chosen.reasoning_signs == signs
    assert not chosen.reasoning.always


def test_a_reply_without_a_thought_is_a_reply_where_the_template_only_ends_thoughts():
    parser = find_reasoning("auto", "content.split('</think>')[-1] + '<｜Assistant｜>'")
    for prompt in ("", "<｜User｜>Hi<｜Assistant｜>"):
        assert fed(pipeline(parser, None, prompt), "Hello.") == [Text("Hello.")]
        assert fed(pipeline(parser, None, prompt), "<think>\nHm.\n</think>\n\nHello.") == [
            Reasoning("Hm."),
            Text("Hello."),
        ]


def test_a_choice_says_its_signs():
    chosen = find_formats("auto", "hermes", "</think> <arg_key>")
    assert chosen_format(chosen.reasoning, "auto", chosen.reasoning_signs) == (
        "glm45 (the chat template has </think> and <arg_key>)"
    )
    assert chosen_format(chosen.tools, "hermes", chosen.tools_signs) == "hermes (named)"
    assert chosen_format(None, "auto", ()) == "none (the chat template has no sign of any)"


def test_names_and_aliases_are_unique_and_found():
    for formats, find in ((tool_formats(), find_tools), (reasoning_formats(), find_reasoning)):
        names = [name for own, p in formats.items() for name in (own, *p.aliases)]
        assert len(names) == len(set(names))
        for name in names:
            assert find(name.upper().replace("_", "-"), None) in formats.values()


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no tool call format is called 'x'; .*hermes"):
        find_tools("x", None)


def test_the_pipeline_tells_reasoning_reply_and_calls():
    own = pipeline(find_reasoning("qwen3", None), find_tools("hermes", None), "<think>\n", TOOLS)
    assert own.thinking
    parts = fed(own, 'Hm.\n</think>\n\nSo.\n<tool_call>{"name": "get_time", "arguments": {}}')
    assert not own.thinking
    id = next(part.id for part in parts if isinstance(part, ToolStart))
    assert re.fullmatch("call_[0-9a-f]{24}", id)
    assert parts == [
        Reasoning("Hm."),
        Text("So."),
        ToolStart(0, "get_time", id),
        ToolArguments(0, "{}"),
        ToolEnd(0),
    ]


def test_without_tools_calls_are_text():
    own = pipeline(None, find_tools("hermes", None))
    text = SAMPLES["hermes"][0].text
    assert fed(own, text) == [Text(text)]


def test_harmony_reads_reasoning_itself():
    formats = find_reasoning("gpt_oss", None), find_tools("gpt_oss", None)
    text = SAMPLES["gpt_oss"][0].text
    parts = fed(pipeline(*formats, "", TOOLS), text)
    assert parts[0] == Reasoning("They ask <b>.")
    assert meant(parts) == [("get_weather", {"city": "Paris"})]
    assert reply(fed(pipeline(*formats), text)) == '{"city": "Paris"}'


def test_thinking_follows_harmony():
    own = pipeline(None, find_tools("gpt_oss", None), "", TOOLS)
    own.feed("<|channel|>analysis<|message|>a")
    assert own.thinking
    own.feed("<|end|>")
    assert not own.thinking


def test_ids_follow_the_style_of_the_model():
    assert re.fullmatch("[A-Za-z0-9]{9}", new_ids("mistral", 0)("f", 1))
    assert new_ids("kimi", 3)("f", 1) == "functions.f:4"
    assert new_ids("call", 0)("f", 1) != new_ids("call", 0)("f", 1)


@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("required", [["city"], []])
@pytest.mark.parametrize("name", sorted(tool_formats()))
def test_what_a_grammar_allows_is_read_as_that_call(name, required, optional):
    properties = {key: WEATHER["properties"][key] for key in ARGUMENTS}
    schema = {"type": "object", "properties": properties, "required": required}
    tools = {"get_weather": schema}
    own = tool_formats()[name]
    wanted = {k: v for k, v in ARGUMENTS.items() if optional or k in required}
    call = produced(own.pieces("get_weather", schema, 0), iter([wanted]))
    section = own.section
    again = produced(own.pieces("get_weather", schema, 1), iter([wanted]))
    one = section.begin + call + section.end
    two = section.begin + call + section.between + again + section.end
    assert fed(own(tools), one)[0] == ToolStart(0, "get_weather", fed(own(tools), one)[0].id)
    assert meant(fed(own(tools), one)) == [("get_weather", wanted)]
    assert reply(fed(own(tools), one)) == ""
    if own.several:
        assert meant(merged(fed(own(tools), two))) == [("get_weather", wanted)] * 2
        assert reply(fed(own(tools), two)) == ""


def test_ids_that_a_model_wrote_twice_differ():
    call = "<|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    one = pipeline(None, tool_formats()["kimi_k2"], schemas={"f": {}})
    parts = [*one.feed(call * 3), *one.finish()]
    ids = [part.id for part in parts if isinstance(part, ToolStart)]
    assert ids == ["functions.f:1", "functions.f:2", "functions.f:3"]
