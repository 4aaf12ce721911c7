"""Arguments of a call that was cut short, as an object."""

from __future__ import annotations

import re
from typing import Any

import orjson

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(")?|[{}\[\],]', re.DOTALL)
_CLOSERS = {"{": "}", "[": "]"}


def read_arguments(text: str) -> dict[str, Any]:
    """The object that `text` is. Of the beginning of one, the members that are whole; {} where
    there is none."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = _whole_members(text)
    return value if isinstance(value, dict) else {}


def _whole_members(text: str) -> Any:
    """The longest beginning of `text` that ends before a comma, or after a bracket, and is JSON
    once it is closed."""
    stack: list[str] = []
    end, closers = 0, ""
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark[0] == '"':
            if token[1] is None:  # the text ends within a string
                break
            continue
        if mark in _CLOSERS:
            stack.append(_CLOSERS[mark])
        elif stack and mark == stack[-1]:
            stack.pop()
        end = token.start() if mark == "," else token.end()
        closers = "".join(reversed(stack))
    try:
        return orjson.loads(text[:end] + closers)
    except orjson.JSONDecodeError:
        return None
