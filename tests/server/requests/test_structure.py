"""Structured output over HTTP: every way to ask for it reaches the engine compiled, and a hostile
grammar costs its sender alone."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from jaxllm.background.process import JobProcess
from jaxllm.grammar.checker import Checker, Job
from jaxllm.grammar.structure import CompilerLost
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}
BOMB = {"allOf": [{"type": "string", "pattern": f".*{chr(97 + n)}.{{3}}.*"} for n in range(22)]}
WAYS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, '"type": "object"'),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "strict": True, "schema": SCHEMA},
            }
        },
        '"city"',
    ),
    ({"response_format": TAG}, "<f>"),
    ({"structured_outputs": {"json": SCHEMA}}, '"city"'),
    (
        {
            "structured_outputs": {
                "json": json.dumps(SCHEMA),
                "regex": None,
                "whitespace_pattern": "[ ]",
            }
        },
        '"whitespace_pattern": "[ ]"',
    ),
    ({"structured_outputs": {"json_object": True}}, '"type": "object"'),
    ({"structured_outputs": {"regex": "a+"}}, "/a+/"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, '"yes" | "no"'),
    ({"structured_outputs": {"grammar": 'start: "x"'}}, '"x"'),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "<f>"),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "outlines"}, '"city"'),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]"}, '"whitespace_pattern": "[ ]"'),
    ({"guided_json_object": True}, '"type": "object"'),
    ({"guided_json_object": False, "guided_regex": "b+"}, "/b+/"),
    ({"guided_choice": ["yes", "no"]}, '"yes" | "no"'),
    ({"guided_grammar": 'root ::= "x"'}, '"x"'),
    ({"structural_tag": json.dumps(TAG)}, "<f>"),
    ({"structural_tag": TAG, "guided_whitespace_pattern": "[ ]"}, '"whitespace_pattern": "[ ]"'),
    ({"guided_decoding": {"regex": "a+", "backend": "outlines"}}, "/a+/"),
]


def post(server: Running, chat: bool, **fields: Any) -> Any:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "abc"}
    return server.post(path, {"model": "fake", "max_tokens": 2} | prompt | fields)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(("fields", "holds"), WAYS, ids=range(len(WAYS)))
def test_every_way_to_ask_reaches_the_engine_compiled(
    server: Running, chat: bool, fields: dict[str, Any], holds: str
) -> None:
    assert post(server, chat, **fields).status == 200
    asked = server.control.added[-1]
    assert holds in (asked.grammar or "")
    assert asked.params.structured_outputs is None


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("structured_outputs", {}), ("structured_outputs", "a"),
        ("structured_outputs", {"json": {}, "regex": "a"}), ("structured_outputs", {"jsn": {}}),
        ("structured_outputs", {"regex": "["}),
        ("guided_json", []), ("guided_json", "{"), ("guided_json", {"type": "foo"}),
        ("guided_json", {"not": {}}), ("guided_regex", ""),
        ("guided_regex", 5), ("guided_regex", "(?=a)b"), ("guided_regex", "x" * (1 << 20)),
        ("guided_choice", []), ("guided_choice", [""]),
        ("guided_choice", "a"), ("guided_grammar", ""), ("guided_grammar", "start: foo"),
        ("guided_json_object", 1),
        ("guided_whitespace_pattern", " "), ("response_format", {"type": "nonsense"}),
        ("response_format", {}), ("response_format", "text"),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a",
            "schema": {"$ref": "#"}}}),
        ("response_format", {"type": "structural_tag"}), ("structural_tag", "x"),
        ("structural_tag", {"format": {"type": "any_text"}}),
        ("guided_decoding", {}), ("guided_decoding", {"regx": "a"}),
        ("guided_json", {"const": 1234567890123456789}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a",
            "schema": {"minimum": 10**20}}}),
        ("structured_outputs", {"json": json.dumps({"const": 2**53 + 1})}),
    ],
)  # fmt: skip
def test_a_constraint_that_is_none_is_refused_by_name(
    server: Running, chat: bool, field: str, value: Any
) -> None:
    before = len(server.control.added)
    answer = post(server, chat, **{field: value})
    assert answer.status == 400
    assert answer.error["param"] == field
    assert field in answer.error["message"]
    assert len(answer.body) < 2000
    assert len(server.control.added) == before


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"structured_outputs": None, "guided_json_object": False},
    ],
)
def test_who_asks_for_nothing_has_no_grammar(server: Running, fields: dict[str, Any]) -> None:
    assert post(server, False, **fields).status == 200
    assert server.control.added[-1].grammar is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
    ],
)
def test_two_constraints_at_once_are_refused(
    server: Running, fields: dict[str, Any], named: str
) -> None:
    error = post(server, False, **fields).error
    assert error["param"] == named
    assert "both constrain the output" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_leaves_no_token_is_the_fault_of_the_field_that_was_sent(
    fresh: Running, stream: bool
) -> None:
    fresh.control.error_delta = "structured_outputs"
    for field, value in (
        ("guided_regex", "a"),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"regex": "b"}),
    ):
        for chat in (False, True):
            answer = post(fresh, chat, **{field: value, "stream": stream})
            assert (answer.status, answer.error["param"], answer.error["code"]) == (
                400,
                field,
                "unsatisfiable",
            )
    fresh.control.error_delta = "allowed_token_ids"
    assert post(fresh, False, guided_regex="a").error["param"] == "allowed_token_ids"


def test_a_bomb_is_refused_within_its_budget_while_a_stream_goes_on(server: Running) -> None:
    control = server.control
    body = {"model": "fake", "prompt": "abcd", "stream": True, "max_tokens": 60, "ignore_eos": True}
    with server.begin("/v1/completions", body) as stream:
        assert stream.status() == 200
        control.go.clear()
        start = time.monotonic()
        answer = post(
            server,
            True,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "bomb", "schema": BOMB},
            },
        )
        assert time.monotonic() - start < 3 * JobProcess.wall_seconds
        assert answer.status == 400
        assert (answer.error["param"], answer.error["code"]) == (
            "response_format",
            "invalid_grammar",
        )
        assert "too much time" in answer.error["message"]
        assert post(server, True, guided_json={"type": "nonsense"}).status == 400
        control.go.set()
        while b"[DONE]" not in (line := stream.line()):
            assert line, "the stream ended early"


def test_a_grammar_whose_compiler_was_lost_may_be_sent_again(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(checker: Checker, job: Job, lane: int) -> None:
        raise CompilerLost("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Checker, "compile_within", lost)
        answer = post(server, False, guided_regex="[abc]{7}")
    assert (answer.status, answer.error["code"]) == (
        503,
        "grammar_compiler_lost",
    ) and "guided_regex" in answer.error["message"]
    assert answer.headers["retry-after"]
    assert post(server, False, guided_regex="[abc]{7}").status == 200


@pytest.mark.parametrize(
    "fields", [{"guided_regex": "a"}, {"response_format": {"type": "json_object"}}]
)
def test_a_beam_search_takes_no_structure(server: Running, fields: dict[str, Any]) -> None:
    answer = post(server, False, use_beam_search=True, n=2, temperature=0, **fields)
    assert answer.status == 400
    assert "beam" in answer.error["message"]


def test_a_server_without_a_tokenizer_refuses_it() -> None:
    with Running(None) as server:
        answer = server.post(
            "/v1/completions", {"model": "fake", "prompt": [1, 2], "guided_regex": "a"}
        )
    assert answer.status == 400
    assert answer.error["param"] == "guided_regex"
    assert "tokenizer" in answer.error["message"]


def test_the_log_names_the_field_and_shows_no_text(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.server.harness import with_settings

    with (
        caplog.at_level("INFO", logger="jaxllm.server"),
        Running(tokenizer, with_settings(log_requests=True)) as server,
    ):
        post(server, False, guided_choice=["secret"])
    assert "guided_choice" in caplog.text
    assert "secret" not in caplog.text
