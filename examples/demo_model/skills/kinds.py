"""Kinds of tools: names, descriptions, arguments, questions, answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from examples.demo_model.problem import held_out
from examples.demo_model.skills import values
from examples.demo_model.skills.values import Draw, one_of

Results = Callable[[random.Random, list[Any]], Any]


def cells(text: str) -> tuple[str, ...]:
    """The choices of a table's cell."""
    return tuple(text.split("|"))


@dataclass(frozen=True)
class Parameter:
    """An argument of a kind of tools.

    Attributes:
        keys: names that it may have, of which a tool has one.
        type: of JSON Schema.
        choices: the only values, if they are few; the schema lists them.
        hints: descriptions; a tool has one of them, or none.
        said: what a question adds when this optional argument is given, with {} for its value.
            A required argument has none.
        words: how questions say false and true.
    """

    keys: tuple[str, ...]
    type: str
    draw: Draw
    choices: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    said: str = ""
    words: tuple[str, str] = ("no", "yes")

    def shown(self, value: Any) -> str:
        """A value as questions say it."""
        if isinstance(value, bool):
            return self.words[value]
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


@dataclass(frozen=True)
class Kind:
    """One kind of tools.

    Attributes:
        asks: questions, with {0}, {1} … for the required arguments.
        result: what the tool answers, of the arguments.
        label: the name of the result where it comes as JSON.
        reply: what is said of it, with {r} for the result.
        several: a question can name several first arguments; each then is a call.
        split: whether required arguments are held out, where their hash does not decide it.
    """

    names: tuple[str, ...]
    abouts: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    asks: tuple[str, ...]
    result: Results
    label: str
    reply: str
    several: bool = False
    split: Callable[[list[Any]], bool] | None = None

    def held_out(self, arguments: list[Any]) -> bool:
        """Whether a call with these required arguments is never trained on."""
        if self.split is not None:
            return self.split(arguments)
        return held_out("tool call", self.names[0], arguments)


def text(keys: str, draw: Draw, hints: str = "", said: str = "") -> Parameter:
    """An argument that is a string."""
    return Parameter(cells(keys), "string", draw, hints=cells(hints) if hints else (), said=said)


def choice(keys: str, choices: Any, said: str = "") -> Parameter:
    """An argument with few values."""
    return Parameter(cells(keys), "string", one_of(choices), choices=tuple(choices), said=said)


def integer(keys: str, low: int, high: int, hints: str = "", said: str = "") -> Parameter:
    """An argument that is an integer."""
    hinted = cells(hints) if hints else ()
    return Parameter(cells(keys), "integer", values.number(low, high), hints=hinted, said=said)


def kind(
    names: str, abouts: str, parameters: Any, asks: str, result: Results, label: str, reply: str
) -> Kind:
    """A row of the table. Questions with {0s} can name several first arguments."""
    return Kind(
        cells(names),
        cells(abouts),
        parameters if isinstance(parameters, tuple) else (parameters,),
        cells(asks.replace("{0s}", "{0}")),
        result,
        label,
        reply,
        several="{0s}" in asks,
    )


def drawn(draw: Draw) -> Results:
    """A result that has nothing to do with the arguments."""
    return lambda rng, arguments: draw(rng)


def always(result: str) -> Results:
    """The same result every time."""
    return lambda rng, arguments: result
