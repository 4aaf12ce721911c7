"""Finds the traits of a chat template: it renders conversations that hold marks, and a form of a
conversation counts if its marks are in the text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxllm.chat_template import TemplateError
from jaxllm.templates.arguments import text_of
from jaxllm.templates.traits import CONTENTS, EMPTY_SCHEMA, ContentForm, TemplateTraits

type Message = dict[str, Any]
# Renders messages and tools; raises TemplateError
type Render = Callable[[list[Message], list[dict[str, Any]] | None], str]

SECONDS = 1.5  # of processor time, that the probes of one template take at most
MAX_FAULT = 300  # characters
ASKED = "probeasked"
SAID = "probesaid"
ASKED_THEN = "probeaskedthen"
SYSTEM = "probesystemone"
SYSTEM_TOO = "probesystemtwo"
SYSTEM_LATE = "probesystemlate"
VALUES = ("probevalueone", "probevaluetwo")
RESULTS = ("proberesultone", "proberesulttwo")
IDS = ("probeid01", "probeid02")  # of nine letters and digits, which any template takes
NUMBERS = (7316501, 7316502)
LONG_ID = "call_0123456789abcdef01234567"
TOOL_NAME = "probe_tool"
ARGUMENT = "probe_argument"
PARAMETERS = {
    "type": "object",
    "properties": {ARGUMENT: {"type": "string", "description": "Text."}},
    "required": [ARGUMENT],
}
BARE_NAMES = ("probe_bare_one", "probe_bare_two")


class SlowTemplate(Exception):
    """The probes took too long."""


def traits_of(render: Render, seconds: float = SECONDS, tools: bool = True) -> TemplateTraits:
    """What a template shows.

    Args:
        render: renders messages and tools by this template.
        seconds: of this thread's processor time, that all probes take at most; one of them is not
            cut short.
        tools: whether the template ever gets tools.
    """
    probes = _Probes(render, seconds, [_tool(TOOL_NAME, "Text.", PARAMETERS)] if tools else None)
    try:
        if not probes.show([_user(ASKED)], ASKED):
            return TemplateTraits(fault=probes.first_fault)
        form = _shown_form(probes)
        members = _turns(probes) | _systems(probes, form)
        if tools:
            members |= _tools(probes)
        if form is None:
            return TemplateTraits(**members, calls=False)
        return TemplateTraits(**members, **_calls(probes, form))
    except SlowTemplate:
        return TemplateTraits(fault=f"its probes took more than {seconds:g} s")


class _Probes:
    """Renders marked conversations.

    Attributes:
        first_fault: of the first that was refused or showed no mark.
    """

    def __init__(self, render: Render, seconds: float, tools: list[dict[str, Any]] | None):
        self._render = render
        self._tools = tools
        self._deadline = time.thread_time() + seconds
        self.first_fault = "it shows no message"

    def text(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
        """The rendered text, "" of what the template refuses. Raises SlowTemplate."""
        if time.thread_time() > self._deadline:
            raise SlowTemplate
        try:
            return self._render(messages, self._tools if tools is None else tools)
        except TemplateError as error:
            if isinstance(error.__context__, MemoryError):
                raise
            self.first_fault = " ".join(str(error).split())[:MAX_FAULT]
            return ""

    def show(self, messages: list[Message], *marks: str) -> bool:
        """Whether the text of messages has all marks."""
        text = self.text(messages)
        return all(mark in text for mark in marks)

    def show_tools(self, tools: list[dict[str, Any]], *marks: str) -> bool:
        """Whether the text of a question beside tools has all marks."""
        text = self.text([_user(ASKED)], tools)
        return all(mark in text for mark in marks)


def _turns(probes: _Probes) -> dict[str, Any]:
    """Whether neighbours of one role are shown."""
    users = [_user(ASKED), _user(ASKED_THEN)]
    assistants = [_user(ASKED), _assistant(SAID), _assistant("probemore"), _user(ASKED_THEN)]
    turns = [_user(ASKED), _assistant(SAID), _user(ASKED_THEN)]
    if not probes.show(turns, ASKED, SAID, ASKED_THEN):
        return {}
    any_turns = probes.show(users, ASKED, ASKED_THEN) and probes.show(assistants, SAID, "probemore")
    return {"any_turns": any_turns}


def _systems(probes: _Probes, form: _CallForm | None) -> dict[str, Any]:
    """Where system messages are shown."""
    first = [_system(SYSTEM)]
    system = probes.show([*first, _user(ASKED)], SYSTEM, ASKED)
    several = probes.show([*first, _system(SYSTEM_TOO), _user(ASKED)], SYSTEM, SYSTEM_TOO, ASKED)
    late = _system(SYSTEM_LATE)
    dialogue = [_user(ASKED), _assistant(SAID)]
    places = [[*dialogue, late, _user(ASKED_THEN)], [*dialogue, _user(ASKED_THEN), late]]
    if form is not None:
        places.append([_user(ASKED), form.calls(0), form.result(0), late])
    heads = ([], first) if system else ([],)
    late_system = all(
        probes.show([*head, *place], SYSTEM_LATE) for head in heads for place in places
    )
    return {"system": system, "several_system": several, "late_system": late_system}


def _tools(probes: _Probes) -> dict[str, Any]:
    """Whether tools are shown that have a name alone, or a schema without members."""
    schemas: list[dict[str, Any]] = [
        {"type": "object", "properties": {}, "additionalProperties": False},
        {},
    ]
    bare = [_tool(name, None, schema) for name, schema in zip(BARE_NAMES, schemas, strict=True)]
    if probes.show_tools(bare, *BARE_NAMES):
        return {}
    filled = [_tool(name, "", EMPTY_SCHEMA) for name in BARE_NAMES]
    return {"bare_tools": not probes.show_tools(filled, *BARE_NAMES)}


@dataclass(frozen=True)
class _CallForm:
    """A form of calls that the template shows.

    Attributes:
        texts: arguments are text, else objects.
        content: of a message of calls alone.
    """

    texts: bool
    content: ContentForm

    def call(self, number: int, id: str | None = None) -> dict[str, Any]:
        """A call with the mark of a number in its arguments."""
        value = {ARGUMENT: VALUES[number]}
        arguments = text_of(value) if self.texts else value
        function = {"name": TOOL_NAME, "arguments": arguments}
        return {"id": id or IDS[number], "type": "function", "function": function}

    def calls(self, *numbers: int) -> Message:
        """A message of calls alone."""
        calls = [self.call(number) for number in numbers]
        return {"role": "assistant", **CONTENTS[self.content], "tool_calls": calls}

    def result(self, number: int, id: str | None = None) -> Message:
        """The result of a call."""
        content = {"content": RESULTS[number], "name": TOOL_NAME}
        return {"role": "tool", "tool_call_id": id or IDS[number], **content}

    def shown(self, probes: _Probes) -> bool:
        """Whether a call with its result is shown."""
        return probes.show([_user(ASKED), self.calls(0), self.result(0)], VALUES[0])


def _shown_form(probes: _Probes) -> _CallForm | None:
    """The usual form of calls that the template shows."""
    forms = (_CallForm(texts, content) for content in CONTENTS for texts in (False, True))
    return next((form for form in forms if form.shown(probes)), None)


def _calls(probes: _Probes, form: _CallForm) -> dict[str, Any]:
    """How calls and their results are shown that have this form, and in which others."""
    contents = tuple(
        content for content in CONTENTS if _CallForm(form.texts, content).shown(probes)
    )
    texts = form.texts or any(_CallForm(True, content).shown(probes) for content in contents)
    first = [_user(ASKED), form.calls(0)]
    members: dict[str, Any] = {
        "objects": not form.texts and not (texts and _as_python(probes, form)),
        "texts": texts,
        "contents": contents,
        "beside_calls": _beside(probes, form),
        "several_calls": _several(probes, form),
    }
    result = form.result(0)
    nameless = {name: value for name, value in result.items() if name != "name"}
    if probes.show([*first, result], RESULTS[0]):
        members["names_results"] = not probes.show([*first, nameless], RESULTS[0])
    call = form.calls(0) | {"tool_calls": [form.call(0, LONG_ID)]}
    members["any_ids"] = probes.show([_user(ASKED), call, form.result(0, LONG_ID)], VALUES[0])
    joined = result | {"content": f"{RESULTS[0]}\n\n{ASKED_THEN}"}
    if not probes.show([*first, result, _user(ASKED_THEN)], RESULTS[0], ASKED_THEN):
        shown = probes.show([*first, joined], RESULTS[0], ASKED_THEN)
        members["user_after_result"] = not shown
    if members["objects"]:
        members["any_values"] = _any_values(probes, form)
    return members


def _any_values(probes: _Probes, form: _CallForm) -> bool:
    """Whether numbers and lists are shown in arguments, or not even as text."""
    values = {ARGUMENT: NUMBERS[0], "probe_list": [NUMBERS[1]]}
    shown = []
    for arguments in (values, {name: text_of(value) for name, value in values.items()}):
        call = form.call(0) | {"function": {"name": TOOL_NAME, "arguments": arguments}}
        message = form.calls(0) | {"tool_calls": [call]}
        shown.append(probes.show([_user(ASKED), message, form.result(0)], *map(str, NUMBERS)))
    return shown[0] or not shown[1]


def _as_python(probes: _Probes, form: _CallForm) -> bool:
    """Whether an object is shown as Python writes it: then the template means text."""
    text = probes.text([_user(ASKED), form.calls(0), form.result(0)])
    return repr({ARGUMENT: VALUES[0]}) in text


def _beside(probes: _Probes, form: _CallForm) -> str:
    """How the text of a message with calls is shown."""
    together = [_user(ASKED), form.calls(0) | {"content": SAID}, form.result(0)]
    if probes.show(together, SAID, VALUES[0]):
        return "together"
    apart = [_user(ASKED), _assistant(SAID), form.calls(0), form.result(0)]
    ends: tuple[list[Message], ...] = ([], [_assistant("probedone"), _user(ASKED_THEN)])
    if all(probes.show([*apart, *end], SAID, VALUES[0]) for end in ends):
        return "apart"
    if probes.show(together, VALUES[0]):
        return "together"
    return "dropped"


def _several(probes: _Probes, form: _CallForm) -> bool:
    """Whether several calls of a message are shown, or not even one after another."""
    results = [form.result(0), form.result(1)]
    if probes.show([_user(ASKED), form.calls(0, 1), *results], *VALUES):
        return True
    split = [form.calls(0), results[0], form.calls(1), results[1]]
    return not probes.show([_user(ASKED), *split], *VALUES)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _tool(name: str, description: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "parameters": parameters}
    if description is not None:
        function["description"] = description
    return {"type": "function", "function": function}
