"""Simple patterns are tried on names, quickly; others are not."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.grammar.patterns import found_in


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        ("^x-", "x-1", True), ("^x-", "ax-1", False), (".*", "q", True), ("", "", True),
        ("^[a-z]+$", "abc", True), ("^[a-z]+$", "abc1", False), ("^(a|b)$", "ab", False),
        ("b$", "ab", True), ("b$", "ab\n", False), (r"^\d+$", "\u0663", False),
        (r"^S_\w{1,4}$", "S_ab", True), (r"\$", "a$", True), (r"^[a\-z]$", "-", True),
    ],
)  # fmt: skip
def test_a_simple_pattern_is_found_or_not(pattern: str, text: str, found: bool) -> None:
    assert found_in(pattern, text) is found


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "^a.*b.*c$", "[", r"^\p{L}$", "^a|b$", "(?=a)b", "a?" * 20 + "a" * 20, "x" * 600],
)
def test_other_patterns_are_not_tried(pattern: str) -> None:
    assert found_in(pattern, "a" * 20) is None


def test_letters_beyond_ascii_and_long_names_are_not_tried() -> None:
    assert found_in(r"^\w+$", "gr\xf6\xdfe") is None
    assert found_in(".", "a" * 300) is None


ATOMS = st.sampled_from(["a", "b", "[ab]", ".", "[^a]", r"\w", "(a|b)", r"\."])
COUNTS = st.sampled_from(["", "*", "+", "?", "{2}", "{1,3}", "{0,99}", "{5,}"])


@given(st.lists(st.tuples(ATOMS, COUNTS), max_size=6), st.booleans(), st.booleans(), st.text("ab."))
def test_what_is_tried_is_found_as_python_finds_it_and_soon(
    atoms: list[tuple[str, str]], starts: bool, ends: bool, text: str
) -> None:
    body = "".join(atom + count for atom, count in atoms)
    pattern = "^" * starts + body + "$" * ends
    found = found_in(pattern, text)
    assert found is None or found == (re.search(pattern, text) is not None)
    begun = time.thread_time()
    found_in(pattern, "ab" * 127 + "c")
    assert time.thread_time() - begun < 0.5
