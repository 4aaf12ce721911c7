"""Jobs (`StructuredOutputsParams.job`) to llguidance grammars. Runs in the compiler's process:
hostile input makes some of it slow."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from jaxllm.grammar.structure import checked_schema

# Rules that a client cannot switch off
STRICT = {"lenient": False, "coerce_one_of": False}
# llguidance's Lark: its strings, regular expressions and comments, which may hold anything, and the
# keyword before an embedded JSON schema
LARK_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\x00-\x1f\x7f])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\])+/|(?P<json>%json\b)\s*'
)


def convert(job: Mapping[str, Any], specials: Mapping[str, int]) -> str:
    """The grammar of a job in llguidance's serialised form.

    Args:
        specials: the id of each text that the tokenizer makes one token of.

    Raises:
        ValueError: the job has no grammar.
    """
    kind, value = job["kind"], job["value"]
    if kind == "regex":
        if (len(value) - len(value.rstrip("\\"))) % 2:
            # regex_to_lark would drop it
            raise ValueError("it ends with a backslash that escapes nothing")
        # \d is 0 to 9 alone
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(value, 'd')}/")
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(_lark(value))
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quoted, value)))
    if kind == "structural_tag":
        return _tagged(value["tags"], job["whitespace"], specials)
    schema = {"type": "object"} if kind == "json_object" else value
    return json.dumps({"grammars": [{"json_schema": _schema(schema, job["whitespace"])}]})


def _schema(schema: dict[str, Any] | bool, whitespace: str | None) -> dict[str, Any]:
    """The schema with the compiler's options, in place of those that the client wrote into it."""
    options: dict[str, Any] = STRICT | {"whitespace_flexible": whitespace is not None}
    if whitespace is not None:
        options["whitespace_pattern"] = whitespace
    return (schema if isinstance(schema, dict) else {} if schema else {"not": {}}) | {
        "x-guidance": options
    }


def _lark(text: str) -> str:
    """Lark, or GBNF, which has `::=`, as Lark; the rules of `json` hold for every schema in it."""
    try:
        text = any_to_lark(text)
    except Exception as error:
        raise ValueError(f"not a GBNF grammar: {error}") from None
    parts, done = [], 0
    while (token := LARK_TOKEN.search(text, done)) is not None:
        parts.append(text[done : token.end()])
        done = token.end()
        if token["json"] is not None:
            schema, done = _embedded(text, done)
            parts.append(schema)
    return "".join(parts) + text[done:]


def _embedded(text: str, start: int) -> tuple[str, int]:
    """The schema that stands in Lark at `start`, checked, and where it ends. Its `x-guidance` may
    set whitespace and separators."""
    try:
        schema, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the schema of %json is not valid JSON: {str(error)[:200]}") from None
    schema = checked_schema("the schema of %json", schema)
    if isinstance(schema, dict):
        options = schema.get("x-guidance", {})
        if not isinstance(options, dict):
            raise ValueError("x-guidance of %json must be an object")
        schema = schema | {"x-guidance": options | STRICT}
    return json.dumps(schema), end


def _tagged(tags: list[dict[str, Any]], whitespace: str | None, specials: Mapping[str, int]) -> str:
    """Free text, in which each trigger starts one of its tags, to the tag's end."""
    lines = [
        "%llguidance {}",
        f"start: ({' | '.join(f'tag_{n}' for n in range(len(tags)))})* free",
        "free: FREE",
        "FREE: /(.|\\n)*/",
    ]
    for n, tag in enumerate(tags):
        trigger, rest = tag["trigger"], tag["begin"][len(tag["trigger"]) :]
        if trigger in specials:  # ends the free text, which has no special tokens
            head = f"FREE {_special(specials[trigger])}"
        else:
            lines.append(f"head_{n}[lazy]: FREE {_quoted(trigger)}")
            head = f"head_{n}"
        schema = json.dumps(_schema(tag["schema"], whitespace))
        begin, end = _literal(rest, specials), _literal(tag["end"], specials)
        lines.append(f"tag_{n}: {head} {begin} %json {schema} {end}")
    return LLMatcher.grammar_from_lark("\n".join(lines))


def _literal(text: str, specials: Mapping[str, int]) -> str:
    """Text as Lark, with its special tokens as such."""
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
