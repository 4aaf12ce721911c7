"""Structured output of a request: the fields, their limits, the compiler's job. Imports no jax and
no llguidance."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

from jaxllm.grammar.doubles import LARGEST, inexact

MAX_CHARS = 1 << 16  # of a regex, a grammar or a schema written as JSON
MAX_DEPTH = 64  # objects and lists inside each other
MAX_CHOICES = 1024
MAX_TAGS = 64

# Default whitespace between the tokens of JSON: enough for pretty-printed text, too little for a
# model that repeats blanks for ever
WHITESPACE = r"[ ]{0,2}|\r?\n[ \t]{0,64}"


class StructureError(ValueError):
    """A structure that cannot be honoured; the message names the part and the reason."""


class CompilerLost(StructureError):
    """The compiler ended or could not start, so there is no verdict. The request may be sent
    again."""


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """The structure of an output: exactly one of the first six. Names are vLLM's. Raises
    `StructureError`.

    Attributes:
        json: a JSON schema, or its text.
        json_object: any JSON object.
        regex: matches the whole output.
        choice: the possible outputs.
        grammar: Lark as llguidance reads it, or GBNF.
        structural_tag: free text, in which each trigger starts a tag whose content follows a
            schema.
        whitespace_pattern: a regex of the whitespace between the tokens of JSON; default
            WHITESPACE.
        disable_any_whitespace: compact JSON.
        disable_fallback: without effect, since there is one compiler.
        disable_additional_properties: not supported.
    """

    json: dict[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_fallback: bool = False
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        self.job()

    @property
    def constraint(self) -> str:
        """The name of the field that is set. Raises `StructureError` unless it is exactly one."""
        constraints = [
            name
            for name in KINDS
            if getattr(self, name) is not None
            and not (name == "json_object" and self.json_object is False)
        ]
        if len(constraints) != 1:
            got = f", got {' and '.join(constraints)}" if constraints else ""
            raise StructureError(f"exactly one of {', '.join(KINDS)} must be given{got}")
        return constraints[0]

    def job(self) -> dict[str, Any]:
        """The compiler's job: the kind, its checked value, and whitespace where it matters."""
        for name in ("disable_any_whitespace", "disable_fallback", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise StructureError(f"{name} must be true or false")
        if self.disable_additional_properties:
            raise StructureError(
                "disable_additional_properties is not supported; "
                'write "additionalProperties": false into the schema'
            )
        constraint = self.constraint
        value = _CHECKS[constraint](constraint, getattr(self, constraint))
        return {"kind": constraint, "value": value} | self._spacing(constraint)

    def _spacing(self, constraint: str) -> dict[str, Any]:
        asked = self.whitespace_pattern is not None or self.disable_any_whitespace
        if constraint not in ("json", "json_object", "structural_tag"):
            if asked:
                raise StructureError(
                    "whitespace_pattern and disable_any_whitespace are for JSON, "
                    f"not for {constraint}"
                )
            return {}
        if self.disable_any_whitespace:
            if self.whitespace_pattern is not None:
                raise StructureError(
                    "whitespace_pattern and disable_any_whitespace exclude each other; give one"
                )
            return {"whitespace": None}
        if asked:
            return {"whitespace": _text("whitespace_pattern", self.whitespace_pattern)}
        return {"whitespace": WHITESPACE}


@dataclass(kw_only=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """The older name of `StructuredOutputsParams`; `backend` is accepted and has no effect."""

    backend: str | None = None


def structure(value: Any) -> StructuredOutputsParams:
    """The structure that a caller or a request body gives, an object or a dict. Raises
    `StructureError`."""
    if isinstance(value, GuidedDecodingParams):
        value = vars(value)
    if isinstance(value, StructuredOutputsParams):
        value.job()  # its fields may have been set since
        return value
    if not isinstance(value, dict):
        raise StructureError(
            f"must be an object with one of {', '.join(KINDS)}, got {type(value).__name__}"
        )
    known = {f.name for f in fields(StructuredOutputsParams)}
    # As of GuidedDecodingParams
    value = {name: item for name, item in value.items() if name != "backend"}
    if unknown := [name for name in value if name not in known]:
        raise StructureError(
            f"has no field {unknown[0]!r:.80}; it takes {', '.join(sorted(known))}"
        )
    return StructuredOutputsParams(
        **{name: item for name, item in value.items() if item is not None}
    )


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise StructureError(f"{name} must be a string, got {type(value).__name__}")
    if len(value) > MAX_CHARS:
        raise StructureError(f"{name} has {len(value)} characters; the limit is {MAX_CHARS}")
    _check_encodes(name, value)
    return value


def _some_text(name: str, value: Any) -> str:
    if not _text(name, value):
        raise StructureError(f"{name} is empty")
    return value


def _choice(name: str, value: Any) -> list[str]:
    if (
        not isinstance(value, (list, tuple))
        or not value
        or not all(isinstance(item, str) and item for item in value)
    ):
        raise StructureError(f"{name} must be a list of at least one string, none of them empty")
    if len(value) > MAX_CHOICES or sum(map(len, value)) > MAX_CHARS:
        raise StructureError(
            f"{name} takes at most {MAX_CHOICES} strings with {MAX_CHARS} characters together"
        )
    return list(dict.fromkeys(_text(name, item) for item in value))


def _true(name: str, value: Any) -> bool:
    if value is not True:
        raise StructureError(f"{name} must be true or false, got {type(value).__name__}")
    return True


def checked_schema(name: str, value: Any) -> Any:
    """A JSON schema, given as such or as text: an object, or true for any JSON.

    Raises:
        StructureError: it is no schema, too large, too deep, or holds a number that would be
            rounded. `name` stands in the message.
    """
    schema = _parsed(name, value)
    if not isinstance(schema, (dict, bool)):
        raise StructureError(
            f"{name} must be a JSON schema, which is an object, got {type(schema).__name__}"
        )
    if (wrong := inexact(schema)) is not None:
        raise StructureError(
            f"{wrong} in {name}, which would be rounded; whole numbers up to {LARGEST} "
            "and others of up to 15 digits are honoured exactly"
        )
    return schema


def _parsed(name: str, value: Any) -> Any:
    """JSON within the limits, given as such or as text."""
    if isinstance(value, str):
        try:
            value = json.loads(_some_text(name, value))
        except (ValueError, RecursionError) as error:
            raise StructureError(f"{name} is not valid JSON: {str(error)[:200]}") from None
    check_size(name, value)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StructureError(f"{name} is not JSON: {str(error)[:200]}") from None
    if len(text) > MAX_CHARS:
        raise StructureError(f"{name} has {len(text)} characters as JSON; the limit is {MAX_CHARS}")
    _check_encodes(name, text)
    return value


def _tags(name: str, value: Any) -> dict[str, Any]:
    """{"structures": [{"begin", "schema", "end"}…], "triggers": […]}, checked."""
    tags = _parsed(name, value)
    if not isinstance(tags, dict) or "structures" not in tags:
        raise StructureError(
            f'{name} must be {{"type": "structural_tag", '
            '"structures": [{begin, schema, end}], "triggers": [text]}'
        )
    structures = tags["structures"]
    triggers = tags.get("triggers")
    if tags.get("type", "structural_tag") != "structural_tag":
        raise StructureError(f"{name} has the type {tags['type']!r:.80}; it must be structural_tag")
    if not isinstance(structures, list) or not 0 < len(structures) <= MAX_TAGS:
        raise StructureError(f"structures of {name} must be a list of 1 to {MAX_TAGS} objects")
    if (
        not isinstance(triggers, list)
        or not triggers
        or not all(isinstance(item, str) and item for item in triggers)
    ):
        raise StructureError(
            f"triggers of {name} must be a list of at least one string, none of them empty"
        )
    return {"tags": [_tag(name, item, triggers) for item in structures]}


def _tag(name: str, item: Any, triggers: list[str]) -> dict[str, Any]:
    if (
        not isinstance(item, dict)
        or not isinstance(item.get("begin"), str)
        or not isinstance(item.get("end"), str)
    ):
        raise StructureError(
            f"each of the structures of {name} must have begin and end, which are texts, and schema"
        )
    trigger = max((t for t in triggers if item["begin"].startswith(t)), key=len, default=None)
    if trigger is None:
        raise StructureError(
            f"begin {item['begin']!r:.80} of {name} starts with none of the triggers"
        )
    return {
        "trigger": trigger,
        "begin": item["begin"],
        "end": item["end"],
        "schema": checked_schema(f"schema of {name}", item.get("schema")),
    }


def check_size(name: str, value: Any, limit: int = MAX_CHARS) -> None:
    """Raises StructureError on JSON that is too deep or has more than `limit` characters, before
    recursive or slow work on it."""
    level = [value]
    deep = 0
    size = 0
    while level:
        size += sum(len(item) if isinstance(item, str) else 1 for item in level)
        named = [item for item in level if isinstance(item, dict)]
        lists = [item for item in level if isinstance(item, list)]
        level = [*chain(*named, *(item.values() for item in named), *lists)]
        deep += 1
        if deep > MAX_DEPTH + 1:
            raise StructureError(f"{name} nests deeper than {MAX_DEPTH} levels")
        if size > limit:
            raise StructureError(
                f"{name} has more than {limit} characters as JSON, which is the limit"
            )


def _check_encodes(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise StructureError(f"{name} holds half of a surrogate pair, which is no text") from None


_CHECKS: dict[str, Any] = {
    "json": checked_schema,
    "json_object": _true,
    "regex": _some_text,
    "choice": _choice,
    "grammar": _some_text,
    "structural_tag": _tags,
}
KINDS = tuple(_CHECKS)
