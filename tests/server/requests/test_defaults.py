"""Where sampling options come from when a request does not say: the model's generation_config.json,
then OpenAI's defaults."""

from __future__ import annotations

import pytest

from jaxllm.server.errors import MAX_MESSAGE, ApiError, bounded, describe, sanitize
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running, with_settings


def test_the_models_defaults_apply_until_the_request_says_otherwise(tokenizer: Tokenizer) -> None:
    with Running(tokenizer, defaults={"temperature": 0.6, "top_k": 20}) as server:
        server.post("/v1/completions", {"model": "fake", "prompt": "a"})
        server.post(
            "/v1/completions", {"model": "fake", "prompt": "a", "temperature": 0, "top_k": None}
        )
        first, second = (request.params for request in server.control.added)
    assert (first.temperature, first.top_k, first.top_p) == (0.6, 20, 1.0)
    assert (second.temperature, second.top_k) == (0.0, 20)


def test_without_them_openais_apply(server: Running) -> None:
    server.post(
        "/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": "a"}]}
    )
    params = server.control.added[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.n) == (1.0, 1.0, 0, 1)


@pytest.mark.parametrize("chat", [False, True])
def test_the_load_generator_of_vllm_hears_tokens_and_then_their_count(
    server: Running, chat: bool
) -> None:
    """The bodies of `vllm bench serve`, and the events that it reads."""
    content = [{"type": "text", "text": "abc"}]
    asked = (
        {"messages": [{"role": "user", "content": content}], "max_completion_tokens": 8}
        if chat
        else {"prompt": "abc", "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None}
    )
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    *tokens, last = server.post(path, {"model": "fake"} | asked | options).events()
    assert all(event["choices"] for event in tokens) and len(tokens) >= 8
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)
    assert last["usage"]["prompt_tokens"] >= 3


def test_messages_are_bounded_and_free_of_internals() -> None:
    text = sanitize(
        "<object at 0x7f3a2b1c> in /usr/lib/python3/x.py\x00 "
        "Traceback (most recent call last):\n  secret\n"
    )
    assert text == "<object at 0x…> in <path>  internal error"
    assert len(sanitize("x" * 10**7)) == MAX_MESSAGE
    assert sanitize("\ud800") == "?"
    assert sanitize("1/2 and a/b stay") == "1/2 and a/b stay"


def test_what_the_server_composed_is_only_bounded() -> None:
    advice = "send token ids to /v1/completions; this server serves /data/models/demo"
    assert ApiError(404, advice).message == advice
    assert bounded("a\x00b\x1bc") == "a b c"
    assert len(bounded("x" * 10**7)) == MAX_MESSAGE


def test_a_model_served_by_its_path_is_named_when_another_is_asked_for(
    tokenizer: Tokenizer,
) -> None:
    with Running(tokenizer, with_settings(served=("/data/models/demo",))) as server:
        answer = server.post("/v1/completions", {"model": "demo", "prompt": "a"})
    assert answer.status == 404
    assert "/data/models/demo" in answer.error["message"]


def test_values_are_shown_bounded_and_containers_only_described() -> None:
    assert len(describe("x" * 10**6)) <= 200
    assert describe([1] * 10**6) == "a list of 1000000"


@pytest.mark.parametrize(
    ("status", "type"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (404, "invalid_request_error"),
        (429, "rate_limit_error"),
     (500, "server_error"), (503, "overloaded_error")],
)  # fmt: skip
def test_every_status_has_openais_type(status: int, type: str) -> None:
    assert ApiError(status, "x").envelope()["error"]["type"] == type
