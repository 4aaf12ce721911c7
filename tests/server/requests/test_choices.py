"""Requests for several choices and for beam searches: what reaches the engine, and what is refused
by what name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED: dict[str, Any] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "options",
    [
        {"best_of": 2, "n": 3},
        {"best_of": 2, "temperature": 0},
        {"best_of": 3, "n": 2, "stream": True},
        {"best_of": 2, "stream": True},
    ],
)
def test_best_of_is_refused_where_it_cannot_be_honoured(
    server: Running, path: str, options: dict[str, Any]
) -> None:
    body = {"model": "fake"} | ASKED[path]
    answer = server.post(path, body | options)
    assert (answer.status, answer.error["param"]) == (400, "best_of")


def test_prompts_count_with_every_choice_that_is_generated_for_them(server: Running) -> None:
    answer = server.post(COMPLETIONS, {"model": "fake", "prompt": ["a"] * 100, "best_of": 11})
    assert (answer.status, answer.error["param"]) == (400, "best_of")
    assert "100 prompts × best_of = 11" in answer.error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_a_beam_search_reaches_the_engine_without_the_models_defaults_for_draws(
    tokenizer: Tokenizer, path: str, stream: bool
) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.1}
    with Running(tokenizer, defaults=defaults) as server:
        body = {"model": "fake", "stream": stream} | ASKED[path]
        body |= {
            "use_beam_search": True,
            "n": 2,
            "best_of": 4,
            "length_penalty": 0.5,
            "early_stopping": "never",
        }
        assert server.post(path, body).status == 200
        params = server.control.added[-1].params
    assert (
        params.use_beam_search,
        params.n,
        params.samples,
        params.length_penalty,
        params.early_stopping,
    ) == (True, 2, 4, 0.5, "never")
    assert (params.temperature, params.top_p, params.repetition_penalty) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.5),
        ("top_p", 0.9),
        ("top_k", 5),
        ("stop", "x"),
        ("logit_bias", {"5": 1}),
        ("best_of", 1),
    ],
)
def test_what_a_beam_search_cannot_honour_is_refused(
    server: Running, path: str, field: str, value: Any
) -> None:
    body = {"model": "fake", "use_beam_search": True, "n": 2, field: value} | ASKED[path]
    answer = server.post(path, body)
    assert (answer.status, answer.error["param"]) == (400, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [("length_penalty", 0.5), ("early_stopping", True), ("early_stopping", "never")],
)
def test_what_is_for_beam_searches_alone_is_refused_elsewhere(
    server: Running, field: str, value: Any
) -> None:
    answer = server.post(COMPLETIONS, {"model": "fake", "prompt": "a", field: value})
    assert (answer.status, answer.error["param"]) == (400, field)
    assert "needs use_beam_search" in answer.error["message"]
