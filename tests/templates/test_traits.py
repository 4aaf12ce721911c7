"""What chat templates of many families show is found out, and shows in what people read."""

from __future__ import annotations

import time
from typing import Any

import pytest

from jaxllm.chat_template import TemplateError
from jaxllm.server.rendering.worker import Renderer
from jaxllm.templates import probes
from jaxllm.templates.probes import traits_of
from jaxllm.templates.traits import AS_GIVEN, TemplateTraits, table_of
from tests.templates.families import EXPECTED, TEMPLATES


def renderer_of(template: Any) -> Renderer:
    """What renders a template, without a vocabulary."""
    facts = {"special_tokens": {}, "added_tokens": [], "control_tokens": None}
    return Renderer({"template": template, **facts})


@pytest.mark.parametrize("family", TEMPLATES)
def test_probes_find_what_a_template_shows(family: str) -> None:
    traits = renderer_of(TEMPLATES[family]).probe("", {})
    assert traits == TemplateTraits(**EXPECTED[family])
    assert TemplateTraits.from_json(traits.as_json()) == traits


def test_each_named_template_has_traits_of_its_own() -> None:
    named = {"default": TEMPLATES["phi_4"], "tool_use": TEMPLATES["deepseek_v3"], "rag": "none"}
    renderer = renderer_of(named)
    found = {name: renderer.probe(name, {}) for name in named}
    assert found["default"] == TemplateTraits(**EXPECTED["phi_4"])
    assert found["tool_use"] == TemplateTraits(**EXPECTED["deepseek_v3"])
    assert found["rag"].fault == "it shows no message"
    rows = table_of(found)
    assert ("default: calls of tools", "not shown") in rows
    assert ("tool_use: arguments of calls", "text") in rows
    assert ("rag: fault", "it shows no message; histories stay as they are") in rows


def test_the_operators_variables_decide_what_is_probed() -> None:
    template = (
        "{%- for message in messages -%}{{ message.content }}{%- for call in message.tool_calls -%}"
        "{%- if as_xml -%}{{ call.function.arguments.items() | list }}"
        "{%- else -%}{{ call.function.arguments | tojson }}{%- endif -%}"
        "{%- endfor -%}{%- endfor -%}"
    )
    renderer = renderer_of(template)
    assert renderer.probe("", {}).texts
    assert not renderer.probe("", {"as_xml": True, "unknown": 1}).texts


def test_a_template_that_refuses_everything_leaves_histories_and_says_why() -> None:
    traits = renderer_of("{{ raise_exception('never') }}").probe("", {})
    assert traits == TemplateTraits(fault="the chat template refused the conversation: never")
    assert len(traits.rows()) == 1 and "never" in traits.rows()[0][1]


def test_probes_end_in_time() -> None:
    asked = []

    def render(messages: Any, tools: Any) -> str:
        asked.append(messages)
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return "probeasked"

    traits = traits_of(render, seconds=0.03)
    assert traits == TemplateTraits(fault="its probes took more than 0.03 s")
    assert len(asked) <= 3


def test_a_mark_must_be_shown_not_merely_taken() -> None:
    def render(messages: Any, tools: Any) -> str:
        return " ".join(message.get("content") or "" for message in messages)

    traits = traits_of(render)
    assert not traits.calls and traits.late_system

    def refuse(messages: Any, tools: Any) -> str:
        raise TemplateError("no")

    assert traits_of(refuse).fault == "no"


def test_only_one_of_two_neighbours_is_not_both() -> None:
    last = (
        "{%- for message in messages -%}"
        "{%- if loop.last or loop.nextitem.role != message.role -%}{{ message.content }}"
        "{%- endif -%}{%- endfor -%}"
    )
    assert not renderer_of(last).probe("", {}).any_turns
    marks = [probes.ASKED, probes.SAID, probes.ASKED_THEN, probes.SAID_THEN, *probes.VALUES]
    marks += [*probes.RESULTS, probes.SYSTEM, probes.SYSTEM_TOO, probes.SYSTEM_LATE]
    assert not any(mark in other for mark in marks for other in marks if mark is not other)


def test_traits_are_shown_in_words() -> None:
    words = dict(TemplateTraits(**EXPECTED["mistral_v3"]).rows())
    assert words["turns"] == "user and assistant in turn; neighbours joined"
    assert words["late system messages"] == "put into the user's next turn"
    assert words["ids of calls"] == "made into nine letters and digits"
    assert dict(AS_GIVEN.rows())["arguments of calls"] == "objects or text"
    llama = dict(TemplateTraits(**EXPECTED["llama_31"]).rows())
    assert llama["calls of a message"] == "one"
    assert llama["text before calls"] == "in a message of its own"
