"""What a chat template shows of a conversation, as its probes found it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from jaxllm.chat_template import Template

type ContentForm = Literal["empty", "absent", "null"]
type TraitsByName = dict[str, TemplateTraits]

# Names of the templates that transformers chooses among
WITH_TOOLS = "tool_use"
WITHOUT_TOOLS = "default"
ONLY = ""  # the name of a template that has none
# Contents of a message by their forms
CONTENTS: dict[ContentForm, dict[str, Any]] = {
    "empty": {"content": ""},
    "absent": {},
    "null": {"content": None},
}
EMPTY_SCHEMA: dict[str, Any] = {"type": "object", "properties": {}, "required": []}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """What one template shows. The defaults leave every history as it is.

    Attributes:
        calls: whether calls of tools are shown at all.
        objects: whether a call is shown whose arguments are an object.
        texts: whether a call is shown whose arguments are text.
        any_values: whether members of such an object may be other than text.
        contents: contents of a message of calls alone with which these are shown.
        beside_calls: how text and calls of one answer are shown: in one message, in a message each,
            or the calls alone.
        several_calls: whether a message may have several calls.
        any_ids: whether ids of calls may have any form; else nine letters and digits.
        names_results: whether the result of a call is shown only beside the name of its tool.
        bare_tools: whether a tool without description and parameters is shown.
        system: whether a system message is shown that comes first.
        several_system: whether several system messages that come first are all shown.
        late_system: whether system messages behind others are shown.
        any_turns: whether neighbours of one role are shown.
        user_after_result: whether a turn of the user is shown that follows the result of a call.
        user_after_calls: whether one is shown that follows calls which have no result.
        results_alone: whether results are shown that no message of calls comes before.
        empty_answers: whether an answer may have neither text nor calls.
        any_opening: whether conversations are shown that do not begin with the user.
        names_in_ids: whether the name of a called tool is shown only as a part of the call's id.
        fault: why nothing could be found out; then the other members are the defaults.
    """

    calls: bool = True
    objects: bool = True
    texts: bool = True
    any_values: bool = True
    contents: tuple[ContentForm, ...] = ("empty", "absent", "null")
    beside_calls: Literal["together", "apart", "dropped"] = "together"
    several_calls: bool = True
    any_ids: bool = True
    names_results: bool = False
    bare_tools: bool = True
    system: bool = True
    several_system: bool = True
    late_system: bool = True
    any_turns: bool = True
    user_after_result: bool = True
    user_after_calls: bool = True
    results_alone: bool = True
    empty_answers: bool = True
    any_opening: bool = True
    names_in_ids: bool = False
    fault: str | None = None

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> TemplateTraits:
        """The traits that `as_json` wrote."""
        return cls(**(members | {"contents": tuple(members["contents"])}))

    def as_json(self) -> dict[str, Any]:
        """The members as JSON takes them."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Names and values for people to read."""
        if self.fault is not None:
            return [("fault", f"{self.fault}; histories stay as they are")]
        if not self.calls:
            return [*self._system_rows(), *self._turn_rows(), NO_CALLS]
        return [*self._system_rows(), *self._turn_rows(), *self._call_rows()]

    def _system_rows(self) -> list[tuple[str, str]]:
        if not self.system:
            late = "none is shown; put into the user's next turn"
        elif self.late_system:
            late = "shown"
        else:
            late = "put into the user's next turn"
        turns = "user and assistant in turn; neighbours joined"
        if self.any_turns:
            turns = "any order"
        return [("late system messages", late), ("turns", turns)]

    def _turn_rows(self) -> list[tuple[str, str]]:
        rows = []
        if not self.any_opening:
            rows.append(("openings without the user", "get an empty turn of the user in front"))
        if not self.empty_answers:
            rows.append(("answers without text and calls", "left out"))
        if not self.results_alone:
            rows.append(("results without a call", "put into a turn of the user"))
        return rows

    def _call_rows(self) -> list[tuple[str, str]]:
        forms = {(True, True): "objects or text", (True, False): "objects", (False, True): "text"}
        words = {"empty": '""', "absent": "none", "null": "null"}
        beside = {
            "together": "in one message",
            "apart": "in a message of its own",
            "dropped": "left out",
        }
        calls = "one"
        if self.several_calls:
            calls = "several"
        rows = [
            ("arguments of calls", forms[self.objects, self.texts]),
            ("content beside calls alone", " or ".join(words[form] for form in self.contents)),
            ("text before calls", beside[self.beside_calls]),
            ("calls of a message", calls),
        ]
        if not self.any_values:
            rows.append(("values of arguments", "made into text"))
        if not self.any_ids:
            rows.append(("ids of calls", "made into nine letters and digits"))
        if self.names_results:
            rows.append(("results of calls", "need the tool's name"))
        if not self.bare_tools:
            rows.append(("tools without parameters", "get an empty schema and description"))
        if not self.user_after_result:
            rows.append(("user's turn behind a result", "joined with the result"))
        if not self.user_after_calls:
            rows.append(("user's turn behind calls without results", "takes the result's place"))
        if self.names_in_ids:
            rows.append(("ids of calls", "made of the tool's name and a number"))
        return rows


AS_GIVEN = TemplateTraits()
NO_CALLS = ("calls of tools", "not shown")


def id_with_name(name: str, number: int) -> str:
    """The id of a call as Kimi K2 writes it: the tool, and how many calls came before."""
    return f"functions.{name}:{number}"


def named_templates(template: Template) -> dict[str, str]:
    """All templates by their names, `ONLY` for one without."""
    if isinstance(template, dict):
        return template
    if template is None:
        return {}
    return {ONLY: template}


def name_for(template: Template, tools: Sequence[Any] | None) -> str:
    """The name of the template that transformers chooses for a conversation with these tools."""
    if not isinstance(template, dict):
        return ONLY
    if tools is not None and WITH_TOOLS in template:
        return WITH_TOOLS
    return WITHOUT_TOOLS


def gets_tools(template: Template, name: str) -> bool:
    """Whether transformers gives tools to the template of a name."""
    return not (name == WITHOUT_TOOLS and WITH_TOOLS in named_templates(template))


def table_of(traits: TraitsByName) -> list[tuple[str, str]]:
    """The rows of all templates."""
    if len(traits) == 1:
        return next(iter(traits.values())).rows()
    return [
        (f"{name}: {label}", value)
        for name, template in traits.items()
        for label, value in template.rows()
    ]
