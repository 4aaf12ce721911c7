"""Schemas mean in every format what they mean in JSON: arguments are read with their types, and
grammars allow what follows them, nothing else, and never lead where nothing can follow."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.server.parsing.registry import tool_formats
from tests.server.parsing.feeding import cut, fed, meant
from tests.server.parsing.samples import produced
from tests.server.parsing.schemas import Walker, arguments, ends_of, job_of

FORMATS = sorted(tool_formats())
RAW = ("function_gemma", "glm45", "minimax_m2", "qwen3_coder", "seed_oss")
OTHERS = ("llama4_pythonic", "pythonic")
INTEGER = {"type": "integer"}
EXAMPLES = pytest.mark.parametrize("examples", [25, pytest.param(300, marks=pytest.mark.slow)])
# Reasons of formats that write no JSON, where JSON can hold what they cannot
OF_FORMATS = ("format of tool calls", "which only JSON formats can follow")


def thorough(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def read(name: str, schema: Any, text: str, positions: list[int] | None = None) -> Any:
    """The arguments of the call of f in a text."""
    parser = tool_formats()[name]({"f": schema})
    ((called, found),) = meant(fed(parser, cut(text, positions or [])))
    assert called == "f"
    return found


def whole_call(name: str, schema: Any, wanted: Any) -> str:
    """A call of f as the format writes it."""
    parser = tool_formats()[name]
    call = produced(parser.pieces("f", schema, 0), iter([wanted]))
    return parser.section.begin + call + parser.section.end


def follows(value: Any, schema: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


@EXAMPLES
@pytest.mark.parametrize("name", RAW + OTHERS)
def test_arguments_are_read_as_they_were_meant(name: str, examples: int) -> None:
    @thorough(examples)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        schema, found = data.draw(arguments())
        wanted = data.draw(found)
        assert follows(wanted, schema), "the test's own value"
        text = whole_call(name, schema, wanted)
        assert read(name, schema, text, data.draw(st.lists(st.integers(0, 200)))) == wanted

    holds()


@EXAMPLES
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", RAW + OTHERS)
def test_every_walk_along_a_grammar_ends_in_arguments_that_follow_the_schema(
    name: str, special: bool, examples: int
) -> None:
    parser = tool_formats()[name]
    walker = Walker(parser.special if special else ())
    plain = Walker()

    @thorough(examples)
    @given(arguments().map(lambda drawn: drawn[0]), st.integers(0, 2**32))
    def holds(schema: Any, seed: int) -> None:
        schema = schema | {"type": "object"}
        try:
            grammar = walker.grammar(job_of(parser, schema))
        except ValueError as error:
            if not any(reason in str(error) for reason in OF_FORMATS):
                with pytest.raises(ValueError):
                    plain.grammar({"kind": "json", "value": schema, "whitespace": None})
            return
        for number in range(3):
            text = walker.walk(grammar, seed + number, ends_of(parser.pieces("f", schema, 0)))
            assert follows(read(name, schema, text), schema), text

    holds()


def one_of_each(schema: Any) -> dict[str, Any]:
    """Arguments whose only one is required and follows a schema."""
    return {
        "type": "object",
        "properties": {"v": schema},
        "required": ["v"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({}, '{"a": [1]}', {"a": [1]}),
        ({}, "[1, 2]", [1, 2]),
        ({}, "5", "5"),
        ({}, "null", "null"),
        ({}, "{a}", "{a}"),
        ({"title": "V"}, "[1] and more", "[1] and more"),
        ({"type": ["string", "integer"]}, "5", "5"),
        ({"type": ["object", "string"]}, '{"a": 1}', '{"a": 1}'),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", "[1]"),
        ({"anyOf": [{"const": "auto"}, {"type": "integer"}]}, "5", 5),
        ({"anyOf": [{"const": "auto"}, {"type": "integer"}]}, "auto", "auto"),
        ({"enum": ["1", 1, 2]}, "1", "1"),
        ({"enum": ["1", 1, 2]}, "2", 2),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string", "nullable": True}, "nullify", "nullify"),
        ({"items": {"type": "integer"}}, "[1]", [1]),
        ({"properties": {"a": {}}}, '{"a": 1}', {"a": 1}),
        ({"allOf": [{"$ref": "#/properties/other"}]}, "[1]", [1]),
        ({"$ref": "#/properties/list/oneOf/1"}, "7", 7),
        ({"$ref": "#"}, '{"v": {}}', {"v": {}}),
        ({"$ref": "#/nowhere"}, "7", "7"),
        (True, "[]", []),
    ],
)
def test_a_text_becomes_what_its_schema_means(
    name: str, schema: Any, text: str, value: Any
) -> None:
    root = {
        "properties": {
            "v": schema,
            "other": {"type": "array"},
            "list": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        }
    }
    string = one_of_each({"type": "string"})
    assert read(name, root, whole_call(name, string, {"v": text})) == {"v": value}


@pytest.mark.parametrize("name", RAW)
def test_a_closing_mark_inside_json_ends_no_value(name: str) -> None:
    marks = ["</parameter>", "a</arg_value>b", "<escape>", '"</parameter>\\', "\n</parameter>\n"]
    for schema in ({"type": "array"}, {}, {"type": "object"}):
        value = {mark: [mark] for mark in marks} if schema == {"type": "object"} else [marks]
        text = whole_call(name, one_of_each(schema), {"v": value})
        assert read(name, one_of_each(schema), text) == {"v": value}
        assert read(name, one_of_each(schema), text, list(range(len(text)))) == {"v": value}


def test_json_that_is_broken_ends_at_its_closing_mark() -> None:
    schema = {"properties": {"v": {"type": "array"}, "w": {"type": "string"}}}
    text = '<function=f>\n<parameter=v>\n["a\n</parameter>\n<parameter=w>\nb\n</parameter>\n'
    assert read("qwen3_coder", schema, text + "</function>") == {"v": '["a', "w": "b"}


def test_an_argument_has_the_type_of_the_case_that_declares_it() -> None:
    schema = {"anyOf": [{"properties": {"n": {"type": "integer"}}}, {"properties": {"x": {}}}]}
    for name in RAW:
        assert read(name, schema, whole_call(name, {}, {"n": "7"})) == {"n": 7}
        assert read(name, schema, whole_call(name, {}, {"x": "7"})) == {"x": "7"}


def test_an_argument_has_the_type_of_the_patterns_that_its_name_has() -> None:
    patterns = {"^n_": {"type": "integer"}, "^s_[a-z]+$": {"type": "string"}}
    schema = {"type": "object", "patternProperties": patterns, "additionalProperties": False}
    for name in RAW:
        for key, value in (("n_1", 7), ("s_x", "7")):
            assert read(name, schema, whole_call(name, {}, {key: "7"})) == {key: value}
        lenient = {"patternProperties": {".*": {"type": "boolean"}}}
        assert read(name, lenient, whole_call(name, {}, {"a": "true"})) == {"a": True}


def test_arguments_that_no_schema_declares_have_the_types_of_others() -> None:
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    for name in RAW:
        assert read(name, schema, whole_call(name, {}, {"n": "7"})) == {"n": 7}


@pytest.mark.parametrize("name", RAW + OTHERS)
@pytest.mark.parametrize(
    ("schema", "held", "wrong"),
    [
        ({"$ref": "#/$defs/f", "$defs": {"f": one_of_each({"const": "x"})}}, {"v": "x"}, {}),
        ({"allOf": [one_of_each({"type": "integer"})]}, {"v": 7}, {"v": "x"}),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"k": 7}, {"k": "x"}),
        ({"type": "object"}, {"k": "x", "l": "y"}, None),
        ({"anyOf": [one_of_each({"const": "x"}), {"required": ["k"]}]}, {"k": "y"}, {"v": "y"}),
        (one_of_each({"const": "two words"}), {"v": "two words"}, {"v": "two"}),
        (one_of_each({"type": "string", "pattern": "^a+$"}), {"v": "aa"}, {"v": "ab"}),
        (one_of_each({"type": "string", "maxLength": 3}), {"v": "aé\n"}, {"v": "aaaa"}),
        (one_of_each({"type": "string", "minLength": 2}), {"v": "ab"}, {"v": "a"}),
        (one_of_each({"format": "date"}), {"v": "2024-02-29"}, {"v": "2023-02-30"}),
        (
            one_of_each({"$ref": "#/$defs/e"}) | {"$defs": {"e": {"enum": ["a", "b"]}}},
            {"v": "b"},
            {"v": "c"},
        ),
        (one_of_each({"anyOf": [{"const": "auto"}, {"type": "integer"}]}), {"v": 7}, {"v": "x"}),
        (one_of_each({"type": ["string", "null"], "pattern": "^a"}), {"v": None}, {"v": "x"}),
        ({"properties": {"a": INTEGER, "b": INTEGER}, "minProperties": 1}, {"b": 7}, {}),
        ({"properties": {"a": INTEGER, "b": INTEGER}, "minProperties": 1}, {"a": 7, "b": 7}, {}),
        ({"properties": {"a": False, "b": INTEGER}}, {"b": 7}, {"a": 7}),
        ({"properties": {"b": INTEGER}, "minProperties": 1}, {"b": 7}, {}),
        ({"additionalProperties": INTEGER, "maxProperties": 1}, {"b": 7}, {"a": 7, "b": 7}),
        (one_of_each({"properties": {"a": {"$ref": "#"}}, "type": "object"}), {"v": {}}, {"v": 7}),
        (
            {
                "properties": {"v": {"type": "integer"}},
                "patternProperties": {"^v$": {"maximum": 9}},
                "additionalProperties": False,
            },
            {"v": 7},
            {"v": 77},
        ),
        (
            {
                "oneOf": [
                    {"properties": {"k": {"const": "a"}, "n": {"type": "integer"}}},
                    {"properties": {"k": {"const": "b"}, "flag": {"type": "boolean"}}},
                ]
            }
            | {"required": ["k"], "type": "object"},
            {"k": "a", "n": 7},
            {"k": "b", "flag": 7},
        ),
        (
            {"properties": {"never": False, "v": {"type": "integer"}}, "required": ["v"]},
            {"v": 7},
            {"v": 7, "never": 7},
        ),
        (
            {"patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False},
            {"x_1": 7},
            {"y": 7},
        ),
        (
            {
                "properties": {"bad": {"$ref": "#/$defs/b"}, "v": {"type": "integer"}},
                "$defs": {"b": one_of_each({"$ref": "#/$defs/b"})},
            },
            {"v": 7},
            {"bad": {"v": {}}},
        ),
    ],
)  # fmt: skip
def test_a_grammar_allows_what_follows_the_schema_and_nothing_else(
    name: str, schema: Any, held: Any, wrong: Any
) -> None:
    parser = tool_formats()[name]
    walker = Walker(parser.special)
    grammar = walker.grammar(job_of(parser, schema))
    assert walker.allows(grammar, whole_call(name, schema, held))
    assert wrong is None or not walker.allows(grammar, whole_call(name, schema, wrong))
    assert read(name, schema, whole_call(name, schema, held)) == held


@pytest.mark.parametrize(
    ("name", "schema", "says"),
    [
        ("qwen3_coder", one_of_each({"const": "a</parameter>b"}), "ends a value"),
        ("qwen3_coder", {"type": "object", "properties": {"a>b": {}}}, "cannot be written"),
        ("minimax_m2", {"type": "object", "properties": {" a": {}}}, "cannot be written"),
        ("function_gemma", {"type": "object", "properties": {"a:b": {}}}, "cannot be written"),
        ("pythonic", {"type": "object", "properties": {"a-b": {}}}, "cannot be written"),
        ("glm45", {"type": "object", "minProperties": 2}, "minProperties cannot be held"),
        ("glm45", one_of_each({"type": "string", "format": "foo"}), "Unknown format"),
        ("glm45", one_of_each({"type": "string", "not": {"const": "a"}}), "not"),
        ("glm45", one_of_each({"type": "string", "pattern": "(^a|b)c"}), "only JSON formats"),
        ("glm45", {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "anyOf"),
        ("glm45", {"$ref": "#/nowhere"}, "leads to no schema"),
        ("glm45", one_of_each({"$ref": "#"}), "nothing that ends"),
        ("glm45", {"if": {}, "then": {}}, "Unimplemented keys"),
        ("glm45", one_of_each({"type": "string", "pattern": "["}), "regex"),
        ("seed_oss", {"allOf": [{"type": "object"}, {"type": "array"}]}, "nothing follows"),
        (
            "qwen3_coder",
            {
                "patternProperties": {"^a": {"type": "integer"}, "b$": {"type": "string"}},
                "additionalProperties": False,
            },
            "too many expressions",
        ),
    ],
)  # fmt: skip
def test_what_a_format_cannot_hold_is_refused_with_the_reason(
    name: str, schema: Any, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Walker().grammar(job_of(tool_formats()[name], schema))
