"""Jobs (`StructuredOutputsParams.job`) to llguidance grammars. Runs in the compiler's own process:
hostile input makes some of it slow."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark


def convert(job: Mapping[str, Any], specials: Mapping[str, int]) -> str:
    """The grammar in llguidance's serialised form. Raises ValueError. `specials` are the texts that
    the tokenizer makes one token of."""
    kind, value = job["kind"], job["value"]
    if kind == "regex":
        if (len(value) - len(value.rstrip("\\"))) % 2:
            # Which regex_to_lark would leave out
            raise ValueError("it ends with a backslash that escapes nothing")
        # \d is 0 to 9, as people mean it
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(value, 'd')}/")
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(_lark(value))
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quoted, value)))
    if kind == "structural_tag":
        return _tagged(value["tags"], job["whitespace"], specials)
    return json.dumps(
        {
            "grammars": [
                {
                    "json_schema": _schema(
                        {"type": "object"} if kind == "json_object" else value, job["whitespace"]
                    )
                }
            ]
        }
    )


def _schema(schema: dict[str, Any] | bool, whitespace: str | None) -> dict[str, Any]:
    """The schema with the compiler's options, which replace those that a client may have written
    into it."""
    options = {
        "whitespace_flexible": whitespace is not None,
        "lenient": False,
        "coerce_one_of": False,
    }
    if whitespace is not None:
        options["whitespace_pattern"] = whitespace  # type: ignore[assignment]
    return (schema if isinstance(schema, dict) else {} if schema else {"not": {}}) | {
        "x-guidance": options
    }


def _lark(text: str) -> str:
    """GBNF is told from Lark by its `::=`."""
    try:
        return any_to_lark(text)
    except Exception as error:
        raise ValueError(f"not a GBNF grammar: {error}") from None


def _tagged(tags: list[dict[str, Any]], whitespace: str | None, specials: Mapping[str, int]) -> str:
    """Free text; wherever a trigger appears, one of its tags must follow to the end."""
    lines = [
        "%llguidance {}",
        f"start: ({' | '.join(f'tag_{n}' for n in range(len(tags)))})* free",
        "free: FREE",
        "FREE: /(.|\\n)*/",
    ]
    for n, tag in enumerate(tags):
        trigger, rest = tag["trigger"], tag["begin"][len(tag["trigger"]) :]
        if trigger in specials:  # ends the free text, since that has no special tokens
            head = f"FREE {_special(specials[trigger])}"
        else:
            lines.append(f"head_{n}[lazy]: FREE {_quoted(trigger)}")
            head = f"head_{n}"
        schema = json.dumps(_schema(tag["schema"], whitespace))
        lines.append(
            f"tag_{n}: {head} {_literal(rest, specials)} %json {schema} {_literal(tag['end'], specials)}"
        )
    return LLMatcher.grammar_from_lark("\n".join(lines))


def _literal(text: str, specials: Mapping[str, int]) -> str:
    """Text as Lark, its special tokens as such."""
    if not specials:
        return _quoted(text) if text else ""
    parts = re.split(
        "(" + "|".join(re.escape(s) for s in sorted(specials, key=len, reverse=True)) + ")", text
    )
    return " ".join(
        _special(specials[part]) if part in specials else _quoted(part) for part in parts if part
    )


def _special(id: int) -> str:
    return f"<[{id}]>"


def _quoted(text: str) -> str:
    """A Lark string; its escapes are JSON's."""
    return json.dumps(text)
