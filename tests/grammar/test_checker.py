"""Compilation in a process that may be killed: refusals, costs, and recovery."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from jaxllm.background.process import ROOT
from jaxllm.grammar import checker as module
from jaxllm.grammar.checker import MAX_KEPT, MAX_KEPT_BYTES, Checker, Job, job_of
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


def compiler_of(checker: Checker, lane: int = -1) -> psutil.Process:
    """The process of a lane."""
    pid = checker.compilers[lane].pid
    assert pid is not None
    return psutil.Process(pid)


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
    compiler = compiler_of(checker)
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
    monkeypatch.setattr(checker, "compilers", [])
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
    compiler = compiler_of(own, 0)
    assert own.compile_within(slow, 0) is None and own.cached_grammar(slow) is None, "no verdict"
    assert sum(compiler.cpu_times()[2:4]) < BUDGETS[1], "the kernel looks once in some milliseconds"
    assert own.compile_within(slow, 1) is None and own.cached_grammar(slow) is None, (
        "nor from the second"
    )
    with pytest.raises(StructureError, match="regex"):
        own.compile_within(wrong, 0)
    assert own.compilers[-1].pid is None, "no process that nobody needs"
    with pytest.raises(StructureError, match="too much"):
        own.compile_within(slow, len(BUDGETS) - 1)
    with pytest.raises(StructureError, match="too much"):
        own.compile_within(slow, 0)
    assert own.compile_within(quick, 0) == grammar
    assert own.compilers[0].pid == compiler.pid, "nothing starts again"
    own.end_processes()
    assert own.compilers[0].pid is None


def test_a_compiler_that_was_killed_from_outside_is_started_again(checker: Checker) -> None:
    checker.compile_params(StructuredOutputsParams(regex="before"))
    compiler = compiler_of(checker)
    compiler.send_signal(signal.SIGKILL)
    while compiler.status() != psutil.STATUS_ZOMBIE:  # until its owner waits for it
        time.sleep(0.01)
    assert checker.compile_params(StructuredOutputsParams(regex="after"))


def test_verdicts_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = Checker({})
    verdict = module.Verdict("", "")
    monkeypatch.setattr(checker.compilers[-1], "verdict_on", lambda line: verdict)

    def kept(letter: str, count: int) -> list[bool]:
        """Whether each of `count` verdicts is kept, after the last one."""
        jobs = [job_of(StructuredOutputsParams(regex=f"{letter}{n}")) for n in range(count)]
        for job in jobs:
            checker.compile_within(job, len(BUDGETS) - 1)
        return [checker.cached_grammar(job) is not None for job in jobs]

    assert kept("a", MAX_KEPT + 500) == [False] * 500 + [True] * MAX_KEPT, "the oldest go"
    verdict = module.Verdict("g" * 40_000, "")
    size = 40_000 + 64  # and what an entry takes
    count = MAX_KEPT_BYTES // size
    assert kept("b", count + 500) == [False] * 500 + [True] * count


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
    code = """
import os
from jaxllm.grammar.checker import Checker
from jaxllm.grammar.structure import StructuredOutputsParams
own = Checker({})
own.compile_params(StructuredOutputsParams(regex="a"))
print(own.compilers[-1].pid, flush=True)
os._exit(1)  # without a word to anybody
"""
    owner = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, text=True)
    pid = int(owner.stdout)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not owner.stderr, "it ends without a fault"


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
    compiler = compiler_of(checker)
    used = sum(compiler.cpu_times()[2:4])
    with pytest.raises(StructureError, match=says):
        checker.compile_within(arguments(schema), len(BUDGETS) - 1)
    assert sum(compiler.cpu_times()[2:4]) - used < 3 * BUDGETS[-1]
    assert checker.compile_within(arguments({"properties": {"a": {}}}), len(BUDGETS) - 1)
