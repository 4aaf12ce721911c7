"""What parsers make of generated text."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Text(msgspec.Struct, frozen=True, gc=False):
    """Text of the reply."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text of the reasoning."""

    text: str


class ToolStart(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins.

    Attributes:
        index: 0, 1, … within one output.
        name: the tool.
        id: as the model wrote it, or None. `Pipeline` fills it in.
    """

    index: int
    name: str
    id: str | None = None


class ToolArguments(msgspec.Struct, frozen=True, gc=False):
    """The next fragment of a call's arguments: all of them together are one JSON object."""

    index: int
    text: str


class ToolEnd(msgspec.Struct, frozen=True, gc=False):
    """A tool call ends.

    Attributes:
        complete: the arguments are a whole JSON object. False when the output was cut short or is
            malformed; the fragments then are what came before.
    """

    index: int
    complete: bool = True


TextPart = Text | Reasoning | ToolArguments
Part = TextPart | ToolStart | ToolEnd


def merged(parts: Iterable[Part]) -> list[Part]:
    """Joins neighbouring texts and neighbouring fragments of one call."""
    runs: list[list[Part]] = []
    for part in parts:
        last = None
        if runs:
            last = runs[-1][0]
        if type(part) is type(last) and (
            isinstance(part, Text | Reasoning)
            or (isinstance(part, ToolArguments) and part.index == last.index)  # type: ignore[union-attr]
        ):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_joined(run) for run in runs]


def _joined(run: list[Part]) -> Part:
    """One part with the texts of parts that differ in their texts alone."""
    if len(run) == 1:
        return run[0]
    text = "".join(part.text for part in run)  # type: ignore[union-attr]
    return msgspec.structs.replace(run[0], text=text)
