"""Integers of calls that came as objects keep all their digits, and no other field changes."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.server.requests.bodies import read_small
from jaxllm.server.requests.digits import may_hold_long
from tests.server.requests.test_large_bodies import read_large

BIG = 123456789012345678901234567890
numbers = st.integers(-(10**30), 10**30)
arguments = st.dictionaries(
    st.text("ab", max_size=2), numbers | st.lists(numbers, max_size=3) | st.none(), max_size=3
)


def written(value: Any) -> bytes:
    """JSON with all digits."""
    return json.dumps(value).encode()


@given(arguments, arguments)
def test_arguments_of_both_protocols_have_all_their_digits(
    one: dict[str, Any], two: dict[str, Any]
) -> None:
    messages = [
        {"role": "user", "content": "1234567890123456789012"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "input": one}, "x"]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": two}}]},
    ]
    found = read_small(written({"messages": messages, "max_tokens": BIG}))
    assert found["messages"] == messages
    assert isinstance(found["max_tokens"], float), "other fields are read as before"


def test_large_bodies_keep_digits_too() -> None:
    block = {"type": "tool_use", "id": "a", "input": {"n": BIG}}
    messages = [{"role": "user", "content": "x" * 400_000}, {"role": "user", "content": [block]}]
    found = read_large(written({"messages": messages}))
    assert found["messages"] == messages


@pytest.mark.parametrize(
    "messages",
    [None, "12345678901234567890", [5, None], [{"content": 5, "tool_calls": "x"}],
        [{"content": [{"input": 12345678901234567890}], "tool_calls": [{"function": 5}]}]],
)  # fmt: skip
def test_messages_of_no_form_are_left_to_their_checks(messages: Any) -> None:
    body = {"messages": messages, "seed": 12345678901234567890}
    assert read_small(written(body)) == orjson.loads(written(body))


def test_only_long_digits_are_looked_at_again() -> None:
    assert may_hold_long(b"[9223372036854775808]")
    assert not may_hold_long(b'["123456789012345678 123456789012345678"]')
