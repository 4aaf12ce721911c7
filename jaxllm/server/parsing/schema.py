"""Types of arguments, for formats that write them without quotes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.server.parsing.values import as_json, encode_string

type Schema = Mapping[str, Any]
type Tools = Mapping[str, Schema]  # schemas of the arguments, by name

MAX_DEPTH = 8  # of anyOf inside anyOf

_FIRST_CHARACTERS = {
    "null": "n",
    "boolean": "tf",
    "integer": "-0123456789",
    "number": "-0123456789",
    "object": "{",
    "array": "[",
}
_TYPES_OF_VALUES = {str: "string", bool: "boolean", int: "integer", float: "number"} | {
    type(None): "null",
    list: "array",
    dict: "object",
}


def properties(schema: Any) -> Mapping[str, Any]:
    """Schemas of an object's properties; empty when the schema is not as it should be."""
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def types(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """Types that a schema inside `root` allows; empty if it does not say."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return frozenset()
    said = schema.get("type")
    if isinstance(said, str):
        return frozenset((said,))
    if isinstance(said, list):
        return frozenset(name for name in said if isinstance(name, str))
    if isinstance(schema.get("$ref"), str):
        return types(_referred(schema["$ref"], root), root, depth + 1)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_TYPES_OF_VALUES.get(type(value), "string") for value in values)
    for word in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(word)
        if isinstance(choices, list):
            return frozenset().union(*(types(choice, root, depth + 1) for choice in choices))
    return frozenset()


def _referred(reference: str, root: Any) -> Any:
    """The schema that a local reference such as #/$defs/Place means, or None."""
    if not reference.startswith("#/"):
        return None
    for key in reference[2:].split("/"):
        root = root.get(key) if isinstance(root, Mapping) else None
    return root


def is_string(schema: Any, root: Any) -> bool:
    """Whether the text of a value is the value. What has no type is a string too."""
    return types(schema, root) <= {"string"}


def typed(text: str, schema: Any, root: Any) -> str:
    """The text of a value as JSON: of a type that the schema allows if it can be, else a string."""
    allowed = types(schema, root)
    if allowed - {"string"}:
        written = as_json(text) or as_json(text, python=True)
        if written is not None:
            written = written.strip()
            if any(written[0] in _FIRST_CHARACTERS.get(name, "") for name in allowed):
                return written
    return encode_string(text)
