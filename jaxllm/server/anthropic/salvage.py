"""Arguments of a call that was cut short, as an object."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import orjson

MAX_DEPTH = 200  # objects and lists inside each other; orjson writes 254, those around included

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(")?|[{}\[\],]', re.DOTALL)
_CLOSERS = {"{": "}", "[": "]"}


def read_arguments(text: str) -> dict[str, Any]:
    """The object that `text` is. Of the beginning of one, the members that are whole; {} where
    there is none, and for one that nests more deeply than JSON of a reply can."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = _whole_members(text)
    return value if isinstance(value, dict) and _is_shallow(value) else {}


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        members = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for item in chain(*members) if isinstance(item, (dict, list))]
        if not level:
            return True
    return False


def _whole_members(text: str) -> Any:
    """The longest beginning of `text` that ends before a comma, or after a bracket, and is JSON
    once it is closed."""
    stack: list[str] = []
    end = 0
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
    try:
        return orjson.loads(text[:end] + "".join(reversed(stack)))
    except orjson.JSONDecodeError:
        return None
