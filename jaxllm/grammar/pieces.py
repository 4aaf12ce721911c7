"""Outputs that are put together of pieces in order: fixed text, JSON, free text, choices.
Imports no jax and no llguidance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from jaxllm.grammar.structure import WHITESPACE, checked_schema


class Literal(msgspec.Struct, frozen=True, tag=True):
    """This text, special tokens included."""

    text: str


class Json(msgspec.Struct, frozen=True, tag=True):
    """JSON that follows a schema."""

    schema: Any


class FreeText(msgspec.Struct, frozen=True, tag=True):
    """Any text without `until`, with which the literal that follows begins. With "", any text to
    the end of the output."""

    until: str


class OneOf(msgspec.Struct, frozen=True, tag=True):
    """One of these texts."""

    texts: tuple[str, ...]


class Maybe(msgspec.Struct, frozen=True, tag=True):
    """These pieces or nothing."""

    pieces: tuple[Piece, ...]


class Repeated(msgspec.Struct, frozen=True, tag=True):
    """These pieces any number of times, or not at all."""

    pieces: tuple[Piece, ...]


class Either(msgspec.Struct, frozen=True, tag=True):
    """The pieces of one of these."""

    options: tuple[tuple[Piece, ...], ...]


class Nested(msgspec.Struct, frozen=True, tag=True):
    """The output of another structure.

    Attributes:
        job: the compiler's job for it (`Structured.job`).
    """

    job: dict[str, Any]


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """What a text is. Patterns are those of JSON schemas: they are found somewhere in it.

    Attributes:
        texts: it is one of these; None where it may be another.
        patterns: each is found in it.
        absent: none of these patterns is found in it.
        formats: it has each of these formats of JSON schemas.
        least: characters.
        most: characters; None for any number.
        other_than: it is none of these.
        whole: a regex of the whole text, as Lark has it; "" allows all.
    """

    texts: tuple[str, ...] | None = None
    patterns: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    other_than: tuple[str, ...] = ()
    whole: str = ""


class RawText(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Text without quotes that follows one of some rules, between two fixed texts.

    Attributes:
        begin: stands before it.
        rules: it follows one of them.
        without: it holds none of these.
        end: stands behind it.
    """

    begin: str = ""
    rules: tuple[Rule, ...]
    without: tuple[str, ...] = ()
    end: str = ""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How a format writes the arguments of a call without JSON around them: before_key, the key,
    and a value between the two of `text` or of `json`.

    Attributes:
        before_key: begins each argument.
        text: around values that are texts, which have no quotes; None where they have.
        json: around values that are JSON.
        comma: between arguments. One more may follow the last.
        key: a regex of the keys that can be written.
        new_key: a regex of keys that no schema names, as Lark has it, all of which can be written.
        ends_key: no key holds these.
        ends_text: no text without quotes holds these.
    """

    before_key: str = ""
    text: tuple[str, str] | None = None
    json: tuple[str, str]
    comma: str = ""
    key: str
    new_key: str
    ends_key: tuple[str, ...] = ()
    ends_text: tuple[str, ...] = ()


class Arguments(msgspec.Struct, frozen=True, tag=True):
    """The arguments of a call in a layout: an object that follows a schema."""

    schema: Any
    layout: Layout


Piece = Literal | Json | FreeText | OneOf | Maybe | Repeated | Either | Nested | RawText | Arguments
Pieces = tuple[Piece, ...]


class Structured(Protocol):
    """A structure that an output must have."""

    @property
    def constraint(self) -> str:
        """Its name in messages."""

    def job(self) -> dict[str, Any]:
        """The compiler's job. Raises StructureError on faults that show without compiling."""


@dataclass(frozen=True)
class Composition:
    """The structure of outputs that consist of these pieces."""

    constraint: str
    pieces: Pieces

    def job(self) -> dict[str, Any]:
        """See `Structured`."""
        for schema in schemas(self.pieces):
            checked_schema("a schema", schema)
        pieces = msgspec.to_builtins(self.pieces)
        return {"kind": "pieces", "value": pieces, "whitespace": WHITESPACE}


def schemas(pieces: Pieces) -> Iterator[Any]:
    """All schemas in pieces."""
    for piece in pieces:
        match piece:
            case Json(schema) | Arguments(schema):
                yield schema
            case Maybe(inside) | Repeated(inside):
                yield from schemas(inside)
            case Either(options):
                for option in options:
                    yield from schemas(option)


def read_pieces(value: Any) -> Pieces:
    """Pieces from a job."""
    return msgspec.convert(value, Pieces)
