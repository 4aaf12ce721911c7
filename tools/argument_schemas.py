"""Schemas of a tool's arguments, one for each thing that a schema can say, and which formats of
calls hold the arguments to it: for docs/answers.md, and for tests that try each over HTTP."""

from __future__ import annotations

from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from jaxllm.grammar.compiler import ByteTokens, compiled
from jaxllm.grammar.pieces import Composition, Literal
from jaxllm.server.openai.answer_structure import OF_OBJECTS
from jaxllm.server.parsing.calls import ToolParser
from jaxllm.server.parsing.registry import tool_formats

UNIT = {"enum": ["celsius", "fahrenheit"]}
NODE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/Node"}},
    "required": ["name"],
    "additionalProperties": False,
}


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object that must have these properties and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


# What a schema says, in the words of the page, and a schema that says it. Of an argument:
OF_ONE: dict[str, dict[str, Any]] = {
    "a text": {"type": "string"},
    "an integer within bounds": {"type": "integer", "minimum": -3, "maximum": 40},
    "a number": {"type": "number", "exclusiveMinimum": 0},
    "true or false": {"type": "boolean"},
    "one of some texts": UNIT,
    "one of some values": {"enum": ["auto", 3, None, False]},
    "a constant text": {"const": "v2"},
    "a constant number": {"const": 7},
    "a text by `pattern`": {"type": "string", "pattern": "^[a-z]{2}-[0-9]{3}$"},
    "a text by lengths": {"type": "string", "minLength": 3, "maxLength": 8},
    "a text by `format`": {"type": "string", "format": "date"},
    "a text or null": {"type": ["string", "null"]},
    "an integer or null": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "a text or a number": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
    "one of some texts or an integer": {"anyOf": [UNIT, {"type": "integer"}]},
    "all of two schemas": {"allOf": [{"type": "integer"}, {"minimum": 5, "maximum": 9}]},
    "a list of texts": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
    "a list by position": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, UNIT],
        "items": False,
        "minItems": 2,
    },
    "an object": closed({"x": {"type": "number"}, "unit": UNIT}),
    "an object of any keys": {"type": "object", "additionalProperties": {"type": "integer"}},
    "an object by `patternProperties`": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,4}$": {"type": "integer"}},
        "additionalProperties": False,
    },
    "`patternProperties` that match declared names": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "patternProperties": {"^a$": {"type": "integer", "maximum": 5}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "anything": {},
    "no case of another schema (`not`)": {"not": {"type": "string"}},
    "items that differ (`uniqueItems`)": {"type": "array", "uniqueItems": True},
    "a pattern with look-around": {"type": "string", "pattern": "^(?=a)[a-z]+$"},
}
# Of an argument that refers to a definition
REFERRED: dict[str, dict[str, Any]] = {
    "a reference to one of some texts": {"Unit": UNIT},
    "a reference to a text by `pattern`": {"Unit": {"type": "string", "pattern": "^[A-Z]{3}$"}},
    "a reference to an object": {"Unit": closed({"x": {"type": "integer"}})},
    "a reference to a reference": {"Unit": {"$ref": "#/$defs/Other"}, "Other": UNIT},
}
# Of all arguments
OF_ALL: dict[str, dict[str, Any]] = {
    "no arguments": closed({}),
    "optional arguments": closed({"a": {"type": "integer"}, "unit": UNIT}) | {"required": []},
    "an optional argument before a required one": {
        **closed({"a": {"type": "integer"}, "b": {"type": "integer"}, "unit": UNIT}),
        "required": ["b"],
    },
    "arguments by a reference (root `$ref`)": {
        "$ref": "#/$defs/Arguments",
        "$defs": {"Arguments": closed({"city": {"type": "string"}, "unit": UNIT})},
    },
    "arguments by `allOf`": {
        "allOf": [
            {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]},
            {"type": "object", "properties": {"unit": UNIT}, "required": ["unit"]},
        ]
    },
    "arguments by `anyOf`": {
        "anyOf": [closed({"days": {"type": "integer"}}), closed({"unit": UNIT})]
    },
    "arguments of any name": {"type": "object"},
    "arguments of any name and one type": {
        "type": "object",
        "additionalProperties": {"type": "integer"},
        "minProperties": 1,
    },
    "an argument that holds its own kind (recursive)": {
        **closed({"node": {"$ref": "#/$defs/Node"}}),
        "$defs": {"Node": NODE},
    },
    "arguments that hold their own kind (`#`)": {
        "type": "object",
        "properties": {"name": {"type": "integer"}, "child": {"$ref": "#"}},
        "required": ["name"],
        "additionalProperties": False,
    },
    "a cycle without a finite value": {
        **closed({"node": {"$ref": "#/$defs/Node"}}),
        "$defs": {"Node": closed({"node": {"$ref": "#/$defs/Node"}})},
    },
    "a name with blanks and dots": closed({"the city.name": {"type": "integer"}}),
    "a name with `>`, `<`, a quote and `=`": closed({'a">b</x=': {"type": "integer"}}),
}


def argument_schemas() -> dict[str, dict[str, Any]]:
    """Every schema of arguments, by what it says."""
    of_one = {words: closed({"value": schema}) for words, schema in OF_ONE.items()}
    referred = {
        words: closed({"value": {"$ref": "#/$defs/Unit"}}, **{"$defs": definitions})
        for words, definitions in REFERRED.items()
    }
    return of_one | referred | OF_ALL


def holds(parser: type[ToolParser], schema: dict[str, Any], tokens: LLTokenizer) -> bool:
    """Whether demanded calls of a format follow a schema; else such a request is a 400."""
    section = parser.section
    try:
        call = parser.pieces("set", OF_OBJECTS | schema, 0)
        pieces = (Literal(section.begin), *call, Literal(section.end))
        compiled(Composition("calls", pieces).job(), {}, tokens)
    except ValueError:
        return False
    return True


def verdicts() -> dict[str, dict[str, bool]]:
    """Whether each schema holds, by format and by its words."""
    tokens = LLTokenizer(TokenizerWrapper(ByteTokens({})))
    schemas = argument_schemas()
    return {
        name: {words: holds(parser, schema, tokens) for words, schema in schemas.items()}
        for name, parser in tool_formats().items()
    }
