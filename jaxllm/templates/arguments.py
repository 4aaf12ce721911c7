"""Arguments of tool calls, as the text that a model wrote and as an object."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import orjson

from jaxllm.chat_template import TemplateError

MAX_DEPTH = 200  # objects and lists inside each other; orjson writes 254, those around included

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(")?|[{}\[\],]', re.DOTALL)
_CLOSERS = {"{": "}", "[": "]"}
# The escape in which a text was cut
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
# The end of a value of which nothing can be missing; of a number, digits may be
_WHOLE = re.compile(r"""(?:"|\btrue|\bfalse|\bnull)\s*\Z""").search
# Numbers that need care: JSON's text has them, a number of Python or a template may not
_LONG_NUMBER = re.compile(r"[0-9]{300}|[0-9.][eE]\+?[0-9]{3}")
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
# An escape; one of half a surrogate pair alone is the group
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def text_of(arguments: Any) -> str:
    """A value as a model would have written it."""
    return json.dumps(arguments, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def value_of(text: str, constant: Callable[[str], Any] = _refuse_constant) -> Any:
    """The value of a JSON text: integers have all their digits, the last of equal names counts, and
    numbers that are too long to be one stay text. Raises ValueError.

    `constant`: what NaN and Infinity become, which are no JSON.
    """
    if _HALF_PAIR.search(text):
        orjson.loads(text)  # raises on half of a surrogate pair, which is no text
    try:
        if _LONG_NUMBER.search(text):
            return json.loads(text, parse_int=_integer, parse_float=_float, parse_constant=constant)
        return json.loads(text, parse_constant=constant)
    except RecursionError:
        raise ValueError("the text nests too deeply") from None


def is_shallow(value: Any) -> bool:
    """Whether at most `MAX_DEPTH` objects and lists are inside each other."""
    level = [value]
    for _ in range(MAX_DEPTH):
        members = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for item in chain(*members) if isinstance(item, (dict, list))]
        if not level:
            return True
    return False


def object_of(text: str) -> dict[str, Any] | None:
    """The object that a text is; {} for an empty text, None for anything else. Raises TemplateError
    on one that nests too deeply for a template."""
    if not text.strip():
        return {}
    try:
        value = value_of(text)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    check_depth(value)
    return value


def check_depth(value: dict[str, Any]) -> None:
    """Raises TemplateError on arguments that nest too deeply for a template."""
    if not is_shallow(value):
        raise TemplateError(
            f"the arguments of a call have more than {MAX_DEPTH} objects and lists inside each "
            "other; nest it less deeply"
        )


def understood(text: str) -> dict[str, Any]:
    """What a text that is no object says of one: its beginning where the text was cut, the object
    that was encoded twice, is alone in a list, or has more text behind it, else {}. NaN becomes a
    text, and half of a surrogate pair the sign of a character that is none."""
    value = beginning_of(text, cut_texts=True)
    if isinstance(value, str):
        value = beginning_of(value, cut_texts=True)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict) and is_shallow(value):
        return value
    return {}


def beginning_of(text: str, cut_texts: bool = False) -> Any:
    """The value of the longest beginning of a JSON text that is JSON once it is closed; None where
    there is none. A value that was cut is left out, unless it is a text and `cut_texts`."""
    text = _ESCAPE.sub(lambda escape: "\\ufffd" if escape[1] else escape[0], text)
    for beginning in closed_beginnings(text, cut_texts):
        try:
            return value_of(beginning, constant=str)
        except ValueError:
            continue
    return None


def closed_beginnings(text: str, cut_texts: bool = False) -> Iterator[str]:
    """The text, then beginnings of it that are closed: the whole one where its last value is whole,
    the longest one with a text that was cut if `cut_texts`, the longest that ends before a comma or
    after a bracket, and its first value."""
    yield text
    stack: list[str] = []
    end = 0
    first = 0  # where the first value ends
    cut_text = False
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark[0] == '"':
            cut_text = token[1] is None
            if cut_text:
                break
            continue
        if mark in _CLOSERS:
            stack.append(_CLOSERS[mark])
        elif stack and mark == stack[-1]:
            stack.pop()
            first = first or (0 if stack else token.end())
        if mark == ",":
            end = token.start()
        else:
            end = token.end()
    closers = "".join(reversed(stack))
    if not cut_text and _WHOLE(text):
        yield text + closers
    if cut_text and cut_texts:
        yield f'{_CUT_ESCAPE.sub("", text)}"{closers}'
    yield text[:end] + closers
    if first:
        yield text[:first]


def _integer(digits: str) -> int | str:
    longest = sys.get_int_max_str_digits()  # 0 for no bound
    if longest and len(digits.lstrip("-")) > longest:
        return digits
    return int(digits)


def _float(digits: str) -> float | str:
    value = float(digits)
    if math.isfinite(value):
        return value
    return digits
