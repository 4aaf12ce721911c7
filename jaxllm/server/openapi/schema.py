"""JSON schemas of sampling options and of single fields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxllm.sampling.options import OPTIONS, default_of
from jaxllm.sampling.values import MAX_STOP_CHARS, Option

type Schema = dict[str, Any]

ANY: Schema = {}
BOOL: Schema = {"type": "boolean"}
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def array(items: Schema, **limits: int) -> Schema:
    """A list."""
    return {"type": "array", "items": items, **limits}


def one_of(values: Iterable[Any]) -> Schema:
    """One of these values."""
    return {"enum": list(values)}


def either(*schemas: Schema) -> Schema:
    """Any of these."""
    return {"anyOf": list(schemas)}


def form(required: Iterable[str] = (), /, **members: Schema) -> Schema:
    """An object with these members, and perhaps others."""
    schema: Schema = {"type": "object", "properties": members}
    needed = list(required)
    return schema | ({"required": needed} if needed else {})


def ref(name: str) -> Schema:
    """A schema among the document's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def field(schema: Schema, text: str = "", **more: Any) -> Schema:
    """A member of a body: null is the same as absent."""
    if "enum" in schema:
        nullable: Schema = {"enum": [*schema["enum"], None]}
    elif schema.keys() == {"type"} and isinstance(schema["type"], str):
        nullable = {"type": [schema["type"], "null"]}
    else:
        nullable = either(schema, NULL) if schema else schema
    return nullable | ({"description": text} if text else {}) | more


def unsupported(neutral: Iterable[Any]) -> Schema:
    """A field of a missing feature, which may hold the values that request nothing."""
    return field(one_of(neutral), "Not supported; only values that request nothing are taken.")


def option(name: str, **bounds: Any) -> Schema:
    """A sampling option by its entry of the table, with other bounds of an endpoint."""
    row = OPTIONS[name]
    default = default_of(name)
    more = {} if default is None else {"default": default}
    return field(_KINDS[row.form](row) | bounds, row.doc, **more)


def _number(number_type: str, row: Option) -> Schema:
    schema: Schema = {"type": number_type}
    if row.low is not None:
        schema["exclusiveMinimum" if row.open_low else "minimum"] = plain(row.low)
    if row.high is not None:
        schema["maximum"] = plain(row.high)
    if row.also:
        return either(schema, one_of(row.also))
    return schema


def plain(bound: float) -> float:
    """A whole bound as an integer."""
    if bound == int(bound):
        return int(bound)
    return bound


def _texts(row: Option) -> Schema:
    text = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    return array(text, maxItems=row.max_items)


def _biases(row: Option) -> Schema:
    value = _number("number", row)
    return {
        "type": "object",
        "additionalProperties": value,
        "propertyNames": {"pattern": "^[0-9]+$"},
        "maxProperties": row.max_items,
    }


_KINDS: dict[str, Any] = {
    "int": lambda row: _number("integer", row),
    "float": lambda row: _number("number", row),
    "bool": lambda row: BOOL,
    "stopping": lambda row: one_of((True, False, "never")),
    "strings": lambda row: either(
        {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}, _texts(row)
    ),
    "texts": _texts,
    "ints": lambda row: array(
        {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        maxItems=row.max_items,
        **({"minItems": row.low_items} if row.low_items else {}),
    ),
    "biases": _biases,
    "structure": lambda row: ref("StructuredOutputs"),
}
