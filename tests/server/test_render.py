"""Rendered prompts are those that the generating endpoints run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import Running

BODIES: list[dict[str, Any]] = [
    {"model": "fake", "prompt": "hello"},
    {"model": "fake", "prompt": ["one", "two"], "cache_salt": "s", "temperature": 0.5},
    {"model": "fake", "prompt": [[1, 2, 3], [4]], "stream": True},
    {"model": "fake", "prompt": "a long text", "truncate_prompt_tokens": 4},
]
CHATS: list[dict[str, Any]] = [
    {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
    {
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}],
        "continue_final_message": True,
        "seed": 3,
    },
    {
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}],
        "chat_template_kwargs": {"enable_thinking": False},
    },
]


def prompts_run(running: Running, path: str, body: dict[str, Any]) -> list[list[int]]:
    """The prompts that the engine got."""
    before = len(running.control.added)
    assert running.post(path, body | {"max_tokens": 1}).status == 200
    return [request.prompt.tokens for request in running.control.added[before:]]


@pytest.mark.parametrize("body", BODIES)
def test_a_rendered_completion_has_the_prompts_that_run(
    server: Running, body: dict[str, Any]
) -> None:
    rendered = server.post("/v1/completions/render", body).json()
    assert [one["token_ids"] for one in rendered] == prompts_run(server, "/v1/completions", body)
    assert len({one["request_id"] for one in rendered}) == len(rendered)
    assert {one["cache_salt"] for one in rendered} == {body.get("cache_salt")}


@pytest.mark.parametrize("body", CHATS)
def test_a_rendered_chat_has_the_prompt_that_runs(server: Running, body: dict[str, Any]) -> None:
    rendered = server.post("/v1/chat/completions/render", body).json()
    assert [rendered["token_ids"]] == prompts_run(server, "/v1/chat/completions", body)
    assert rendered["request_id"].startswith("chatcmpl-")
    assert rendered["model"] == "fake"


def test_biases_are_told_by_token_id(server: Running) -> None:
    body = {"model": "fake", "prompt": "hello", "logit_bias": {"5": 1}}
    (rendered,) = server.post("/v1/completions/render", body).json()
    assert rendered["sampling_params"]["logit_bias"] == {"5": 1}


def test_options_that_differ_from_their_defaults_are_told(server: Running) -> None:
    body = {"model": "fake", "prompt": "hello", "temperature": 0.5, "max_tokens": 3}
    (rendered,) = server.post("/v1/completions/render", body).json()
    assert rendered["sampling_params"] == {"temperature": 0.5, "max_tokens": 3}


def test_rendering_runs_nothing(server: Running) -> None:
    before = len(server.control.added)
    server.post("/v1/completions/render", {"model": "fake", "prompt": "hello"})
    assert len(server.control.added) == before


def test_what_the_endpoint_refuses_is_refused(server: Running) -> None:
    for path, body in {
        "/v1/completions/render": {"model": "fake", "prompt": "x", "temperature": -1},
        "/v1/chat/completions/render": {"model": "fake", "messages": []},
    }.items():
        refused = server.post(path, body)
        run = server.post(path.removesuffix("/render"), body)
        assert refused.status == run.status == 400
        assert refused.error == run.error
