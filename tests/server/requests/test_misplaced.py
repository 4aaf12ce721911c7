"""What belongs elsewhere is refused by name: fields of the other endpoint, bodies that are
compressed, a text beside a conversation."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.server.harness import Running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "a"}]
PROMPT = {"model": "fake", "prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize(
    "field",
    [
        {"tools": [{}]}, {"tools": {}}, {"tool_choice": "required"}, {"functions": [1]},
        {"function_call": {}},
        {"documents": [1]}, {"audio": {}}, {"modalities": ["audio"]}, {"chat_template": "x"},
        {"chat_template_kwargs": {"a": 1}},
        {"messages": USER}, {"messages": "a"},
        {"continue_final_message": True}, {"reasoning_effort": "low"}, {"prediction": {}},
        {"mm_processor_kwargs": {"a": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_fields_of_chats_are_refused_in_completions(server: Running, field: dict[str, Any]) -> None:
    answer = server.post(COMPLETIONS, PROMPT | field)
    (name,) = field
    assert (answer.status, answer.error["param"]) == (400, name)
    assert (
        answer.error["message"]
        == f"{name} is not supported here, but in /v1/chat/completions; leave it out"
    )


@pytest.mark.parametrize(
    "field",
    [
        {"messages": []},
        {"tools": []},
        {"tool_choice": "none"},
        {"modalities": ["text"]},
        {"add_generation_prompt": False},
    ],
    ids=str,
)
def test_those_that_ask_for_nothing_are_taken(server: Running, field: dict[str, Any]) -> None:
    assert server.post(COMPLETIONS, PROMPT | field).status == 200


@pytest.mark.parametrize("prompt", ["a", ["a"], [1], 5], ids=str)
def test_a_prompt_is_refused_in_chats(server: Running, prompt: Any) -> None:
    for messages in ({}, {"messages": USER}):
        answer = server.post(CHAT, {"model": "fake", "prompt": prompt} | messages)
        assert (answer.status, answer.error["param"]) == (400, "prompt")
        assert (
            answer.error["message"]
            == "prompt is not supported here, but in /v1/completions; leave it out"
        )
    for nothing in ("", [], None):
        assert (
            server.post(
                CHAT, {"model": "fake", "prompt": nothing, "messages": USER, "max_tokens": 1}
            ).status
            == 200
        )


def test_a_text_is_not_tokenised_beside_a_conversation(server: Running) -> None:
    answer = server.post("/tokenize", {"messages": USER, "prompt": "a"})
    assert (answer.status, answer.error["param"]) == (400, "prompt")


def test_the_older_name_of_a_limit_is_checked_beside_the_newer(server: Running) -> None:
    body = {"model": "fake", "messages": USER, "max_completion_tokens": 2}
    assert server.post(CHAT, body | {"max_tokens": 5}).json()["usage"]["completion_tokens"] <= 2
    assert server.post(CHAT, body | {"max_tokens": "5"}).error["param"] == "max_tokens"


def test_compressed_bodies_are_refused_unread(server: Running) -> None:
    body = gzip.compress(json.dumps(PROMPT).encode())
    answer = server.post(COMPLETIONS, body, **{"content-encoding": "GZIP"})
    assert (answer.status, answer.error["code"]) == (
        415,
        "unsupported_media_type",
    ) and "gzip" in answer.error["message"]
    twice = server.post(COMPLETIONS, body, **{"content-encoding": "identity, gzip"})
    assert twice.status == 415
    assert server.post(COMPLETIONS, PROMPT, **{"content-encoding": "identity"}).status == 200


def test_an_encoding_that_is_no_text_is_refused_like_another(server: Running) -> None:
    odd = server.post(COMPLETIONS, PROMPT, **{"content-encoding": "gzip, \xff\x80"})
    assert (odd.status, odd.error["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (1, "1"),
        ("x", "'x'"),
        ([None], "a list of 1"),
    ],
)
def test_values_are_shown_as_they_were_sent(server: Running, value: Any, said: str) -> None:
    answer = server.post(CHAT, {"model": "fake", "messages": [value]})
    assert answer.error["message"] == f"messages[0] must be an object, got {said}"
