"""The generated conversations with tools and schemas: right in every call and answer, the same for
a seed, rendered as the server renders them, and without a held-out call."""

from __future__ import annotations

import json
import pathlib
import random
from typing import Any

import jsonschema
import orjson
import pytest

import jaxllm.demo
from examples.demo_model.skills import errands, schemas
from examples.demo_model.skills.cases import PARSERS, read, skill_cases
from examples.demo_model.skills.corpus import corpus
from examples.demo_model.skills.jobs import draw_required
from examples.demo_model.skills.tools import KINDS
from examples.demo_model.tokenizer import render, renderer
from jaxllm.chat_template import TemplateInput
from jaxllm.server.parsing.registry import find_reasoning, find_tools
from jaxllm.server.rendering.worker import Renderer
from jaxllm.server.requests.limits import Rules
from jaxllm.server.requests.messages import read_messages
from jaxllm.server.requests.tools import read_tool_use
from jaxllm.templates.traits import AS_GIVEN
from jaxllm.tokenizer import Tokenizer
from tests.server.fake import RESOLVED

RULES = Rules(resolved=RESOLVED, served=("demo",), longest_token=1 << 12)
SIDES = pytest.mark.parametrize("held", [False, True], ids=["trained", "held out"])


@pytest.fixture(scope="module")
def template():
    return renderer()


@pytest.fixture(scope="module")
def served() -> tuple[Tokenizer, Renderer]:
    """The tokenizer as the server loads it, and what renders for it."""
    tokenizer = Tokenizer.load(pathlib.Path(jaxllm.demo.path()))
    return tokenizer, Renderer(orjson.loads(orjson.dumps(tokenizer.template_facts())))


def wire(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a client sends them."""
    sent = []
    for message in messages:
        one = dict(message)
        if one["role"] == "tool":
            one["tool_call_id"] = "c1"
        if one.get("tool_calls"):
            one["content"] = None
            one["tool_calls"] = [
                {
                    "id": "c1",
                    "type": "function",
                    "function": call["function"]
                    | {"arguments": json.dumps(call["function"]["arguments"])},
                }
                for call in one["tool_calls"]
            ]
        sent.append(one)
    return sent


def drafts(held: bool, count: int = 40):
    """Drafts of every kind of errand."""
    rng = random.Random(7)
    for errand, _ in errands.ERRANDS.values():
        for _ in range(count):
            yield errand(rng, held)


def test_a_seed_gives_one_corpus():
    assert list(corpus(3, 200)) == list(corpus(3, 200))
    assert list(corpus(3, 200)) != list(corpus(4, 200))


@SIDES
def test_every_kind_of_tools_has_calls_on_both_sides_of_the_split(held):
    for kind in KINDS:
        found = draw_required(random.Random(1), kind, held)
        assert kind.held_out(found) == held


def test_tools_of_different_kinds_have_different_names():
    names = [name for kind in KINDS for name in kind.names]
    assert len(names) == len(set(names))


@SIDES
def test_every_call_is_of_an_offered_tool_fits_its_schema_and_is_on_its_side(held):
    checked = 0
    for draft in drafts(held):
        tools = {tool.name: tool for tool in draft.tools}
        for message in draft.messages:
            for call in message.get("tool_calls", ()):
                tool, arguments = tools[call["function"]["name"]], call["function"]["arguments"]
                jsonschema.validate(
                    arguments,
                    tool.definition["function"]["parameters"] | {"additionalProperties": False},
                )
                needed = [
                    arguments[key]
                    for key, one in zip(tool.keys, tool.kind.parameters, strict=True)
                    if not one.said
                ]
                assert tool.kind.held_out(needed) == held
                checked += 1
    assert checked > 200


def test_results_stand_behind_their_calls_and_an_answer_ends_every_conversation():
    for draft in drafts(False):
        open_calls = 0
        for message in draft.messages:
            if message["role"] == "tool":
                open_calls -= 1
            else:
                assert open_calls == 0
            open_calls += len(message.get("tool_calls", ()))
        assert draft.messages[-1]["role"] == "assistant" and open_calls == 0


def test_what_needs_no_tool_or_has_none_that_fits_is_answered_without_a_call():
    rng = random.Random(2)
    for errand in (errands.no_tool_needed, errands.no_tool_fits):
        for _ in range(50):
            draft = errand(rng, False)
            assert draft.tools and not any("tool_calls" in message for message in draft.messages)


@SIDES
@pytest.mark.parametrize("name", schemas.MAKERS)
def test_answers_to_a_schema_are_valid_and_name_what_the_text_says(name, held):
    rng = random.Random(3)
    for _ in range(60):
        made = schemas.MAKERS[name][0](rng, held)
        jsonschema.validate(made.value, made.schema | {"additionalProperties": False})
        for key, value in made.value.items():
            if isinstance(value, str) and key != "operation":
                assert value.lower() in made.text.lower()
        shown = json.loads(schemas.dressed(rng, made))
        assert list(shown["properties"]) == list(made.schema["properties"]) == list(made.value)


def test_the_parsers_read_every_expected_answer_as_it_was_meant(template):
    scores: dict[str, dict[str, int]] = {}
    for case in skill_cases(template, random.Random(5), 12):
        assert case.score(case.text.removesuffix("<|im_end|>"), scores), case.text
    assert {name.split(":")[0] for name in scores} == {
        *("calls in JSON", "calls in XML", "answers beside tools"),
        *("JSON to a schema", "thought that begins and ends"),
    }


def test_wrong_answers_are_not_right(template):
    for case in skill_cases(template, random.Random(6), 6):
        text = case.text.removesuffix("<|im_end|>")
        scores: dict[str, dict[str, int]] = {}
        assert not case.score(text + " and", scores)
        assert not case.score("", scores)
        if case.thinking:
            assert not case.score(text.replace("</think>", ""), scores)
        if case.expected.calls:
            other = "xml" if case.tool_format == "json" else "json"
            assert read(text, case.prompt, other, case.schemas).calls == []


def test_the_server_finds_the_json_format_and_the_thought_of_the_template(served):
    signs = served[0].format_signs
    assert find_tools("auto", signs) is find_tools(PARSERS["json"], None)
    assert find_reasoning("auto", signs) is find_reasoning("qwen3", None)


def test_the_server_renders_and_encodes_training_conversations_to_the_same_bytes(served, template):
    tokenizer, server = served
    checked = 0
    for sample in corpus(8, 300):
        if not sample.messages:
            continue
        tools = read_tool_use({"tools": sample.tools or []})
        wanted = TemplateInput(
            messages=read_messages(wire(sample.messages), RULES, truncated=False),
            tools=[tool.form for tool in tools.tools] or None,
            add_generation_prompt=False,
            template_kwargs=sample.variables,
        )
        text = server.render(wanted.arguments(tokenizer.templates), True, AS_GIVEN)
        expected = render(template, sample)
        assert text == expected
        assert tokenizer.encode_chat(text, True) == tokenizer.encode(expected)
        checked += bool(sample.tools)
    assert checked > 50


def test_conversations_fit_the_context(served, template):
    lengths = [len(served[0].encode(render(template, sample))) for sample in corpus(9, 300)]
    assert max(lengths) <= 2048
