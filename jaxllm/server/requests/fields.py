"""Strict reading of JSON request bodies: exact types (true is no integer, "5" is no number, 8.0 is
one), and null is the same as absent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from jaxllm.grammar.structure import StructureError, check_size
from jaxllm.sampling.values import EXACT_FLOAT
from jaxllm.server.errors import bad_request, describe, sanitize

_KINDS = {
    bool: "true or false",
    int: "an integer",
    str: "a string",
    dict: "an object",
    list: "a list",
}


def read_json(text: bytes) -> Any:
    """A body, or a part of one, as JSON. Raises ApiError(400)."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise bad_request(
            f"the body is not valid JSON: {sanitize(str(error))}", code="invalid_json"
        ) from None


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError(400)."""
    value = read_json(body)
    if not isinstance(value, dict):
        raise bad_request(
            f"the body must be a JSON object, got {describe(value)}", code="invalid_json"
        )
    return value


def check_json(name: str, value: Any, max_chars: int) -> None:
    """Raises ApiError(400) on JSON that is too deep or too large."""
    try:
        check_size(name, value, max_chars)
    except StructureError as error:
        raise bad_request(str(error), name) from None


def read_field[T](body: dict[str, Any], name: str, expected: type[T], default: T) -> T:
    """`body[name]`, which must be of type `expected`; absent and null give the default."""
    value = body.get(name)
    if value is None:
        return default
    if expected is int:
        value = whole(value)
    if type(value) is not expected:
        raise bad_request(f"{name} must be {_KINDS[expected]}, got {describe(value)}", name)
    return value


def read_optional[T](body: dict[str, Any], name: str, expected: type[T]) -> T | None:
    """Like `read_field`, with None for absent."""
    if body.get(name) is None:
        return None
    return read_field(body, name, expected, expected())


def is_one_of(value: Any, allowed: Iterable[Any]) -> bool:
    """Membership that tells true from 1; 1.0 counts as 1."""
    value = whole(value)
    return any(type(value) is type(x) and value == x for x in allowed)


def whole(value: Any) -> Any:
    """`8.0` as the integer 8, also in a list; other values unchanged. Larger floats may be rounded
    integers."""
    if type(value) is list and float in set(map(type, value)):
        return [whole(item) for item in value]
    if type(value) is float and value.is_integer() and abs(value) <= EXACT_FLOAT:
        return int(value)
    return value
