"""Arguments of a call that was cut short, as an object."""

from __future__ import annotations

from typing import Any

import orjson

from jaxllm.templates.arguments import closed_beginnings, is_shallow


def read_arguments(text: str) -> dict[str, Any]:
    """The object that `text` is. Of the beginning of one, the members that are whole; {} where
    there is none, and for one that nests more deeply than JSON of a reply can."""
    for beginning in closed_beginnings(text):
        try:
            value = orjson.loads(beginning)
        except orjson.JSONDecodeError:
            continue
        if isinstance(value, dict) and is_shallow(value):
            return value
        return {}
    return {}
