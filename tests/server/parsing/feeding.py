"""Feeding parsers, and reading what they made."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from jaxllm.server.parsing.parts import (
    Part,
    Reasoning,
    Text,
    ToolArguments,
    ToolEnd,
    ToolStart,
    merged,
)


def fed(parser: Any, pieces: Iterable[str]) -> list[Part]:
    """All parts of a text that comes in pieces."""
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.feed(piece)
    return merged(parts + parser.finish())


def cut(text: str, positions: Iterable[int]) -> list[str]:
    """A text cut at positions."""
    stops = [0, *sorted({at for at in positions if 0 < at < len(text)}), len(text)]
    return [text[a:b] for a, b in pairwise(stops)]


def reply(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


def reasoning(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Reasoning))


def calls(parts: Iterable[Part]) -> list[tuple[str, str]]:
    """Names and arguments; the order of a call's parts is checked."""
    found: list[list[str]] = []
    in_call = False
    for part in parts:
        if isinstance(part, ToolStart):
            assert not in_call and part.index == len(found)
            found.append([part.name, ""])
            in_call = True
        elif isinstance(part, ToolArguments):
            assert in_call and part.index == len(found) - 1
            found[-1][1] += part.text
        elif isinstance(part, ToolEnd):
            assert in_call and part.index == len(found) - 1
            if part.complete:
                assert isinstance(json.loads(found[-1][1]), dict)
            in_call = False
        else:
            assert not in_call
    assert not in_call
    return [(name, arguments) for name, arguments in found]


def meant(parts: Iterable[Part]) -> list[tuple[str, Any]]:
    """Names and arguments as values."""
    return [(name, json.loads(arguments)) for name, arguments in calls(parts)]
