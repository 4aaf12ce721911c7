"""What a grammar must produce for one tool call, so that its parser reads exactly that call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from jaxllm.grammar.pieces import FreeText, Json, Literal, Maybe, OneOf, Piece, Pieces
from jaxllm.server.parsing.schema import Schema, types


class Section(msgspec.Struct, frozen=True):
    """What surrounds all calls of an output: begin, call, between, call, …, end."""

    begin: str = ""
    between: str = ""
    end: str = ""


def raw_value(schema: Any, root: Any, until: str) -> Pieces:
    """A value in a format that writes strings without quotes."""
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return (OneOf(tuple(values)),)
    kinds = types(schema, root)
    return (
        (FreeText(until),) if not kinds or "string" in kinds else (with_definitions(schema, root),)
    )


def with_definitions(schema: Any, root: Any) -> Json:
    """JSON by a part of a schema, which may refer to the definitions of the whole."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return Json({**schema, **shared} if isinstance(schema, Mapping) else schema)


def listed(items: Mapping[str, Pieces], root: Schema, comma: str) -> Pieces:
    """Arguments by name: first those that the schema requires, so that commas are right. Without
    any, each optional one has its comma behind it, which parsers allow."""
    required = [name for name in items if name in (root.get("required") or ())]
    pieces: list[Piece] = []
    for name in required:
        pieces += [Literal(comma)] * bool(pieces) + list(items[name])
    for name in items:
        if name not in required:
            with_comma = (
                (Literal(comma), *items[name]) if required else (*items[name], Literal(comma))
            )
            pieces.append(Maybe(with_comma))
    return tuple(pieces)
