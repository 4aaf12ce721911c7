"""A tool as one conversation offers it, and a call of it with its question, result and reply."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from examples.demo_model.lexicon import OBJECTS
from examples.demo_model.problem import held_out, vary
from examples.demo_model.skills import values
from examples.demo_model.skills.kinds import Kind, Parameter, drawn
from examples.demo_model.skills.tools import KINDS

VERBS = tuple(
    "check open close move wash paint fix count find show start stop lock clean test".split()
)
# Arguments of invented tools
SPARE = (
    Parameter(("name", "id", "key"), "string", values.invented),
    Parameter(("code", "number", "ref"), "string", values.code),
    Parameter(("level", "count", "speed"), "integer", values.number(1, 999)),
    Parameter(("weight", "rate", "factor"), "number", values.decimal),
    Parameter(("note", "text", "reason"), "string", values.title),
    Parameter(("mode", "kind", "style"), "string", values.thing),
)


@dataclass(frozen=True)
class Tool:
    """One tool of a conversation.

    Attributes:
        keys: the name of each parameter of the kind; None for an optional one that it lacks.
    """

    kind: Kind
    name: str
    keys: tuple[str | None, ...]
    definition: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A call that a question asks for.

    Attributes:
        subject: the first argument, as questions say it.
        result: as the tool gives it.
        reply: what the answer says of the result.
    """

    tool: Tool
    arguments: dict[str, Any]
    question: str
    subject: str
    result: str
    reply: str


def invented_kind(rng: random.Random, held: bool) -> Kind:
    """A kind of tools that nobody has seen before: a verb, a thing and one to three arguments. Its
    name decides the split."""
    while True:
        verb, thing = rng.choice(VERBS), rng.choice(OBJECTS)
        if held_out("tool name", verb, thing) == held:
            break
    parameters = tuple(rng.sample(SPARE, rng.choice((1, 1, 2, 2, 3))))
    # The question names the arguments, whose names are therefore not drawn again
    parameters = tuple(Parameter((rng.choice(one.keys),), one.type, one.draw) for one in parameters)
    said = " and ".join(f"{one.keys[0]} {{{i}}}" for i, one in enumerate(parameters))
    return Kind(
        names=(f"{verb}_{thing}", f"{thing}_{verb}", f"{verb}{thing.capitalize()}"),
        abouts=(f"{verb.capitalize()} the {thing}.", f"Tool to {verb} a {thing}"),
        parameters=parameters,
        asks=(
            f"{verb.capitalize()} the {thing} with {said}.",
            f"Please {verb} the {thing}, {said}.",
            f"Can you {verb} the {thing} with {said}?",
        ),
        result=drawn(values.one_of(OBJECTS, ("done", "ready", "broken", "42", "7"))),
        label="result",
        reply=f"The {thing} says {{r}}.",
        split=lambda arguments: held,
    )


def make_tool(rng: random.Random, kind: Kind) -> Tool:
    """A tool of a kind, under one of its names, with or without its optional arguments."""
    schemas: dict[str, dict[str, Any]] = {}
    required, keys = [], []
    hinted = rng.random() < 0.5
    for parameter in kind.parameters:
        if parameter.said and rng.random() < 0.4:
            keys.append(None)
            continue
        key = rng.choice(parameter.keys)
        keys.append(key)
        schemas[key] = {"type": parameter.type}
        if hinted and parameter.hints:
            schemas[key]["description"] = rng.choice(parameter.hints)
        if parameter.choices:
            schemas[key]["enum"] = list(parameter.choices)
        if parameter.type == "array":
            numeric = isinstance(parameter.draw(rng)[0], int)
            schemas[key]["items"] = {"type": "integer" if numeric else "string"}
        if not parameter.said:
            required.append(key)
    name = rng.choice(kind.names)
    parameters = {"type": "object", "properties": schemas, "required": required}
    about = rng.choice((*kind.abouts, "") if rng.random() < 0.3 else kind.abouts)
    function = {"name": name, "description": about, "parameters": parameters}
    return Tool(kind, name, tuple(keys), {"type": "function", "function": function})


def draw_required(rng: random.Random, kind: Kind, held: bool) -> list[Any]:
    """Required arguments from one side of the split."""
    while True:
        drawn_values = [one.draw(rng) for one in kind.parameters if not one.said]
        if kind.held_out(drawn_values) == held:
            return drawn_values


def make_job(rng: random.Random, tool: Tool, held: bool, required: list[Any] | None = None) -> Job:
    """A call of a tool, with these required arguments or drawn ones."""
    required = draw_required(rng, tool.kind, held) if required is None else required
    rest, arguments, said = list(required), {}, ""
    for parameter, key in zip(tool.kind.parameters, tool.keys, strict=True):
        if not parameter.said:
            arguments[str(key)] = rest.pop(0)
        elif key is not None and rng.random() < 0.5:
            arguments[key] = parameter.draw(rng)
            said += parameter.said.format(parameter.shown(arguments[key]))
    needed = [one for one in tool.kind.parameters if not one.said]
    shown = [one.shown(value) for one, value in zip(needed, required, strict=True)]
    result = tool.kind.result(rng, required)
    return Job(
        tool=tool,
        arguments=arguments,
        question=vary(rng, ask(rng.choice(tool.kind.asks), shown, said)),
        subject=shown[0],
        result=written(rng, tool.kind.label, result),
        reply=tool.kind.reply.format(*shown, r=result),
    )


def ask(phrase: str, shown: list[str], said: str) -> str:
    """A question with its arguments; what is `said` of optional ones stands before its end."""
    question = phrase.format(*shown)
    if said.endswith("."):
        return question.rstrip("?.") + "." + said
    end = question[-1] if question[-1] in "?." else ""
    return question.removesuffix(end) + said + end


def written(rng: random.Random, label: str, result: Any) -> str:
    """A result as tools write it: plain, or as JSON."""
    form = rng.random()
    if form < 0.6:
        return str(result)
    if form < 0.85:
        return json.dumps({label: result})
    return json.dumps({"ok": True, label: result})


def others(
    rng: random.Random, beside: Iterable[Tool], count: int, kinds: tuple[Kind, ...] = KINDS
) -> list[Tool]:
    """Up to `count` tools of other kinds and other names."""
    taken = {tool.kind.names[0] for tool in beside}
    names = {tool.name for tool in beside}
    made = []
    for kind in rng.sample(kinds, min(count, len(kinds))):
        tool = make_tool(rng, kind)
        if kind.names[0] not in taken and tool.name not in names:
            names.add(tool.name)
            made.append(tool)
    return made
