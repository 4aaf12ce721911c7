"""Answers in JSON to a schema that the prompt gives: what a text says, under the names and in the
order of the schema."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from examples.demo_model import generate
from examples.demo_model.arithmetic import PHRASES, operands, solve
from examples.demo_model.generate import Message, Sample
from examples.demo_model.lexicon import CITIES, COLORS, JOBS
from examples.demo_model.problem import held_out, pair_held_out
from examples.demo_model.skills import values
from examples.demo_model.skills.values import Draw, one_of

Schema = dict[str, Any]


@dataclass(frozen=True)
class Field:
    """A property of records.

    Attributes:
        keys: names that a schema may give it.
        schema: its type, and its choices if they are few.
        says: the clause of a sentence that tells it, with {} for the value.
    """

    keys: tuple[str, ...]
    schema: Schema
    draw: Draw
    says: tuple[str, ...]

    def said(self, rng: random.Random, value: Any) -> str:
        """The clause of one value."""
        if isinstance(value, bool):
            return self.says[value]
        shown = " and ".join(map(str, value)) if isinstance(value, list) else str(value)
        return rng.choice(self.says).format(shown)


STRING, INTEGER, NUMBER, BOOLEAN = (
    {"type": name} for name in ("string", "integer", "number", "boolean")
)
STRINGS = {"type": "array", "items": STRING}


def enum(choices: Any) -> Schema:
    """One of a few strings."""
    return {"type": "string", "enum": list(choices)}


coin = one_of((False, True))
# (what stands first in the sentence, the other clauses)
PERSON = (
    Field(("name", "full_name", "person"), STRING, values.person, ("{}",)),
    Field(("age", "years"), INTEGER, values.number(1, 99), ("is {} years old", "is {}")),
    Field(("city", "home", "lives_in"), STRING, one_of(CITIES), ("lives in {}", "comes from {}")),
    Field(("job", "profession", "work"), STRING, one_of(JOBS), ("works as a {}", "is a {}")),
    Field(("email", "mail"), STRING, values.email, ("has the email {}", "can be reached at {}")),
    Field(("student", "is_student"), BOOLEAN, coin, ("is no student", "is a student")),
    Field(("hobbies", "likes", "interests"), STRINGS, values.words_of(1, 3), ("likes {}",)),
)
PRODUCT = (
    Field(("product", "item", "name"), STRING, values.title, ("the {}",)),
    Field(("price", "cost"), NUMBER, values.decimal, ("costs {}", "sells for {}")),
    Field(("color", "colour"), enum(COLORS[:5]), one_of(COLORS[:5]), ("is {}", "comes in {}")),
    Field(
        ("in_stock", "available"), BOOLEAN, one_of((False, True)), ("is sold out", "is in stock")
    ),
    Field(("quantity", "count", "pieces"), INTEGER, values.number(2, 500), ("has {} pieces",)),
    Field(("code", "id", "sku"), STRING, values.code, ("has the code {}", "has the number {}")),
    Field(("size",), enum(values.SIZES), one_of(values.SIZES), ("is of {} size",)),
)
EVENT = (
    Field(("title", "event", "name"), STRING, values.title, ("the {}",)),
    Field(("date", "day"), STRING, values.day, ("takes place on {}", "is on {}")),
    Field(("time", "start"), STRING, values.clock, ("begins at {}", "starts at {}")),
    Field(("city", "place", "location"), STRING, one_of(CITIES), ("is in {}", "happens in {}")),
    Field(("guests", "people"), INTEGER, values.number(2, 300), ("has {} guests",)),
    Field(
        ("speakers", "participants", "names"),
        STRINGS,
        lambda rng: rng.sample(values.NAMES, 2),
        ("is by {}",),
    ),
)
RECORDS = {"person": PERSON, "product": PRODUCT, "event": EVENT}


@dataclass(frozen=True)
class Record:
    """A text, the schema asked for and the value that fits both."""

    title: str
    text: str
    schema: Schema
    value: Any


def draw_fields(rng: random.Random, name: str, held: bool) -> list[tuple[Field, Any]]:
    """Fields of a record with their values, the first of them always, from one side of the
    split."""
    first, *rest = RECORDS[name]
    while True:
        fields = [first, *rng.sample(rest, rng.choice((1, 2, 2, 3, 3, 4)))]
        drawn = [(field, field.draw(rng)) for field in fields]
        if held_out("record", name, [value for _, value in drawn[:2]]) == held:
            return drawn


def sentence(rng: random.Random, drawn: list[tuple[Field, Any]]) -> str:
    """The text that tells all values."""
    begin, *clauses = (field.said(rng, value) for field, value in drawn)
    begin = begin[0].upper() + begin[1:]
    if len(clauses) > 2 and rng.random() < 0.5:
        pronoun = "It" if begin.startswith("The ") else "This person"
        return f"{begin} {clauses[0]}. {pronoun} {listed(clauses[1:])}."
    return f"{begin} {listed(clauses)}."


def listed(clauses: list[str]) -> str:
    """Clauses of one sentence."""
    return ", ".join(clauses[:-1]) + (" and " if len(clauses) > 1 else "") + clauses[-1]


def record(rng: random.Random, held: bool) -> Record:
    """One object; its properties stand in an order of their own."""
    name = rng.choice(sorted(RECORDS))
    drawn = draw_fields(rng, name, held)
    text = sentence(rng, drawn)
    entries = [(rng.choice(field.keys), dict(field.schema), value) for field, value in drawn]
    if rng.random() < 0.15:  # a property of which the text says nothing
        unused = [one for one in RECORDS[name] if all(one is not field for field, _ in drawn)]
        missing = rng.choice(unused)
        kind = missing.schema["type"]
        nullable = {"anyOf": [{"type": kind}, {"type": "null"}]}
        if kind != "array":
            nullable = rng.choice((nullable, {"type": [kind, "null"]}))
        entries.append((rng.choice(missing.keys), nullable, None))
    if rng.random() < 0.5:
        rng.shuffle(entries)
    names = [key for key, _, _ in entries]
    if len(set(names)) < len(names):
        return record(rng, held)
    return Record(name, text, *object_of(entries))


def object_of(entries: list[tuple[str, Schema, Any]]) -> tuple[Schema, dict[str, Any]]:
    """The schema and the value of an object."""
    properties = {key: schema for key, schema, _ in entries}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return schema, {key: value for key, _, value in entries}


def several(rng: random.Random, held: bool) -> Record:
    """An object with a list of objects."""
    name = rng.choice(sorted(RECORDS))
    first, second = RECORDS[name][0], rng.choice(RECORDS[name][1:])
    rows = []
    while len(rows) < rng.choice((2, 2, 3)):
        row = [first.draw(rng), second.draw(rng)]
        if held_out("record", name, row) == held:
            rows.append(row)
    keys = rng.choice(first.keys), rng.choice(second.keys)
    text = " ".join(sentence(rng, list(zip((first, second), row, strict=True))) for row in rows)
    entries = [(keys[0], first.schema, None), (keys[1], second.schema, None)]
    items, _ = object_of(entries)
    key = rng.choice((f"{name}s", "items", "list", "results"))
    schema, _ = object_of([(key, {"type": "array", "items": items}, None)])
    return Record(name, text, schema, {key: [dict(zip(keys, row, strict=True)) for row in rows]})


def nested(rng: random.Random, held: bool) -> Record:
    """An object within an object."""
    inner = record(rng, held)
    key, code = rng.choice((inner.title, "data", "subject")), values.code(rng)
    outer = rng.choice(("id", "case", "number"))
    entries = [(outer, STRING, code), (key, inner.schema, inner.value)]
    schema, value = object_of(entries)
    return Record("case", f"Case {code}. {inner.text}", schema, value)


def calculation(rng: random.Random, held: bool) -> Record:
    """A sum or a difference as an object."""
    while True:
        operation = rng.choice(("add", "subtract"))
        a, b = operands(rng, operation)
        if pair_held_out(operation, a, b) == held:
            break
    question = rng.choice(PHRASES[operation][:12]).format(a=a, b=b)
    names = ("result", "answer", "value", "sum" if operation == "add" else "difference")
    entries = [(rng.choice(names), INTEGER, solve(operation, a, b))]
    if rng.random() < 0.7:
        pair = rng.choice((("a", "b"), ("x", "y"), ("left", "right")))
        entries = [(pair[0], INTEGER, a), (pair[1], INTEGER, b), *entries]
    if rng.random() < 0.4:
        entries.insert(0, ("operation", enum(("add", "subtract", "multiply")), operation))
    if rng.random() < 0.25:
        entries.insert(0, (rng.choice(("question", "problem")), STRING, question))
    schema, value = object_of(entries)
    return Record("calculation", question, schema, value)


Maker = Callable[[random.Random, bool], Record]
MAKERS: dict[str, tuple[Maker, int]] = {
    "one object": (record, 60),
    "a list of objects": (several, 14),
    "an object within an object": (nested, 12),
    "a calculation": (calculation, 14),
}


def dressed(rng: random.Random, made: Record) -> str:
    """The schema as clients write it: bare, with titles, closed, indented."""
    schema = json.loads(json.dumps(made.schema))
    if rng.random() < 0.35:
        for key, part in schema["properties"].items():
            part["title"] = key.replace("_", " ").title()
        schema["title"] = made.title.capitalize()
    if rng.random() < 0.4:
        schema["additionalProperties"] = False
    if rng.random() < 0.3:  # as pydantic orders them
        schema = dict(sorted(schema.items()))
    return json.dumps(schema, indent=2 if rng.random() < 0.1 else None)


REQUESTS = (
    "Answer in JSON that follows this schema: {s}\n\n{t}",
    "{t}\n\nAnswer in JSON with this schema:\n{s}",
    "Extract the data as JSON. Schema: {s}\nText: {t}",
    "{t} Reply with a JSON object that matches this JSON schema: {s}",
    "JSON schema:\n{s}\n\nText:\n{t}",
)
RULES = (
    "Answer only with JSON that follows this schema:\n{s}",
    "You extract data. Reply with JSON for this schema: {s}",
    "Understand the content and provide the parsed objects in json that match the following "
    "json_schema:\n{s}\nMake sure to return an instance of the JSON, not the schema itself.",
)


def conversation(rng: random.Random, made: Record) -> list[Message]:
    """The messages of a record: the schema stands in the request or in the system message."""
    schema = dressed(rng, made)
    keys = made.value.keys()
    reply = {
        "role": "assistant",
        "content": json.dumps(made.value),
        "reasoning_content": f"The keys are {', '.join(keys)}.",
    }
    if rng.random() < 0.35:
        system = {"role": "system", "content": rng.choice(RULES).format(s=schema)}
        return [system, {"role": "user", "content": made.text}, reply]
    question = rng.choice(REQUESTS).format(s=schema, t=made.text)
    return [*generate.system(rng), {"role": "user", "content": question}, reply]


def finish(rng: random.Random, made: Record, thinking: bool) -> Sample:
    """The conversation, with or without its thought."""
    messages = conversation(rng, made)
    if not thinking:
        messages[-1].pop("reasoning_content")
    return Sample(messages, variables={"enable_thinking": thinking})


def written_down(rng: random.Random, maker: Maker) -> Sample:
    """One conversation of a kind, with its thought or without."""
    return finish(rng, maker(rng, False), rng.random() < 0.3)


def sample(rng: random.Random) -> Sample:
    """One conversation of the training text."""
    (name,) = rng.choices(list(MAKERS), [share for _, share in MAKERS.values()])
    return written_down(rng, MAKERS[name][0])
