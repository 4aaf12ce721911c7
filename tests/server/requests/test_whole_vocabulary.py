"""Log-probabilities of the whole vocabulary, where the operator allows as many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.server.requests.limits import MAX_LOGPROBS
from jaxllm.tokenizer import Tokenizer
from tests.server.fake import RESOLVED
from tests.server.harness import Running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
V = RESOLVED.vocab_size
TEXT = {"model": "fake", "prompt": "abc", "max_tokens": 2}
USER = {"model": "fake", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def unlimited(tokenizer: Tokenizer) -> Iterator[Running]:
    """A server with --max-logprobs -1."""
    with Running(tokenizer, config=EngineConfig(model="fake", max_logprobs=-1)) as running:
        yield running


def test_minus_one_asks_the_engine_for_all(unlimited: Running) -> None:
    reply = unlimited.post(CHAT, USER | {"logprobs": True, "top_logprobs": -1}).json()
    assert unlimited.control.added[-1].params.logprobs == V
    for entry in reply["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == V
    assert unlimited.post(COMPLETIONS, TEXT | {"logprobs": -1}).status == 200
    assert unlimited.control.added[-1].params.logprobs == V
    echoed = unlimited.post(COMPLETIONS, TEXT | {"logprobs": -1, "echo": True})
    assert echoed.status == 200
    assert unlimited.control.added[-1].params.prompt_logprobs == V
    assert unlimited.post(COMPLETIONS, TEXT | {"prompt_logprobs": -1}).status == 200
    assert unlimited.control.added[-1].params.prompt_logprobs == V


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, TEXT | {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, TEXT | {"prompt_logprobs": -1}, "prompt_logprobs"),
        (CHAT, USER | {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_elsewhere_the_limit_is_named(
    server: Running, path: str, body: dict[str, Any], field: str
) -> None:
    answer = server.post(path, body)
    assert (answer.status, answer.error["param"]) == (400, field)
    assert answer.error["message"] == (
        f"{field} must be at most 20 (--max-logprobs), got -1, the whole vocabulary of {V} tokens"
    )


@pytest.mark.parametrize("top", [-1, 1])
def test_top_logprobs_need_logprobs(unlimited: Running, top: int) -> None:
    answer = unlimited.post(CHAT, USER | {"top_logprobs": top})
    assert answer.error["message"] == "top_logprobs needs logprobs: true"


def test_no_other_negative_number_is_taken(unlimited: Running) -> None:
    assert unlimited.post(COMPLETIONS, TEXT | {"logprobs": -2}).error["param"] == "logprobs"


@pytest.mark.parametrize(("n", "refused"), [(65, False), (66, True)])
def test_a_reply_of_too_many_is_refused_before_it_is_computed(
    unlimited: Running, n: int, refused: bool
) -> None:
    tokens = 200
    assert 65 < MAX_LOGPROBS / (tokens * (V + 1)) < 66
    body = USER | {"logprobs": True, "top_logprobs": -1, "n": n, "max_tokens": tokens}
    answer = unlimited.post(CHAT, body | {"stop": "a"})
    assert answer.status == (400 if refused else 200)
    if refused:
        assert answer.error["param"] == "top_logprobs"
        assert answer.error["message"] == (
            f"top_logprobs ({V}) for up to {tokens} tokens of {n} choices are "
            f"{tokens * (V + 1) * n} log-probabilities; at most {MAX_LOGPROBS} are given; "
            "ask for fewer, or send a smaller max_tokens"
        )


def test_few_for_each_token_are_given_whatever_the_length(unlimited: Running) -> None:
    body = TEXT | {"logprobs": 20, "n": 128, "max_tokens": 10**9}
    assert unlimited.post(COMPLETIONS, body | {"stop": "a"}).status == 200
