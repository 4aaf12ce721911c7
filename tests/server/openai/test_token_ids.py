"""`return_token_ids`: replies name the tokens of prompts and choices, streamed as whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.server.parsing.formats import Formats, find_formats
from tests.server.harness import Running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ABC = [97, 98, 99]
USER = [{"role": "user", "content": "é€"}]
ANSWER = '<think>\nhm\n</think>\n\nSo:\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def scripted(server: Running) -> Iterator[Running]:
    """A model that thinks and calls a tool, three characters a token."""
    server.server_state.formats = find_formats("qwen3", "hermes", None)
    server.control.pieces = [ANSWER[at : at + 3] for at in range(0, len(ANSWER), 3)]
    yield server
    server.server_state.formats = Formats()
    server.control.pieces = []


def whole(server: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post(path, {"model": "fake", "return_token_ids": True} | body)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


def streamed(server: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream that have a choice."""
    more = {"model": "fake", "return_token_ids": True, "stream": True}
    answer = server.post(path, more | body)
    return [chunk for chunk in answer.events() if chunk["choices"]]


def ids_by_choice(chunks: list[dict[str, Any]]) -> dict[int, list[int]]:
    """The ids of each choice, put together; every chunk has the field."""
    found: dict[int, list[int]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        found.setdefault(choice["index"], []).extend(choice["token_ids"])
    return found


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"prompt": "abc"}, [ABC]),
        ({"prompt": [ABC, [100]], "n": 2}, [ABC, ABC, [100], [100]]),
        ({"prompt": "abc", "echo": True, "logprobs": 1}, [ABC]),
        ({"prompt": "xyzabc", "truncate_prompt_tokens": 3}, [ABC]),
        ({"prompt": "abc", "stop_token_ids": [98]}, [ABC]),
    ],
    ids=range(5),
)
def test_a_completion_has_the_ids_of_each_choice_and_of_its_prompt(
    server: Running, body: dict[str, Any], prompts: list[list[int]]
) -> None:
    choices = whole(server, COMPLETIONS, body)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == prompts
    # The fake engine says the prompt once more; the token that stops it is one of the answer's
    said = [ABC[:2]] if "stop_token_ids" in body else prompts
    assert [choice["token_ids"] for choice in choices] == said
    chunks = streamed(server, COMPLETIONS, body)
    assert ids_by_choice(chunks) == {one["index"]: one["token_ids"] for one in choices}
    firsts: dict[int, list[int]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert ("prompt_token_ids" in choice) is (choice["index"] not in firsts)
        firsts.setdefault(choice["index"], choice.get("prompt_token_ids"))
    assert firsts == {one["index"]: one["prompt_token_ids"] for one in choices}


def test_a_prompt_that_is_only_scored_has_no_ids_of_an_answer(server: Running) -> None:
    body = {"prompt": "abc", "echo": True, "max_tokens": 0}
    (choice,) = whole(server, COMPLETIONS, body)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (ABC, [])
    assert ids_by_choice(streamed(server, COMPLETIONS, body)) == {0: []}


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": True}, {"echo": True}], ids=str)
def test_a_chat_has_the_prompt_beside_its_choices(server: Running, more: dict[str, Any]) -> None:
    body = {"messages": USER} | more
    reply = whole(server, CHAT, body)
    prompt = server.control.added[-1].prompt.tokens
    assert reply["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in reply["choices"]] == [prompt] * more.get("n", 1)
    chunks = streamed(server, CHAT, body)
    assert ids_by_choice(chunks) == dict.fromkeys(range(more.get("n", 1)), prompt)
    begins = [chunk for chunk in chunks if "prompt_token_ids" in chunk]
    assert [chunk["prompt_token_ids"] for chunk in begins] == [prompt] * more.get("n", 1)
    assert all(chunk["choices"][0]["delta"]["role"] == "assistant" for chunk in begins)


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("scored", [True, False])
def test_ids_of_parsed_answers_are_complete(scripted: Running, shown: bool, scored: bool) -> None:
    """Whatever the parser makes of tokens: some wait for text, some are hidden, some make several
    chunks."""
    body = {"messages": USER, "tools": [TOOL], "include_reasoning": shown, "logprobs": scored}
    reply = whole(scripted, CHAT, body)
    (choice,) = reply["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert len(choice["token_ids"]) == reply["usage"]["completion_tokens"]
    assert len(choice["token_ids"]) == len(scripted.control.pieces)
    chunks = streamed(scripted, CHAT, body)
    assert ids_by_choice(chunks) == {0: choice["token_ids"]}
    assert max(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "field", [{}, {"return_token_ids": False}, {"return_token_ids": None}], ids=str
)
def test_nobody_else_gets_ids(server: Running, path: str, field: dict[str, Any]) -> None:
    body = field | ({"messages": USER} if path == CHAT else {"prompt": "abc"})
    texts = [server.post(path, {"model": "fake", "stream": on} | body).body for on in (True, False)]
    assert not any(b"token_ids" in text for text in texts)


@pytest.mark.parametrize("value", [1, "true", []])
def test_the_field_is_true_or_false(server: Running, value: Any) -> None:
    answer = server.post(COMPLETIONS, {"model": "fake", "prompt": "a", "return_token_ids": value})
    assert (answer.status, answer.error["param"]) == (400, "return_token_ids")
