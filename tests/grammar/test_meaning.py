"""What schemas mean: cases, types and references, within bounds."""

from __future__ import annotations

import time
from typing import Any

import jsonschema
import pytest

from jaxllm.grammar.meaning import ALL_TYPES, MAX_CASES, MAX_FOLLOWED, Meaning, overlapping
from jaxllm.grammar.references import NoSuchSchema, alone, referred

ROOT: dict[str, Any] = {
    "$id": "https://example.com/root",
    "properties": {
        "a/b": {"const": 1},
        "c~d": {"const": 2},
        "e[f": {"const": 3},
        "g%h": {"const": 4},
        "list": {"anyOf": [{"const": 5}, {"const": 6}]},
        "$ref": {"const": 7},
    },
    "$defs": {"A": {"$anchor": "here", "const": 8}, "B": {"$id": "b", "const": 9}},
}


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ("#/properties/a~1b", 1),
        ("#/properties/c~0d", 2),
        ("#/properties/e%5Bf", 3),
        ("#/properties/g%25h", 4),
        ("#/properties/list/anyOf/1", 6),
        ("#/properties/$ref", 7),
        ("#here", 8),
        ("b", 9),
        ("b#", 9),
        ("https://example.com/b", 9),
        ("https://example.com/root#/$defs/A", 8),
    ],
)
def test_references_of_every_form_lead_to_their_schema(reference: str, value: int) -> None:
    assert referred(reference, ROOT)["const"] == value
    assert Meaning({"$ref": reference}, ROOT).cases[0].values == [value]
    part = alone({"properties": {"x": {"$ref": reference}}}, ROOT)
    jsonschema.validate({"x": value}, part)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"x": 0}, part)


@pytest.mark.parametrize(
    "reference", ["#", "https://example.com/root", "https://example.com/root#"]
)
def test_a_schema_may_refer_to_the_whole(reference: str) -> None:
    assert referred(reference, ROOT) is ROOT


@pytest.mark.parametrize(
    "reference",
    ["#/nowhere", "#/properties/list/anyOf/2", "#/properties/list/anyOf/x", "#gone", "other", "#/"],
)
def test_a_reference_that_leads_nowhere_is_said(reference: str) -> None:
    with pytest.raises(NoSuchSchema, match="leads to no schema"):
        referred(reference, ROOT)
    meaning = Meaning({"$ref": reference}, ROOT)
    assert meaning.free and "leads to no schema" in meaning.fault


TREE = {
    "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}, "name": {"type": "string"}}
}
A, B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}
DEFS = {
    "$defs": {
        "A": {"type": "integer"},
        "B": {"anyOf": [{"$ref": "#/$defs/B"}, {"type": "null"}]},
        "C": {"allOf": [{"$ref": "#/$defs/C"}]},
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, ALL_TYPES),
        ({"description": "a"}, ALL_TYPES),
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        ({"allOf": [A], "nullable": True}, {"integer", "null"}),
        (A, {"integer"}),
        (B, {"null"}),
        ({"$ref": "#/$defs/C"}, set()),
        ({"anyOf": [A, B]}, {"integer", "null"}),
        ({"oneOf": [A, {"type": "string"}]}, {"integer", "string"}),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": ["string", "null"]}]}, {"string"}),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, {"integer"}),
        ({"allOf": [{"anyOf": [A, {"type": "object"}]}], "type": "object"}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"properties": {}}, {"object"}),
        ({"pattern": "a"}, {"string"}),
        ({"minimum": 1}, {"number"}),
        ({"items": {}, "type": ["array", "null"]}, {"array", "null"}),
        ({"const": 1}, {"integer"}),
        ({"enum": [1, "a", None]}, {"integer", "string", "null"}),
        ({"enum": [1, "a", None], "type": "string"}, {"string"}),
        ({"allOf": [{"enum": [1, 2]}, {"enum": [2, "b"]}]}, {"integer"}),
        ({"type": "nonsense"}, set()),
        (False, set()),
        (True, ALL_TYPES),
    ],
)
def test_types_are_those_that_all_parts_allow_or_imply(schema: Any, types: set[str]) -> None:
    root = DEFS | {"properties": {"x": schema}}
    assert Meaning(schema, root).types == types


def test_properties_come_from_all_parts_of_all_cases() -> None:
    root: dict[str, Any] = {
        "$ref": "#/$defs/Base",
        "allOf": [{"properties": {"a": {"minimum": 1}}}],
        "anyOf": [{"properties": {"b": {"const": "x"}}}, {"properties": {"b": {"const": "y"}}}],
        "$defs": {"Base": {"properties": {"a": {"type": "integer"}}, "required": ["c"]}},
    }
    found = Meaning(root, root).properties
    assert set(found) == {"a", "b", "c"}
    assert Meaning(found["a"], root).types == {"integer"}
    assert Meaning(found["b"], root).texts == {"x", "y"}
    assert Meaning(found["c"], root).free


def test_properties_without_a_name_have_the_types_of_patterns_and_of_others() -> None:
    schema = {
        "properties": {"a": {}},
        "patternProperties": {"^n": {"type": "integer"}},
        "additionalProperties": {"type": "null"},
    }
    assert Meaning(Meaning(schema, schema).member("n1"), schema).types == {"integer", "null"}
    assert Meaning(Meaning(schema, schema).member("a"), schema).free


def test_a_tree_has_the_types_of_its_branches() -> None:
    kids = Meaning(TREE, TREE).properties["kids"]
    inner = Meaning(Meaning(kids, TREE).items, TREE)
    assert set(inner.properties) == {"kids", "name"}


def kind(name: str, required: bool = True, **more: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {"kind": {"const": name}} | more}
    return schema | {"required": ["kind"] * required}


@pytest.mark.parametrize(
    ("options", "apart"),
    [
        ([kind("a"), kind("b")], True),
        ([kind("a"), kind("a", n={})], False),
        ([kind("a"), kind("b", required=False)], False),
        ([{"type": "string"}, {"type": "integer"}], True),
        ([{"type": "number"}, {"type": "integer"}], False),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"const": 1}, {"const": True}], True),
        ([{"pattern": "a"}, {"minimum": 1}], False),
        (
            [kind("a") | {"additionalProperties": False}, {"type": "object", "required": ["n"]}],
            True,
        ),
    ],
)
def test_one_of_tells_whether_its_options_are_apart(options: list[Any], apart: bool) -> None:
    for schema in ({"oneOf": options}, {"allOf": [{"oneOf": options}], "title": "a"}):
        assert overlapping(Meaning(schema, schema).cases) is not apart
    assert not overlapping(Meaning({"anyOf": options}, {}).cases)


def two(left: Any, right: Any) -> dict[str, Any]:
    return {"anyOf": [left, right]}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [two({"minimum": n}, {"maximum": n}) for n in range(40)]},
        {"$ref": "#/$defs/0", "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(900)}},
        {
            "$ref": "#/$defs/0",
            "$defs": {str(n): two(*[{"$ref": f"#/$defs/{n + 1}"}] * 2) for n in range(60)}
            | {"60": {"type": "string"}},
        },
        {
            "$ref": "#/$defs/0",
            "$defs": {
                str(n): {"allOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2, "title": "a"}
                for n in range(60)
            }
            | {"60": {"type": "string"}},
        },
    ],
    ids=["cases", "chain", "doubled options", "doubled parts"],
)
def test_a_schema_that_explodes_is_given_up_soon(schema: Any) -> None:
    start = time.process_time()
    meaning = Meaning(schema, schema)
    assert time.process_time() - start < 0.5
    assert meaning.free and "simpler" in meaning.fault
    assert len(meaning.cases) <= MAX_CASES


def test_references_may_follow_each_other_a_while() -> None:
    chain = {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(MAX_FOLLOWED - 1)}
    schema = {"$ref": "#/$defs/0", "$defs": chain | {str(MAX_FOLLOWED - 1): {"type": "null"}}}
    assert Meaning(schema, schema).types == {"null"}


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": list(range(30_000))},
        {"allOf": [{"enum": [[str(number)] for number in range(5_000)]}] * 2},
        {"oneOf": [{"enum": list(range(20_000))}, {"enum": list(range(20_000, 40_000))}]},
    ],
)
def test_enums_of_many_values_are_read_in_linear_time(schema: dict[str, Any]) -> None:
    begin = time.process_time()
    meaning = Meaning(schema, schema)
    assert not overlapping(meaning.cases)
    assert time.process_time() - begin < 1
    assert all(case.values for case in meaning.cases)


def test_a_search_for_a_schema_by_its_identifier_is_bounded() -> None:
    inside = {f"D{number}": {"$id": f"d{number}"} for number in range(10_000)}
    root = {"$id": "https://example.com/root", "$defs": inside}
    begin = time.process_time()
    meaning = Meaning({"$ref": "gone"}, root)
    assert time.process_time() - begin < 0.5
    assert meaning.free and "make it simpler" in meaning.fault
