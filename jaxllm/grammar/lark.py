"""Writes llguidance's Lark: texts, schemas, and grammars of pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.grammar.pieces import (
    Either,
    FreeText,
    Json,
    Literal,
    Maybe,
    Nested,
    OneOf,
    Piece,
    Pieces,
    Repeated,
    read_pieces,
)

# Rules that a client cannot switch off
STRICT = {"lenient": False, "coerce_one_of": False}


def schema_options(schema: dict[str, Any] | bool, whitespace: str | None) -> dict[str, Any]:
    """The schema with the compiler's options, in place of the client's."""
    options: dict[str, Any] = STRICT | {"whitespace_flexible": whitespace is not None}
    if whitespace is not None:
        options["whitespace_pattern"] = whitespace
    return (schema if isinstance(schema, dict) else {} if schema else {"not": {}}) | {
        "x-guidance": options
    }


def literal(text: str, specials: Mapping[str, int]) -> str:
    """Text as Lark, in which special tokens are tokens."""
    if not specials:
        return quoted(text) if text else ""
    parts = re.split(
        "(" + "|".join(re.escape(s) for s in sorted(specials, key=len, reverse=True)) + ")", text
    )
    return " ".join(
        special(specials[part]) if part in specials else quoted(part) for part in parts if part
    )


def special(id: int) -> str:
    return f"<[{id}]>"


def quoted(text: str) -> str:
    """A Lark string; its escapes are JSON's."""
    return json.dumps(text)


def composed(
    job: Mapping[str, Any],
    specials: Mapping[str, int],
    convert: Callable[[Mapping[str, Any], Mapping[str, int]], str],
) -> str:
    """The grammar of a job of pieces. `convert` makes those of nested structures."""
    composer = Composer(specials, job["whitespace"])
    start = composer.sequence(read_pieces(job["value"]))
    lark = "\n".join(["%llguidance {}", f"start: {start}", *composer.rules])
    grammars: list[dict[str, Any]] = [{"lark_grammar": lark}]
    for name, nested in composer.nested.items():
        text = convert(nested, specials)
        inner = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
        grammars.append(inner | {"name": name})
    return json.dumps({"grammars": grammars})


class Composer:
    """Writes pieces as Lark.

    Attributes:
        rules: to which the text of `sequence` refers.
        nested: jobs of structures to which it refers, by name.
    """

    def __init__(self, specials: Mapping[str, int], whitespace: str | None):
        self.rules: list[str] = ["FREE: /(.|\\n)*/"]
        self.nested: dict[str, dict[str, Any]] = {}
        self._specials, self._whitespace = specials, whitespace

    def sequence(self, pieces: Pieces) -> str:
        """Pieces in order."""
        texts: list[str] = []
        rest = list(pieces)
        while rest:
            piece = rest.pop(0)
            if isinstance(piece, FreeText) and piece.until:
                following = rest.pop(0)
                assert isinstance(following, Literal) and following.text.startswith(piece.until)
                texts.append(self._text_before(piece.until))
                rest.insert(0, Literal(following.text[len(piece.until) :]))
            else:
                texts.append(self._one(piece))
        return " ".join(filter(None, texts)) or '""'

    def _one(self, piece: Piece) -> str:
        match piece:
            case Literal(text):
                return literal(text, self._specials)
            case Json(schema):
                return f"%json {json.dumps(schema_options(schema, self._whitespace))}"
            case OneOf(texts):
                some = " | ".join(literal(text, self._specials) for text in texts if text)
                return f"({some})" + "?" * ("" in texts)
            case Maybe(pieces):
                return f"({self.sequence(pieces)})?"
            case Repeated(pieces):
                return f"({self.sequence(pieces)})*"
            case Either(options):
                return f"({' | '.join(map(self.sequence, options))})"
            case Nested(job):
                self.nested[name := f"nested_{len(self.nested)}"] = job
                return f"@{name}"
        return "FREE"

    def _text_before(self, until: str) -> str:
        """Free text and the text that ends it. A special token ends it by itself, and white space
        before the token counts as free text."""
        found = [until.find(token) for token in self._specials if token in until]
        if found and not until[: min(found)].strip():
            return f"FREE {literal(until[min(found) :], self._specials)}"
        name = f"until_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: FREE {quoted(until)}")
        return name
