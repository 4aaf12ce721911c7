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


Piece = Literal | Json | FreeText | OneOf | Maybe | Repeated | Either | Nested
Pieces = tuple[Piece, ...]


class Structured(Protocol):
    """A structure that an output must have."""

    @property
    def kind(self) -> str:
        """Its name in messages."""

    def job(self) -> dict[str, Any]:
        """The compiler's job. Raises StructureError on faults that show without compiling."""


@dataclass(frozen=True)
class Composition:
    """The structure of outputs that consist of these pieces."""

    kind: str
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
            case Json(schema):
                yield schema
            case Maybe(inside) | Repeated(inside):
                yield from schemas(inside)
            case Either(options):
                for option in options:
                    yield from schemas(option)


def read_pieces(value: Any) -> Pieces:
    """Pieces from a job."""
    return msgspec.convert(value, Pieces)
