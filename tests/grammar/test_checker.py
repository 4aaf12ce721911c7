"""Compilation in a process that may be killed: refusals, costs, and recovery."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from jaxllm.grammar import checker as module
from jaxllm.grammar.checker import MAX_KEPT, MAX_KEPT_BYTES, Checker, Job, _size, job_of
from jaxllm.grammar.compiler import ByteTokens
from jaxllm.grammar.limits import BUDGETS
from jaxllm.grammar.pieces import Arguments, Composition, Layout
from jaxllm.grammar.structure import StructuredOutputsParams, StructureError

MANY_FILES = 4096  # that this process may have open, beside those of other tests
LARK = "start: %%json %s"
LENIENT = '{"lenient": true, "coerce_one_of": true}'
SPECIALS = {"<|end|>": 300, "<tool_call>": 301, "[TOOL]": 302}


def test_bytes_and_special_tokens_have_ids_of_their_own() -> None:
    tokens = ByteTokens({"<s>": 0, "<x>": 100, "<y>": 5000})
    assert len(tokens.tokens) == 5002
    assert {tokens.tokens[id] for id in tokens(bytes(range(256)))} == {
        bytes([byte]) for byte in range(256)
    }
    assert [tokens.tokens[id] for id in tokens.special_token_ids] == [
        b"<s>",
        b"<x>",
        b"<y>",
        b"<eos>",
    ]


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    checker = Checker(SPECIALS)
    yield checker
    checker.end_processes()


def bomb(patterns: int) -> dict[str, Any]:
    return {
        "allOf": [
            {"type": "string", "pattern": f".*{chr(97 + n)}.{{3}}.*"} for n in range(patterns)
        ]
    }


def why(checker: Checker, **given: Any) -> str:
    with pytest.raises(StructureError) as error:
        checker.compile_params(StructuredOutputsParams(**given))
    return str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        {"json": True},
        {
            "json": {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "title": "T",
                "type": "array",
                "items": {"$ref": "#"},
            }
        },
        {"json": {"type": "array", "minItems": 1_000_000, "items": {"type": "integer"}}},
        {"json_object": True},
        {"regex": "(a+)+b"},
        {"regex": r"\w{1,5000}"},
        {"regex": "^(yes|no)$"},
        {"choice": ["a", "ab", '"', "\n", "ü😀", "\x7f"]},
        {"grammar": 'start: start "a" | "b"'},
        {"grammar": 'root ::= "yes" | "no"'},
        {"grammar": 'start: <tool_call> "a"'},
        {"grammar": LARK % '{"type": "object", "x-guidance": {"whitespace_flexible": false}}'},
        {"grammar": 'start: "%json {" /%json [{]/ // %json {'},
    ],
)
def test_what_compiles_gives_a_grammar(checker: Checker, given: dict[str, Any]) -> None:
    assert checker.compile_params(StructuredOutputsParams(**given))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"json": {"type": "foo"}}, "foo"),
        ({"json": {"not": {}}}, "not"),
        ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, "not"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        (
            {"json": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}},
            "not supported. Where several cases may match, write anyOf",
        ),
        (
            {
                "json": {
                    "oneOf": [{"type": "string"}, {"maxLength": 3}],
                    "x-guidance": {"coerce_one_of": True},
                }
            },
            "oneOf",
        ),
        (
            {
                "grammar": LARK
                % ('{"type": "array", "uniqueItems": true, "x-guidance": ' + LENIENT + "}")
            },
            "uniqueItems",
        ),
        ({"grammar": LARK % ('{"not": {}, "x-guidance": ' + LENIENT + "}")}, '"not"'),
        (
            {
                "grammar": LARK
                % (
                    '{"oneOf": [{"type": "string"}, {"maxLength": 3}], "x-guidance": '
                    + LENIENT
                    + "}"
                )
            },
            "oneOf",
        ),
        ({"grammar": LARK % '{"const": 9007199254740993}'}, "rounded"),
        ({"grammar": LARK % ('{"not":' * 70 + "{}" + "}" * 70)}, "nests deeper"),
        ({"grammar": LARK % ("[" * 60000)}, "JSON"),
        ({"grammar": LARK % '{"type": "object"'}, "not valid JSON"),
        ({"grammar": LARK % '{"x-guidance": 1}'}, "x-guidance"),
        (
            {
                "grammar": '# /\nstart: /\\/"/ "//" %lark {\nstart: %json{"not":{},"x-guidance":'
                + LENIENT
                + "}\n}"
            },
            '"not"',
        ),
        (
            {
                "structural_tag": {
                    "structures": [
                        {
                            "begin": "<f>",
                            "schema": {"not": {}, "x-guidance": {"lenient": True}},
                            "end": "</f>",
                        }
                    ],
                    "triggers": ["<f>"],
                }
            },
            "not",
        ),
        ({"json": {"type": "string", "format": "foo"}}, "foo"),
        ({"json": {"type": "string", "pattern": "["}}, "regex"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 1}}, "minimum"),
        ({"json": False}, "not"),
        ({"json": {"$ref": "#"}}, "nothing that ends"),
        (
            {"json": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}},
            "nothing that ends can match it: each value holds another one",
        ),
        ({"json": {"type": "object", "minProperties": 2}}, "keys may repeat"),
        ({"json": {"$ref": "http://localhost/schema"}}, "http://localhost/schema"),
        ({"json": {"$ref": "file:///etc/hostname"}}, "file"),
        ({"json": {"$ref": "#/$defs/a"}}, "does not exist"),
        (
            {
                "json": {
                    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                    "$ref": "#/$defs/a",
                }
            },
            "json",
        ),
        (
            {
                "json": {
                    "type": "object",
                    "properties": {f"p{n}": {"type": "string"} for n in range(600)},
                }
            },
            "max",
        ),
        ({"json": {"type": "object"}, "whitespace_pattern": "["}, "regex"),
        ({"regex": "["}, "regex"),
        ({"regex": "ab\\\\\\"}, "backslash"),
        ({"regex": "(?=a)b"}, "look"),
        ({"regex": r"(a)\1"}, "backref"),
        ({"regex": "a{1000000}"}, "too"),
        ({"regex": "a" * 60_000}, "too long"),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": "\x00\x01"}, "GBNF"),
        ({"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000}, "deep"),
        ({"grammar": "start: <|unknown|>"}, "unknown"),
    ],
)
def test_what_does_not_compile_is_refused_with_the_reason(
    checker: Checker, given: dict[str, Any], says: str
) -> None:
    assert says in why(checker, **given)


def test_a_schema_that_explodes_is_killed_within_its_budget_and_the_next_one_compiles(
    checker: Checker,
) -> None:
    checker.compile_params(StructuredOutputsParams(regex="first"))
    assert checker._compilers[-1]._process is not None
    compiler = psutil.Process(checker._compilers[-1]._process.pid)
    used = sum(compiler.cpu_times()[2:4])
    assert "too much time or memory" in why(checker, json=bomb(22))
    assert BUDGETS[-1] / 2 < sum(compiler.cpu_times()[2:4]) - used < 3 * BUDGETS[-1], (
        "processor time of its ended forks"
    )
    assert compiler.is_running() and not compiler.children() and compiler.num_threads() == 1, (
        "what forks has one thread"
    )
    assert checker.compile_params(StructuredOutputsParams(regex="second"))


def test_a_verdict_is_kept_so_that_a_bomb_costs_its_budget_once(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    why(checker, json=bomb(23))
    grammar = checker.compile_params(StructuredOutputsParams(regex="third"))
    monkeypatch.setattr(checker, "_compilers", [])
    assert "too much" in why(checker, json=bomb(23))
    assert checker.compile_params(StructuredOutputsParams(regex="third")) == grammar


def test_what_takes_long_is_given_up_soon_by_who_has_others_waiting() -> None:
    own = Checker(SPECIALS)
    slow, quick, wrong = (
        job_of(StructuredOutputsParams(**given))
        for given in ({"json": bomb(17)}, {"regex": "a+"}, {"regex": "["})
    )
    grammar = own.compile_within(quick, 0)
    assert grammar is not None and own.cached_grammar(quick) == grammar
    assert own._compilers[0]._process is not None
    compiler = psutil.Process(own._compilers[0]._process.pid)
    assert own.compile_within(slow, 0) is None and own.cached_grammar(slow) is None, "no verdict"
    assert sum(compiler.cpu_times()[2:4]) < BUDGETS[1], "the kernel looks once in some milliseconds"
    assert own.compile_within(slow, 1) is None and own.cached_grammar(slow) is None, (
        "nor from the second"
    )
    with pytest.raises(StructureError, match="regex"):
        own.compile_within(wrong, 0)
    assert own._compilers[-1]._process is None, "no process that nobody needs"
    with pytest.raises(StructureError, match="too much"):
        own.compile_within(slow, len(BUDGETS) - 1)
    with pytest.raises(StructureError, match="too much"):
        own.compile_within(slow, 0)
    assert (
        own.compile_within(quick, 0) == grammar and own._compilers[0]._process.pid == compiler.pid
    ), "nothing starts again"
    own.end_processes()
    assert own._compilers[0]._process is None


def test_a_compiler_that_was_killed_from_outside_is_started_again(checker: Checker) -> None:
    checker.compile_params(StructuredOutputsParams(regex="before"))
    assert checker._compilers[-1]._process is not None
    checker._compilers[-1]._process.send_signal(signal.SIGKILL)
    checker._compilers[-1]._process.wait()
    assert checker.compile_params(StructuredOutputsParams(regex="after"))


def test_verdicts_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = Checker({})
    monkeypatch.setattr(
        checker._compilers[-1], "verdict_on", lambda line: module.Verdict("g" * 40_000, "")
    )
    for n in range(MAX_KEPT + 500):
        checker.compile_params(StructuredOutputsParams(regex=f"a{n}"))
    assert len(checker._kept) <= MAX_KEPT
    assert checker._kept_bytes == sum(map(_size, checker._kept.values())) <= MAX_KEPT_BYTES


def test_a_grammar_compiles_beside_thousands_of_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MANY_FILES:
        resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (MANY_FILES if hard == resource.RLIM_INFINITY else min(MANY_FILES, hard), hard),
        )
    own, files = Checker({}), [os.open(os.devnull, os.O_RDONLY) for _ in range(1050)]
    try:
        assert own.compile_params(StructuredOutputsParams(regex="a"))
    finally:
        for file in files:
            os.close(file)
        own.end_processes()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_compiler_ends_with_its_owner() -> None:
    own = Checker({})
    own.compile_params(StructuredOutputsParams(regex="a"))
    assert own._compilers[-1]._process is not None and own._compilers[-1]._process.stdin is not None
    process = own._compilers[-1]._process
    process.stdin.close()  # as the end of this process would
    assert process.wait(20) == 0
    own.end_processes()
    assert own._compilers[-1]._process is None


def test_a_round_trip_is_quick(checker: Checker) -> None:
    checker.compile_params(StructuredOutputsParams(regex="warm"))
    found = []
    for n in range(20):
        start = time.perf_counter()
        checker.compile_params(StructuredOutputsParams(json={"type": "object", "title": str(n)}))
        found.append(time.perf_counter() - start)
    assert min(found) < 0.1, "the best, for the machine may be busy"


def arguments(schema: Any) -> Job:
    """The job of a call's arguments in a format with tags."""
    around = ("<p=", "</p>")
    layout = Layout(text=around, json=around, key=".+", new_key="[a-z]+", ends_text=("</p>",))
    return job_of(Composition("calls", (Arguments(schema, layout),)))


def two_each(count: int, keyword: str, one: Any, other: Any) -> dict[str, Any]:
    """A schema with two cases, so many times."""
    return {"allOf": [{"anyOf": [{keyword: one}, {keyword: other}]} for _ in range(count)]}


def chain(count: int) -> dict[str, Any]:
    """References that lead to each other."""
    definitions = {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(count)}
    return {"$ref": "#/$defs/0", "$defs": definitions}


def mutual(count: int) -> dict[str, Any]:
    """Schemas each of which holds all others."""
    names = [str(n) for n in range(count)]
    parts = {name: {"$ref": f"#/$defs/{name}"} for name in names}
    objects = {name: {"type": "object", "properties": parts, "required": [name]} for name in names}
    return {"$ref": "#/$defs/0", "$defs": objects}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"properties": {"a": bomb(22)}}, "too much time or memory"),
        (two_each(30, "required", ["a"], ["b"]), "simpler"),
        (chain(900), "simpler"),
        ({"properties": {"a": two_each(30, "minLength", 1, 2)}}, "simpler"),
        (mutual(30), "nothing that ends can match it"),
        ({"patternProperties": {f"^a{n}": {} for n in range(40)}}, "32"),
    ],
    ids=["patterns", "cases", "chain", "values", "mutual", "kinds"],
)  # fmt: skip
def test_arguments_that_explode_cost_their_budget_at_most(
    checker: Checker, schema: dict[str, Any], says: str
) -> None:
    checker.compile_params(StructuredOutputsParams(regex="first"))
    assert checker._compilers[-1]._process is not None
    compiler = psutil.Process(checker._compilers[-1]._process.pid)
    used = sum(compiler.cpu_times()[2:4])
    with pytest.raises(StructureError, match=says):
        checker.compile_within(arguments(schema), len(BUDGETS) - 1)
    assert sum(compiler.cpu_times()[2:4]) - used < 3 * BUDGETS[-1]
    assert checker.compile_within(arguments({"properties": {"a": {}}}), len(BUDGETS) - 1)
