"""The laws of style, on small modules."""

from __future__ import annotations

import pytest

from tools.laws import CONDITIONALS_PER_THOUSAND, UNMENDED, Counts, breaches, by_room, count, table


def padded(text: str, lines: int) -> Counts:
    """The counts of `text` in a module of `lines` lines."""
    return count(text + "pass\n" * (lines - len(text.splitlines())))


@pytest.mark.parametrize(
    ("text", "packed"),
    [
        ("a, b = 1, 2\n", 1),
        ("a, self.b = x, ()\n", 1),
        ("a, (b, c) = x, y\n", 1),
        ("a, b = b, a\n", 0),
        ("x[i], x[j] = x[j], x[i]\n", 0),
        ("a, b = pair\n", 0),
        ("a, *b = values\n", 0),
        ("a = 1, 2\n", 0),
    ],
)
def test_two_bindings_in_a_statement_are_packed_but_for_swaps(text: str, packed: int) -> None:
    assert len(count(text).packed) == packed


@pytest.mark.parametrize(
    ("text", "conditionals", "folded"),
    [
        ("a = 1 if x else 2\n", 1, 0),
        ("a = (1 if x\n     else 2)\n", 1, 1),
        ("a = 1 if x else 2 if y else 3\n", 2, 1),
        ("a = f(1 if y else 2) if x else 3\n", 2, 1),
        ("a = f(1 if x else 2, 3 if y else 4)\n", 2, 0),
        ("if x:\n    a = 1\n", 0, 0),
    ],
)
def test_conditional_expressions_are_counted_and_folded_ones_named(
    text: str, conditionals: int, folded: int
) -> None:
    counts = count(text)
    assert (len(counts.conditionals), len(counts.folded)) == (conditionals, folded)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("found = 1\n", ["found"]),
        ("for each in x:\n    pass\n", ["each"]),
        ("def f(given, *, own=1): ...\n", ["given", "own"]),
        ("self._given = 1\n", ["given"]),
        ("class A:\n    at: int\n", ["at"]),
        ("class A:\n    kind: str\n", ["kind"]),
        ("self.kind = 1\n", []),
        ("x = found.given\n", []),
        ("f(given=1)\n", []),
        ("founder = 1\n", []),
    ],
)
def test_empty_names_are_those_that_the_sources_bind(text: str, names: list[str]) -> None:
    assert [fault.text for fault in count(text).names] == names


def test_blank_lines_do_not_count() -> None:
    assert count("a = 1\n\n\nb = 2\n").lines == 2


def test_a_breach_says_where_it_is_and_the_limit() -> None:
    files = {
        "jaxllm/new/a.py": count("x = 1\nfound = 1 if a else 2 if b else 3\n"),
        "jaxllm/new/b.py": padded("a, b = 1, 2\nc, d = 3, 4\n", 101),
        "jaxllm/tidy/c.py": padded("a, b = 1, 2\n", 10),
    }
    texts = list(breaches(files))
    assert texts[:3] == [
        "jaxllm/new/a.py:2: a conditional expression is folded: 1 if a else 2 if b else 3",
        "jaxllm/new/a.py:2: 'found' names nothing",
        "jaxllm/new/b.py: 19.8 packed in 1,000 lines; at most 3",
    ]
    assert [text.partition(":")[0] for text in texts[3:]] == ["jaxllm/new", "jaxllm/new"]


def test_a_room_holds_the_law_of_all_its_files() -> None:
    line = "a = 1 if x else 2\n"
    files = {f"jaxllm/new/{name}.py": padded(line, 90) for name in "abc"}
    assert CONDITIONALS_PER_THOUSAND < 1000 / 90
    texts = list(breaches(files))
    assert texts == ["jaxllm/new: 11.1 conditional expressions in 1,000 lines; at most 9"]


def test_a_room_that_is_not_mended_yet_is_counted_alone() -> None:
    room = min(UNMENDED)
    files = {f"{room}/a.py": padded("found, own = 1, 2\n", 1)}
    assert list(breaches(files)) == []
    assert "1000.0" in table(files)


def test_rooms_add_up_their_files() -> None:
    files = {"jaxllm/a/x.py": count("a, b = 1, 2\n"), "jaxllm/a/y.py": count("found = 1\n")}
    (room,) = by_room(files).values()
    assert (room.lines, len(room.packed), len(room.names)) == (2, 1, 1)
    assert room.per_thousand(room.packed) == 500
