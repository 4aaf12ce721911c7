"""Fields that every endpoint reads alike: the model's name, and whole numbers."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running, with_settings

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "abc"},
    CHAT: {"messages": [{"role": "user", "content": "abc"}]},
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_request_needs_no_model_where_one_is_served(tokenizer: Tokenizer, path: str) -> None:
    with Running(tokenizer, with_settings(served=("only",))) as running:
        for model in ({}, {"model": None}):
            answer = running.post(path, BODIES[path] | model)
            assert answer.status == 200
            assert answer.json()["model"] == "only"
        assert running.post(path, BODIES[path] | {"model": "other"}).status == 404


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("model", [{}, {"model": None}], ids=["missing", "null"])
def test_a_request_without_a_model_hears_the_names_where_several_are_served(
    server: Running, path: str, model: dict[str, Any]
) -> None:
    answer = server.post(path, BODIES[path] | model)
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert "fake, alias" in answer.error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 8.0),
        ("n", 2.0),
        ("best_of", 2.0),
        ("top_k", 8.0),
        ("top_k", -1.0),
        ("seed", -8.0),
        ("min_tokens", 2.0),
        ("priority", 0.0),
        ("truncate_prompt_tokens", 8.0),
        ("stream_interval", 1.0),
    ],
)
def test_a_whole_float_is_an_integer(server: Running, path: str, field: str, value: float) -> None:
    answer = server.post(path, {"model": "fake", field: value} | BODIES[path])
    assert answer.status == 200, answer.body
    found = getattr(server.control.added[-1].params, field)
    assert (type(found), found) == (int, value)


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_whole_floats_in_a_list_are_token_ids(server: Running, field: str) -> None:
    body = BODIES[COMPLETIONS] | {"model": "fake"}
    assert server.post(COMPLETIONS, body | {field: [5, 8.0]}).status == 200
    found = getattr(server.control.added[-1].params, field)
    assert [(type(id), id) for id in found] == [(int, 5), (int, 8)]
    assert server.post(COMPLETIONS, body | {field: [5, 8.5]}).status == 400


def test_whole_floats_are_token_ids_of_a_prompt(server: Running) -> None:
    body = BODIES[COMPLETIONS] | {"model": "fake"}
    assert server.post(COMPLETIONS, body | {"prompt": [5, 8.0]}).status == 200
    ids = server.control.added[-1].prompt.tokens
    assert [(type(id), id) for id in ids] == [(int, 5), (int, 8)]
    assert server.post(COMPLETIONS, body | {"prompt": [5, 8.5]}).status == 400


def test_a_whole_float_counts_log_probabilities_and_tokens_of_chats(server: Running) -> None:
    body = BODIES[CHAT] | {"model": "fake", "logprobs": True, "top_logprobs": 2.0}
    answer = server.post(CHAT, body | {"max_completion_tokens": 3.0})
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert len(answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2


def test_an_echo_of_zero_tokens_may_be_asked_for_by_a_float(server: Running) -> None:
    body = {"model": "fake", "prompt": "abc", "echo": True, "max_tokens": 0.0}
    answer = server.post(COMPLETIONS, body)
    assert answer.json()["choices"][0]["text"] == "abc"
    assert answer.json()["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("value", [1e18, 2.0**53 + 2, -1e18])
def test_a_float_too_large_to_be_exact_hears_that_it_is_not(
    server: Running, path: str, value: float
) -> None:
    answer = server.post(path, {"model": "fake", "seed": value} | BODIES[path])
    assert (answer.status, answer.error["param"]) == (400, "seed")
    assert "floats above 2^53 are not exact" in answer.error["message"]
    assert server.post(path, {"model": "fake", "seed": int(value)} | BODIES[path]).status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("value", [8.5, True, "8", 2.0**63, -(2.0**63) - 1025])
def test_no_other_value_is_an_integer(server: Running, path: str, value: Any) -> None:
    answer = server.post(path, {"model": "fake", "seed": value} | BODIES[path])
    assert (answer.status, answer.error["param"]) == (400, "seed")
