"""Writes llguidance's Lark: texts, schemas, and grammars of pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.grammar.arguments import argument_pieces
from jaxllm.grammar.completable import completable
from jaxllm.grammar.pieces import (
    Arguments,
    Either,
    FreeText,
    Json,
    Literal,
    Maybe,
    Nested,
    OneOf,
    Piece,
    Pieces,
    RawText,
    Repeated,
    read_pieces,
)
from jaxllm.grammar.reasons import plain
from jaxllm.grammar.texts import Regexes, expression, quoted

# Rules that a client cannot switch off
STRICT = {"lenient": False, "coerce_one_of": False}


def schema_options(
    schema: dict[str, Any] | bool, whitespace: str | None, regexes: Regexes
) -> dict[str, Any]:
    """The schema, so that what follows it can always be completed, with the compiler's options in
    place of the client's. Raises ValueError where no finite value follows it."""
    options: dict[str, Any] = STRICT | {"whitespace_flexible": whitespace is not None}
    if whitespace is not None:
        options["whitespace_pattern"] = whitespace
    schema = completable(schema, regexes)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return schema | {"x-guidance": options}


def literal(text: str, specials: Mapping[str, int]) -> str:
    """Text as Lark, in which special tokens are tokens."""
    if not specials:
        if text:
            return quoted(text)
        return ""
    parts = re.split(
        "(" + "|".join(re.escape(s) for s in sorted(specials, key=len, reverse=True)) + ")", text
    )
    return " ".join(
        special(specials[part]) if part in specials else quoted(part) for part in parts if part
    )


def special(id: int) -> str:
    return f"<[{id}]>"


def composed(
    job: Mapping[str, Any],
    specials: Mapping[str, int],
    regexes: Regexes,
    convert: Callable[[Mapping[str, Any], Mapping[str, int], Regexes], str],
) -> str:
    """The grammar of a job of pieces. `convert` makes those of nested structures."""
    composer = Composer(specials, job["whitespace"], regexes)
    start = composer.sequence(read_pieces(job["value"]))
    lark = "\n".join(["%llguidance {}", f"start: {start}", *composer.rules])
    grammars: list[dict[str, Any]] = [{"lark_grammar": lark}]
    for name, nested in composer.nested.items():
        text = convert(nested, specials, regexes)
        if text.startswith("{"):
            inner = json.loads(text)["grammars"][0]
        else:
            inner = {"lark_grammar": text}
        grammars.append(inner | {"name": name})
    return json.dumps({"grammars": grammars})


class Composer:
    """Writes pieces as Lark.

    Attributes:
        rules: to which the text of `sequence` refers.
        nested: jobs of structures to which it refers, by name.
    """

    def __init__(self, specials: Mapping[str, int], whitespace: str | None, regexes: Regexes):
        self.rules: list[str] = ["FREE: /(.|\\n)*/"]
        self.nested: dict[str, dict[str, Any]] = {}
        self._names: dict[str, str] = {}  # of rules, by their texts
        self._specials = specials
        self._whitespace = whitespace
        self._regexes = regexes

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
                return self._rule("json", f"%json {json.dumps(self._schema(schema))}")
            case Arguments():
                return self.sequence(argument_pieces(piece, self._regexes, self._why_not))
            case RawText():
                return self._raw_text(piece)
            case OneOf(texts):
                choices = " | ".join(literal(text, self._specials) for text in texts if text)
                return f"({choices})" + "?" * ("" in texts)
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

    def _rule(self, prefix: str, text: str) -> str:
        """The name of a rule of its own, one for equal texts: many arguments are alike."""
        if text not in self._names:
            self._names[text] = f"{prefix}_{len(self.rules)}"
            self.rules.append(f"{self._names[text]}: {text}")
        return self._names[text]

    def _schema(self, schema: Any) -> dict[str, Any]:
        return schema_options(schema, self._whitespace, self._regexes)

    def _why_not(self, schema: Any) -> str:
        """Why nothing can follow a schema as JSON; "" where something can."""
        try:
            grammar = json.dumps({"grammars": [{"json_schema": self._schema(schema)}]})
        except ValueError as error:
            return str(error)
        return plain(self._regexes.why_not(grammar))

    def _raw_text(self, piece: RawText) -> str:
        """Raw text as one terminal with what stands around it, as far as that is no token: so the
        text ends only where its end begins."""
        before, begin = _behind_token(piece.begin, self._specials)
        end, behind = _before_token(piece.end, self._specials)
        parts = [f"({expression(piece.rules, piece.without)})"]
        if begin:
            parts.insert(0, quoted(begin))
        if end:
            parts.append(quoted(end))
        name = self._rule("TEXT", " ".join(parts))
        texts = (literal(before, self._specials), name, literal(behind, self._specials))
        return " ".join(filter(None, texts))

    def _text_before(self, until: str) -> str:
        """Free text and the text that ends it. A special token ends it by itself, and white space
        before the token counts as free text."""
        positions = [until.find(token) for token in self._specials if token in until]
        if positions and not until[: min(positions)].strip():
            return f"FREE {literal(until[min(positions) :], self._specials)}"
        name = f"until_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: FREE {quoted(until)}")
        return name


def _behind_token(text: str, specials: Mapping[str, int]) -> tuple[str, str]:
    """A text cut behind its last special token."""
    ends = [text.rfind(token) + len(token) for token in specials if token in text]
    end = max(ends, default=0)
    return text[:end], text[end:]


def _before_token(text: str, specials: Mapping[str, int]) -> tuple[str, str]:
    """A text cut before its first special token."""
    start = min((text.find(token) for token in specials if token in text), default=len(text))
    return text[:start], text[start:]
