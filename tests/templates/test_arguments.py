"""Arguments of calls keep their digits, and are understood as far as they go."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.chat_template import TemplateError
from jaxllm.templates.arguments import MAX_DEPTH, object_of, text_of, understood
from jaxllm.templates.history import arguments_for
from jaxllm.templates.traits import TemplateTraits

TEXTS = TemplateTraits(objects=False)
OBJECTS = TemplateTraits(texts=False)
EITHER = TemplateTraits()

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abé", max_size=3), inner),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"id": 123456789012345678901234567890}', {"id": 123456789012345678901234567890}),
        ('{"id": -9223372036854775809}', {"id": -9223372036854775809}),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ('{"big": %s}' % ("7" * 5000), {"big": "7" * 5000}),
        ('{"big": -%s}' % ("7" * 4300), {"big": -int("7" * 4300)}),
        ('{"far": 1e400, "near": 1.5}', {"far": "1e400", "near": 1.5}),
        ("", {}),
        (" \n", {}),
    ],
)  # fmt: skip
def test_an_object_has_all_its_digits_and_the_last_of_equal_names(text: str, value: Any) -> None:
    assert object_of(text) == value


@pytest.mark.parametrize(
    "text", ["null", "[1]", "no", '{"a": NaN}', '{"a": "\\ud800"}', '{"a": 1', '"x"', "5"]
)
def test_what_is_no_object_is_none(text: str) -> None:
    assert object_of(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"n": 1, "t": "cut', {"n": 1, "t": "cut"}),
        ('{"n": 1, "t": "c\\', {"n": 1, "t": "c"}),
        ('{"n": 1, "t": "c\\u00', {"n": 1, "t": "c"}),
        ('{"n": 1, "t', {"n": 1}),
        ('{"n": 12', {}),
        ('{"n": 12, "t": "whole"', {"n": 12, "t": "whole"}),
        ('{"n": [true, null \n', {"n": [True, None]}),
        ('{"n": {"t": "x"}, "key"', {"n": {"t": "x"}}),
        ('{"n": [1, {"m": "x', {"n": [1, {"m": "x"}]}),
        ('{"n": 123456789012345678901234567890, "m', {"n": 123456789012345678901234567890}),
        ("null", {}),
        ("[1, 2]", {}),
        ('[{"a": 1}]', {"a": 1}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("no JSON", {}),
        ('{"a": 1}{"b": 2}', {"a": 1}),
        ('{"a": {"b": [1]}} and {', {"a": {"b": [1]}}),
        ('{"a": "x", "n": NaN, "m": [-Infinity]}', {"a": "x", "n": "NaN", "m": ["-Infinity"]}),
        ('{"a": "x\\ud83d', {"a": "x\ufffd"}),
        ('{"a": "\\ud83d\\ude00\\udc00\\\\ud800"}', {"a": "\U0001f600\ufffd\\ud800"}),
    ],
)
def test_arguments_that_are_no_object_are_understood_as_far_as_they_go(
    text: str, value: Any
) -> None:
    assert understood(text) == value
    assert arguments_for(text, OBJECTS) == value
    assert arguments_for(text, TEXTS) == text
    assert arguments_for(text, EITHER) == text


@given(st.dictionaries(st.text("abé", max_size=3), JSON, max_size=3), st.integers(0, 200))
def test_every_beginning_of_an_object_is_understood(value: dict[str, Any], cut: int) -> None:
    text = text_of(value)
    assert object_of(text) == value
    found = understood(text[:cut])
    assert isinstance(found, dict)
    assert list(found) == list(value)[: len(found)]
    for name in list(found)[:-1]:
        assert found[name] == value[name]


@pytest.mark.parametrize("arguments", ["", None, "  "])
def test_no_arguments_are_an_empty_object(arguments: Any) -> None:
    assert arguments_for(arguments, TEXTS) == "{}"
    assert arguments_for(arguments, OBJECTS) == arguments_for(arguments, EITHER) == {}


def test_a_template_of_texts_gets_the_clients_own() -> None:
    text = '{ "a":1.10,"a" : 2e1 }'
    assert arguments_for(text, TEXTS) == text
    assert arguments_for({"a": "é", "b": [1]}, TEXTS) == '{"a": "é", "b": [1]}'


def test_arguments_that_nest_deeply_are_refused_in_linear_time() -> None:
    whole = '{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1)
    for arguments in (whole, json.loads(whole)):
        with pytest.raises(TemplateError, match="nest it less deeply"):
            arguments_for(arguments, OBJECTS)
    began = time.process_time()
    assert understood('{"a":' * 40_000 + '"x') == {}
    assert time.process_time() - began < 2
