"""One bad request fails alone, in the envelope, with the right status and the field's name; the
server goes on as before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running, with_settings

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def small(tokenizer: Tokenizer) -> Iterator[Running]:
    """A server that takes bodies of at most 20 kB."""
    with Running(tokenizer, with_settings(max_body_size=20_000)) as running:
        yield running


@pytest.fixture(autouse=True)
def unharmed(server: Running) -> Iterator[None]:
    """After every case the server is healthy and answers as ever."""
    yield
    assert server.get("/health").status == 200
    assert (
        server.post(COMPLETIONS, {"model": "fake", "prompt": "canary"}).json()["choices"][0]["text"]
        == "canary"
    )
    assert server.server_state.client.in_flight == 0
    assert server.server_state.client.choices == 0


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b'"x"', b"1", b"null", b'{"model": "fake"', b'{"model": "fake"} x',
        b"{'model': 'fake'}", b"\xff\xfe{}",
        '{"model": "fake"}'.encode("utf-16"), b"\xef\xbb\xbf{}",
        b'{"model":"fake","prompt":"\\ud800"}',
        b'{"model":"fake","prompt":"\xff"}',
        b'{"model":"fake","temperature":NaN,"prompt":"a"}',
        b'{"model":"fake","temperature":1e999,"prompt":"a"}',
        b'{"model":"fake","prompt":' + b"[" * 200_000,
        b'{"model":"fake","prompt":"a","seed":' + b"9" * 5000 + b"}",
    ],
    ids=range(17),
)  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_a_body_that_is_no_json_object_is_refused(server: Running, path: str, body: bytes) -> None:
    answer = server.request("POST", path, body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["code"] == "invalid_json"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", None), ("model", 5), ("stream", "yes"), ("stream", 1),
        ("stream_options", {"include_usage": True}), ("max_tokens", 0),
        ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", "5"),
        ("max_tokens", 10**12), ("min_tokens", 2**31),
        ("min_tokens", -1), ("n", 0), ("n", -1), ("n", 1.5), ("n", 10**9), ("n", 129), ("n", True),
        ("n", "2"), ("best_of", 0),
        ("best_of", 10**9), ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"),
        ("temperature", True), ("top_p", 0),
        ("top_p", -1), ("top_p", 1.1), ("top_p", [1]), ("min_p", -0.1), ("min_p", 1.1),
        ("top_k", -2), ("top_k", 1.5), ("top_k", 2**31),
        ("presence_penalty", 2.1), ("presence_penalty", "1"), ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1), ("repetition_penalty", 1e-30), ("repetition_penalty", True),
        ("seed", 2**64), ("seed", 2**63), ("seed", 1.5), ("seed", "1"), ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}), ("logit_bias", {"320": 1}), ("logit_bias", {"1.5": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": 1e39}), ("logit_bias", {"5": None}),
        ("logit_bias", {str(i): 1 for i in range(100_000)}),
        ("logit_bias", [1]), ("stop", ""), ("stop", [""]), ("stop", ["a"] * 17),
        ("stop", "x" * 1025), ("stop", [1]), ("stop", 5),
        ("stop_token_ids", [320]), ("stop_token_ids", [-1]), ("stop_token_ids", [2**31]),
        ("stop_token_ids", list(range(65))),
        ("stop_token_ids", ["a"]), ("stop_token_ids", [True]), ("bad_words", "x"),
        ("bad_words", [""]), ("bad_words", [5]),
        ("bad_words", ["x"] * 10_000), ("allowed_token_ids", [320]), ("allowed_token_ids", [-1]),
        ("allowed_token_ids", []),
        ("prompt_logprobs", 21), ("ignore_eos", "yes"), ("detokenize", 0),
        ("skip_special_tokens", 0), ("include_stop_str_in_output", 1),
        ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", 257), ("truncate_prompt_tokens", "5"),
        ("truncation_side", "right"), ("echo", 1), ("suffix", "x"), ("cache_salt", ""),
        ("cache_salt", "s" * 129), ("cache_salt", "a/b"), ("cache_salt", "a\\b"),
        ("cache_salt", "a@b"),
        ("cache_salt", "\0"), ("cache_salt", 5),
        ("priority", 10**30), ("priority", "high"), ("priority", 1), ("logprobs", -1),
        ("logprobs", "1"),
        ("spaces_between_special_tokens", 0), ("vllm_xargs", {"a": 1}), ("extra_args", {"a": 1}),
        ("logits_processors", ["x"]),
        ("presence_penalty", -2.1), ("frequency_penalty", 2.1), ("logit_bias", {"5": -101}),
        ("logit_bias", {str(2**31): 1}),
        ("stop", "x" * 2**20), ("stop", ["a"] * 10_000), ("stop_token_ids", list(range(10_000))),
        ("allowed_token_ids", "x"),
        ("allowed_token_ids", [1.5]), ("allowed_token_ids", [2**31]), ("bad_words", ["x" * 2**15]),
        ("best_of", -1), ("min_tokens", 1.5),
        ("prompt_logprobs", -1), ("prompt_logprobs", True), ("logprobs", 10**9), ("seed", True),
        ("top_k", True), ("min_p", "0"),
        ("beam_width", 3), ("regex", "a"), ("ebnf", 'root ::= "a"'), ("json_schema", {}),
        ("grammar", "x"),
        ("prompt_embeds", "x"), ("length_penalty", 2), ("length_penalty", 11),
        ("use_beam_search", 1), ("early_stopping", "soon"),
    ],
)  # fmt: skip
def test_an_illegal_or_unsupported_value_is_refused_by_name(
    server: Running, path: str, field: str, value: Any
) -> None:
    body = {
        "model": "fake",
        ("prompt" if path == COMPLETIONS else "messages"): "a" if path == COMPLETIONS else USER,
        field: value,
    }
    answer = server.post(path, body)
    assert answer.status == 400
    assert answer.error["param"] == field
    assert field in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"
    assert len(answer.body) < 2000


@pytest.mark.parametrize(
    "prompt",
    [
        None, "", [], [""], [[]], ["a", 1], [1, "a"], [[1], "a"], ["a", None], {"a": 1}, 5, True,
        [-1], [320], [2**31], [2**63], [1.5],
        [True], [[1, 2], [3, 320]], [[1], [True]], ["a"] * 1025, [[1]] * 1025, [None], [[["a"]]],
    ],
    ids=range(24),
)  # fmt: skip
def test_a_prompt_that_is_none_is_refused(server: Running, prompt: Any) -> None:
    answer = server.post(COMPLETIONS, {"model": "fake", "prompt": prompt})
    assert answer.status == 400
    assert answer.error["param"] == "prompt"


@pytest.mark.parametrize(("ids", "named"), [([1, -1], "-1"), ([320], "320"), ([2**40], str(2**40))])
def test_a_token_id_outside_the_logits_is_named(
    server: Running, ids: list[int], named: str
) -> None:
    error = server.post(COMPLETIONS, {"model": "fake", "prompt": ids}).error
    assert named in error["message"]
    assert "320" in error["message"]
    assert error["code"] == "invalid_token_id"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(
    server: Running, path: str
) -> None:
    text = "a" * 300
    body = (
        {"model": "fake", "prompt": text}
        if path == COMPLETIONS
        else {"model": "fake", "messages": [{"role": "user", "content": text}]}
    )
    answer = server.post(path, body)
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert "256" in answer.error["message"]
    assert any(str(count) in answer.error["message"] for count in range(300, 400))


@pytest.mark.parametrize(("tokens", "status"), [(255, 200), (256, 400), (257, 400)])
@pytest.mark.parametrize("as_text", [True, False])
def test_a_prompt_may_leave_room_for_a_single_token(
    server: Running, tokens: int, status: int, as_text: bool
) -> None:
    prompt: Any = "a" * tokens if as_text else [97] * tokens
    answer = server.post(COMPLETIONS, {"model": "fake", "prompt": prompt, "ignore_eos": True})
    assert answer.status == status
    if status == 200:
        assert answer.json()["usage"]["completion_tokens"] == 1


def test_a_huge_text_is_refused_before_it_is_tokenised(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.server_state, "encode", lambda *arguments: pytest.fail("tokenised"))
    body = {"model": "fake", "prompt": "a" * 10_000_000}
    assert server.post(COMPLETIONS, body).error["code"] == "context_length_exceeded"
    monkeypatch.setattr(server.server_state, "render", lambda *arguments: pytest.fail("tokenised"))
    body = {"model": "fake", "messages": [{"role": "user", "content": "a" * 10_000_000}]}
    assert server.post(CHAT, body).error["code"] == "context_length_exceeded"
    assert (
        server.post("/tokenize", {"prompt": "a" * 10_000_000}).error["code"]
        == "context_length_exceeded"
    )
    monkeypatch.undo()


def test_min_tokens_beyond_the_rest_of_the_context_is_refused_also_without_max_tokens(
    server: Running,
) -> None:
    answer = server.post(CHAT, {"model": "fake", "messages": USER, "min_tokens": 1000})
    assert (answer.status, answer.error["param"]) == (400, "min_tokens")
    assert (
        server.post(COMPLETIONS, {"model": "fake", "prompt": "a", "min_tokens": 17}).error["param"]
        == "min_tokens"
    )


def test_prompts_times_n_is_bounded(server: Running) -> None:
    assert (
        server.post(COMPLETIONS, {"model": "fake", "prompt": ["a"] * 100, "n": 11}).error["param"]
        == "n"
    )


@pytest.mark.parametrize("value", [-1, 21, True, 1.5, "1"])
def test_completion_logprobs_are_bounded(server: Running, value: Any) -> None:
    assert (
        server.post(COMPLETIONS, {"model": "fake", "prompt": "a", "logprobs": value}).error["param"]
        == "logprobs"
    )


@pytest.mark.parametrize(
    ("field", "instead"), [("top_logprobs", "logprobs"), ("max_completion_tokens", "max_tokens")]
)
def test_a_field_of_chats_is_refused_by_name_in_completions(
    server: Running, field: str, instead: str
) -> None:
    error = server.post(COMPLETIONS, {"model": "fake", "prompt": "a", field: 3}).error
    assert (error["param"], error["message"]) == (
        field,
        f"{field} is not supported here; send {instead}",
    )


def test_unknown_models_are_echoed_within_bounds(server: Running) -> None:
    answer = server.post(COMPLETIONS, {"model": "m" * 1_000_000, "prompt": "a"})
    assert answer.status == 404
    assert len(answer.body) < 1000
    assert b"mmmm" not in server.get("/metrics").body


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": True,
            "service_tier": "auto", "seed": None},
        {"never_heard_of": {"deep": [1]}, "another": None},
        {"repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0.0,
            "logit_bias": {}, "best_of": 1, "echo": False},
        {"seed": -1}, {"seed": 2**63 - 1}, {"seed": -(2**63)}, {"stop_token_ids": [5, 5, 6]},
        {"stop": ["x"] * 16}, {"stop": None},
        {"top_k": -1}, {"top_k": 10**9}, {"temperature": 1e-45}, {"temperature": 2},
        {"response_format": {"type": "text"}}, {"n": 2},
        {"truncate_prompt_tokens": -1, "truncation_side": "left"}, {"truncate_prompt_tokens": 256},
        {"logit_bias": {"300": 1}}, {"allowed_token_ids": [319]}, {"n": 2, "temperature": 0},
        {"top_k": 0}, {"max_tokens": None},
        {"include_stop_str_in_output": True, "spaces_between_special_tokens": False,
            "skip_special_tokens": False},
    ],
    ids=range(23),
)  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_harmless_and_neutral_values_are_accepted(
    server: Running, path: str, extra: dict[str, Any]
) -> None:
    body = {
        "model": "fake",
        ("prompt" if path == COMPLETIONS else "messages"): "a" if path == COMPLETIONS else USER,
        **extra,
    }
    assert server.post(path, body).status == 200


def test_null_is_accepted_for_every_optional_field(server: Running) -> None:
    from jaxllm.server.requests.known_fields import CHAT_FIELDS, COMPLETION_FIELDS

    body: dict[str, Any] = dict.fromkeys(COMPLETION_FIELDS) | {"model": "fake", "prompt": "a"}
    assert server.post(COMPLETIONS, body).status == 200
    body = dict.fromkeys(CHAT_FIELDS) | {"model": "fake", "messages": USER}
    assert server.post(CHAT, body).status == 200


def test_a_nul_character_is_legal_text(server: Running) -> None:
    answer = server.post(COMPLETIONS, {"model": "fake", "prompt": "a\u0000b"})
    assert answer.status == 200
    assert answer.json()["choices"][0]["text"] == "a\u0000b"


def test_a_body_over_the_limit_is_refused_with_413_declared_or_chunked(small: Running) -> None:
    body = json.dumps({"model": "fake", "prompt": "a" * 30_000}).encode()
    declared = small.request("POST", COMPLETIONS, body)
    assert (declared.status, declared.error["code"]) == (413, "request_too_large")
    chunks = (
        b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:15_000], body[15_000:]))
        + b"0\r\n\r\n"
    )
    with small.begin_raw(
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + chunks
    ) as sock:
        assert sock.status() == 413


def test_pages_of_other_origins_cannot_send_undeclared_bodies(server: Running) -> None:
    body = {"model": "fake", "prompt": "a"}
    assert (
        server.request(
            "POST",
            COMPLETIONS,
            body,
            {"content-type": "text/plain", "origin": "https://evil.example"},
        ).status
        == 415
    )
    assert server.request("POST", COMPLETIONS, body, {"content-type": "text/plain"}).status == 200
    assert (
        server.request("POST", COMPLETIONS, body, {"origin": "https://good.example"}).status == 200
    )


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", COMPLETIONS, 405), ("DELETE", "/health", 405), ("GET", "/nowhere", 404), ("POST",
        "/v1/models/", 405),
     ("FOO", "/v1/models", 405),
     ("GET", "/v1/models/none", 404), ("POST", "/", 405), ("OPTIONS", COMPLETIONS, 405)],
)  # fmt: skip
def test_unknown_routes_and_methods_speak_the_envelope(
    server: Running, method: str, path: str, status: int
) -> None:
    answer = server.request(method, path)
    assert answer.status == status
    assert answer.error["type"] == "invalid_request_error"
    assert "access-control-allow-origin" not in answer.headers


def test_what_is_no_http_gets_the_envelope_too(server: Running) -> None:
    with server.begin_raw(b"this is no request\r\n\r\n") as sock:
        reply = sock.rest()
    assert reply.startswith(b"HTTP/1.1 400")
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_headers_without_end_are_cut_off(server: Running) -> None:
    with server.begin_raw(b"GET /health HTTP/1.1\r\nx: " + b"a" * 200_000) as sock:
        assert sock.status() == 431


@pytest.mark.parametrize(
    ("sent", "echoed"), [("abc-1", "abc-1"), ("a b\tc<d>", "abcd"), ("x" * 5000, "x" * 128)]
)
def test_the_request_id_is_echoed_bounded_and_clean(
    server: Running, sent: str, echoed: str
) -> None:
    assert server.get("/health", **{"x-request-id": sent}).headers["x-request-id"] == echoed


def test_without_a_usable_request_id_the_server_makes_one(server: Running) -> None:
    first, second = (
        server.get("/health", **{"x-request-id": "<>"}).headers["x-request-id"] for _ in range(2)
    )
    assert first != second
    assert len(first) == 32


@pytest.mark.parametrize(
    "tokens", [None, "x", [1.5], [-1], [320], [True], [1] * 257, {"a": 1}], ids=range(8)
)
def test_detokenize_is_checked(server: Running, tokens: Any) -> None:
    answer = server.post("/detokenize", {"tokens": tokens})
    assert (answer.status, answer.error["param"]) == (400, "tokens")


def test_unknown_fields_are_counted(server: Running) -> None:
    before = server.server_state.edge_metrics.unknown_fields
    server.post(COMPLETIONS, {"model": "fake", "prompt": "a", "one_more": 1, "and_another": None})
    assert server.server_state.edge_metrics.unknown_fields == before + 2


def test_an_unexpected_failure_is_a_plain_500(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise KeyError("/secret/path at 0x7f3a2b1c")

    monkeypatch.setattr(server.server_state, "encode", broken)
    answer = server.post(COMPLETIONS, {"model": "fake", "prompt": "a"})
    monkeypatch.undo()
    assert answer.status == 500
    assert answer.error["type"] == "server_error"
    assert "secret" not in answer.body.decode()
