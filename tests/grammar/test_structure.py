"""The structures that a request may name: one at a time, within limits, each mistake named."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.grammar.structure import (
    MAX_CHARS,
    MAX_CHOICES,
    MAX_DEPTH,
    WHITESPACE,
    GuidedDecodingParams,
    StructuredOutputsParams,
    StructureError,
    structure,
)

OBJECT = {"type": "object"}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<function=f>", "schema": OBJECT, "end": "</function>"}],
    "triggers": ["<function="],
}

# Bounds of 64-bit integers forbid nothing that is generated; other keys may hold anything.
BOUNDS = {
    "anyOf": [
        {"minimum": -(2**53), "maximum": 2**63 - 1},
        {"minimum": 0, "maximum": 2**64 - 1},
        {"maximum": 1e300},
        {"maximum": 1e15, "minimum": -2.5e15},
    ],
    "properties": {
        "const": {"default": 2**60},
        "maximum": {"examples": [2**60], "minimum": -(2**53), "maximum": 2**53},
    },
    "enum": [0.1, 3.141592653589793, -(2**53), 9007199254740991.0, True],
    "examples": [{"const": 2**60 + 1}, {"minimum": 2**60}],
    "default": 10**30,
}


def nested(levels: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(levels - 1):
        value = {"not": value}
    return value


@pytest.mark.parametrize(
    ("given", "job"),
    [
        ({"json": OBJECT}, {"kind": "json", "value": OBJECT, "whitespace": WHITESPACE}),
        (
            {"json": '{"type": "object"}'},
            {"kind": "json", "value": OBJECT, "whitespace": WHITESPACE},
        ),
        ({"json": True}, {"kind": "json", "value": True, "whitespace": WHITESPACE}),
        ({"json": {}}, {"kind": "json", "value": {}, "whitespace": WHITESPACE}),
        ({"json": BOUNDS}, {"kind": "json", "value": BOUNDS, "whitespace": WHITESPACE}),
        (
            {"json": OBJECT, "whitespace_pattern": "[ ]"},
            {"kind": "json", "value": OBJECT, "whitespace": "[ ]"},
        ),
        (
            {"json": OBJECT, "disable_any_whitespace": True},
            {"kind": "json", "value": OBJECT, "whitespace": None},
        ),
        ({"json_object": True}, {"kind": "json_object", "value": True, "whitespace": WHITESPACE}),
        ({"json_object": False, "regex": "a"}, {"kind": "regex", "value": "a"}),
        ({"regex": " "}, {"kind": "regex", "value": " "}),
        ({"choice": ["b", "a", "b"]}, {"kind": "choice", "value": ["b", "a"]}),
        (
            {"grammar": 'start: "a"', "disable_fallback": True},
            {"kind": "grammar", "value": 'start: "a"'},
        ),
    ],
)
def test_a_constraint_becomes_a_job_for_the_compiler(
    given: dict[str, Any], job: dict[str, Any]
) -> None:
    assert StructuredOutputsParams(**given).job() == job
    assert structure(given).job() == job


def test_tags_keep_the_longest_trigger_that_begins_them() -> None:
    job = StructuredOutputsParams(structural_tag=TAGS | {"triggers": ["<", "<function="]}).job()
    assert job["value"] == {
        "tags": [
            {
                "trigger": "<function=",
                "begin": "<function=f>",
                "end": "</function>",
                "schema": OBJECT,
            }
        ]
    }


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar, structural_tag"),
        ({"json_object": False}, "exactly one"),
        ({"json": OBJECT, "regex": "a"}, "got json and regex"),
        ({"json": []}, "which is an object, got list"),
        ({"json": "[]"}, "which is an object, got list"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": ""}, "json is empty"),
        ({"json": 3}, "got int"),
        ({"json": {"a": float("nan")}}, "not JSON"),
        ({"json": {"a": {1, 2}}}, "not JSON"),
        ({"json": {"const": "\ud800"}}, "surrogate"),
        ({"json": nested(MAX_DEPTH + 1)}, f"deeper than {MAX_DEPTH}"),
        ({"json": nested(20_000)}, f"deeper than {MAX_DEPTH}"),
        ({"json": "[" * 100_000}, "limit is 65536"),
        ({"json": {"enum": ["x" * 1000] * 100}}, str(MAX_CHARS)),
        ({"json": {"enum": [0] * 10**6}}, str(MAX_CHARS)),
        ({"json": {"enum": [10**9] * 20_000}}, str(MAX_CHARS)),
        ({"json": {"const": 2**53 + 1}}, "const holds 9007199254740993"),
        (
            {"json": {"const": {"a": [True, 1234567890123456789]}}},
            "const holds 1234567890123456789",
        ),
        (
            {"json": {"properties": {"const": {"enum": ["a", -(2**60)]}}}},
            "enum holds -1152921504606846976",
        ),
        ({"json": {"anyOf": [{}, {"minimum": 2**53 + 1}]}}, "minimum is 9007199254740993"),
        ({"json": {"minimum": 1e20}}, r"minimum is 1e\+20"),
        ({"json": {"exclusiveMinimum": 2**63 - 1}}, "exclusiveMinimum is"),
        ({"json": {"exclusiveMaximum": 2**63 - 1}}, "exclusiveMaximum is"),
        ({"json": {"maximum": -(10**30)}}, "maximum is a larger number"),
        ({"json": {"multipleOf": 10**17}}, "multipleOf is"),
        ({"json": {"const": 123456789.12345679}}, "const holds"),
        ({"json": {"const": 1e22}}, r"const holds 1e\+22"),
        ({"json": '{"$defs": {"a": {"items": {"const": 1e-300}}}}'}, "const holds 1e-300"),
        (
            {
                "structural_tag": TAGS
                | {"structures": [{"begin": "<function=", "schema": {"const": 2**60}, "end": ""}]}
            },
            "const holds",
        ),
        ({"json_object": 1}, "true or false"),
        ({"regex": ""}, "regex is empty"),
        ({"regex": ["a"]}, "must be a string, got list"),
        ({"regex": "a" * (MAX_CHARS + 1)}, str(MAX_CHARS)),
        ({"regex": "\udc00"}, "surrogate"),
        ({"choice": []}, "at least one string"),
        ({"choice": "ab"}, "list of at least one string"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"choice": [1]}, "at least one string"),
        ({"choice": [str(i) for i in range(MAX_CHOICES + 1)]}, str(MAX_CHOICES)),
        ({"choice": ["x" * MAX_CHARS, "y"]}, str(MAX_CHARS)),
        ({"grammar": ""}, "grammar is empty"),
        ({"regex": "a", "whitespace_pattern": " "}, "for JSON, not for regex"),
        (
            {"json": OBJECT, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "exclude each other",
        ),
        ({"json": OBJECT, "whitespace_pattern": 3}, "whitespace_pattern must be a string"),
        ({"json": OBJECT, "disable_fallback": 1}, "disable_fallback must be true or false"),
        (
            {"json": OBJECT, "disable_additional_properties": True},
            "disable_additional_properties is not supported",
        ),
        ({"structural_tag": {}}, "structures"),
        ({"structural_tag": {"format": {"type": "any_text"}}}, "structures"),
        ({"structural_tag": TAGS | {"type": "other"}}, "other"),
        ({"structural_tag": TAGS | {"structures": []}}, "1 to 64"),
        ({"structural_tag": TAGS | {"triggers": []}}, "triggers"),
        ({"structural_tag": TAGS | {"triggers": [""]}}, "triggers"),
        ({"structural_tag": TAGS | {"triggers": ["<tool"]}}, "none of the triggers"),
        (
            {"structural_tag": TAGS | {"structures": [{"begin": "<function=", "end": ""}]}},
            "schema of structural_tag must be",
        ),
        (
            {"structural_tag": TAGS | {"structures": [{"begin": "<function=", "schema": OBJECT}]}},
            "begin and end",
        ),
    ],
)
def test_what_is_no_constraint_is_refused_with_the_reason(given: dict[str, Any], says: str) -> None:
    with pytest.raises(StructureError, match=says):
        structure(given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, "got int"),
        ("a", "got str"),
        ([], "got list"),
        ({"jsn": {}}, "no field 'jsn'"),
        ({"regex": "a", "": 1}, "no field ''"),
    ],
)
def test_what_is_no_object_or_has_unknown_fields_is_refused(given: Any, says: str) -> None:
    with pytest.raises(StructureError, match=says):
        structure(given)


def test_a_cycle_is_refused() -> None:
    cycle: dict[str, Any] = {}
    cycle["not"] = cycle
    with pytest.raises(StructureError, match="deeper"):
        StructuredOutputsParams(json=cycle)


def test_the_older_name_means_the_same() -> None:
    old = GuidedDecodingParams(regex="a+", backend="outlines")
    assert (
        structure(old)
        == structure({"regex": "a+", "backend": "outlines"})
        == StructuredOutputsParams(regex="a+")
    )
    assert type(structure(old)) is StructuredOutputsParams


def test_fields_that_were_set_later_are_checked_again() -> None:
    params = StructuredOutputsParams(regex="a")
    params.regex = None
    with pytest.raises(StructureError, match="exactly one"):
        structure(params)
