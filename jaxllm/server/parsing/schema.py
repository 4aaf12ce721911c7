"""Types of arguments, for formats that write them without quotes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jaxllm.grammar.meaning import Meaning
from jaxllm.server.parsing.values import as_json, encode_string

type Schema = Mapping[str, Any]
type Tools = Mapping[str, Schema]  # schemas of the arguments, by name

_FIRST_CHARACTERS = {
    "null": "n",
    "boolean": "tf",
    "integer": "-0123456789",
    "number": "-0123456789",
    "object": "{",
    "array": "[",
}


class _Same:
    """A schema as itself, not as what it is equal to."""

    def __init__(self, schema: Any):
        self.schema = schema

    def __eq__(self, value: object) -> bool:
        return isinstance(value, _Same) and value.schema is self.schema

    def __hash__(self) -> int:
        return id(self.schema)


@functools.lru_cache(maxsize=32)  # few, for the schemas of ended requests stay with them
def _known_meaning(schema: _Same, root: _Same) -> Meaning:
    return Meaning(schema.schema, root.schema)


def _meaning(schema: Any, root: Any) -> Meaning:
    """What a schema inside `root` means. It is kept for a while, since each value asks for it and a
    client's schema may take long."""
    return _known_meaning(_Same(schema), _Same(root))


def properties(schema: Any, root: Any = None) -> Mapping[str, Any]:
    """Schemas of the properties that an object declares or requires, by name. `schema` stands
    inside `root`, or is the root itself."""
    return _meaning(schema, schema if root is None else root).properties


def property_of(schema: Any, name: str, root: Any) -> Any:
    """The schema of an object's property, also of one that is not declared."""
    return _meaning(schema, root).member(name)


def items_of(schema: Any, root: Any) -> Any:
    """The schema of an array's items."""
    return _meaning(schema, root).items


def types(schema: Any, root: Any) -> frozenset[str]:
    """Types that a schema inside `root` allows; empty if it does not say."""
    meaning = _meaning(schema, root)
    if meaning.free:
        return frozenset()
    return meaning.types


def is_string(schema: Any, root: Any) -> bool:
    """Whether the text of a value is the value, whatever it is."""
    meaning = _meaning(schema, root)
    return meaning.types <= {"string"} or (meaning.any_text and "null" not in meaning.types)


def typed(text: str, schema: Any, root: Any) -> str:
    """The text of a value as JSON.

    Where a schema allows any text, the text wins, but for `null` where that is allowed, too. Where
    it allows some texts, such as those of an enum, these win. Otherwise a text becomes a value of
    a type that is allowed, if it is one. Where a schema says nothing, whole objects and lists
    become values. All else stays text.
    """
    meaning = _meaning(schema, root)
    if text in meaning.texts:
        return encode_string(text)
    if meaning.any_text:
        if text == "null" and "null" in meaning.types:
            return "null"
        return encode_string(text)
    if meaning.free:
        types = frozenset(("object", "array"))
    else:
        types = meaning.types - {"string"}
    written = None
    if types:
        written = as_json(text) or as_json(text, python=True)
    if written is not None:
        written = written.strip()
        if any(written[0] in _FIRST_CHARACTERS[name] for name in types & _FIRST_CHARACTERS.keys()):
            return written
    return encode_string(text)
