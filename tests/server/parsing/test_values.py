"""Values are read as JSON reads them, and repaired where models write other than JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.server.parsing.schema import typed, types
from jaxllm.server.parsing.values import EncodedObject, Value, as_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


def written(text: str, python: bool = False) -> str:
    """What is written for a text that comes by characters."""
    value = Value(python)
    out = []
    for char in text:
        at, piece = value.read(char, 0, 1)
        out.append(piece)
        if value.failed or at == 0:
            break
    return "".join(out)


@settings(deadline=None)
@given(VALUES, st.sampled_from([None, 1]))
def test_json_passes_unchanged(value, indent):
    text = json.dumps([value], indent=indent)
    assert written(text) == text
    assert json.loads(as_json(json.dumps(value, ensure_ascii=False))) == value


@settings(deadline=None)
@given(VALUES)
def test_python_becomes_json(value):
    assert json.loads(as_json(repr(value), python=True)) == value


@settings(deadline=None)
@given(st.text('{}[]",:\\ \n01.e-truflas', max_size=20))
def test_what_is_complete_is_json(text):
    made = as_json(text)
    if made is not None:
        json.loads(made)
    try:
        json.loads(text)
    except ValueError:
        return
    assert made is not None and made.strip() == text.strip()


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ('["a\nb\tc"]', ["a\nb\tc"]),
        (r'["\d+ \' \u00e9 \u00zz"]', ["\\d+ ' é \\u00zz"]),
        ("[1, 2, ]", [1, 2]),
        ('{"a": True, "b": None,}', {"a": True, "b": None}),
    ],
)
def test_common_slips_are_repaired(text, meant):
    assert json.loads(as_json(text)) == meant
    assert json.loads(written(text)) == meant


@pytest.mark.parametrize(
    "text",
    ["[01]", "[1.]", "[nan]", "[,]", "{,}", '{"a" 1}', "[1}", "[1 2]", "[" + "1" * 2000 + "]"],
)
def test_what_is_no_value_is_refused(text):
    assert as_json(text) is None


def test_types_follow_references_and_stop_at_circles():
    root = {
        "$defs": {"A": {"$ref": "#/$defs/A"}, "B": {"anyOf": [{"type": "null"}, {"enum": [1]}]}}
    }
    assert types({"$ref": "#/$defs/A"}, root) == frozenset()
    assert types({"$ref": "#/$defs/B"}, root) == {"null", "integer"}
    assert types({"$ref": "http://x"}, root) == types(5, root) == frozenset()


@pytest.mark.parametrize(
    ("text", "schema", "meant"),
    [
        ("3", {"type": "integer"}, 3),
        ("3", {"type": "string"}, "3"),
        ("3", {}, "3"),
        ("three", {"type": "integer"}, "three"),
        ("null", {"type": ["string", "null"]}, None),
        ("nullify", {"type": ["string", "null"]}, "nullify"),
        ("False", {"type": "boolean"}, False),
        ("{'a': [1]}", {"type": "object"}, {"a": [1]}),
        ("[1]", {"type": "object"}, "[1]"),
    ],
)
def test_texts_get_the_type_of_their_schema(text, schema, meant):
    assert json.loads(typed(text, schema, schema)) == meant


def encoded(text: str, size: int) -> tuple[str, bool]:
    """What is written for a string that comes in pieces, and whether it is an object."""
    value = EncodedObject()
    out = []
    for begin in range(0, len(text), size):
        piece = text[begin : begin + size]
        at, written = value.read(piece, 0, len(piece))
        assert at == len(piece) or value.done or value.failed
        out.append(written)
    value.end()
    return "".join(out), value.done and not value.failed


@settings(deadline=None)
@given(
    st.dictionaries(st.text(max_size=4), VALUES, max_size=4),
    st.booleans(),
    st.booleans(),
    st.integers(1, 5),
)
def test_an_object_that_is_encoded_twice_is_that_object(
    wanted: dict, inner: bool, outer: bool, size: int
):
    once = json.dumps(wanted, ensure_ascii=inner)
    text, whole = encoded(json.dumps(once, ensure_ascii=outer), size)
    assert whole and json.loads(text) == wanted


@pytest.mark.parametrize("text", ["", " ", "null", " null ", "{}", " { } "])
def test_text_that_says_nothing_is_the_empty_object(text: str):
    for size in (1, 2, 99):
        written, whole = encoded(json.dumps(text), size)
        assert whole and json.loads(written) == {}


@pytest.mark.parametrize("text", ["[]", "1", "nul", "nully", "{} x", '{"a": oops}', '{"a": 1', "{"])
def test_other_text_is_no_object(text: str):
    assert {encoded(json.dumps(text), size) for size in (1, 2, 99)} == {
        (encoded(json.dumps(text), 1)[0], False)
    }
