"""Requests for several choices: what is refused, and by what name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import Running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "options",
    [{"best_of": 2, "n": 3}, {"best_of": 2, "temperature": 0}, {"best_of": 3, "n": 2, "stream": True}, {"best_of": 2, "stream": True}],
)
def test_best_of_is_refused_where_it_cannot_be_honoured(server: Running, path: str, options: dict[str, Any]) -> None:
    body = {"model": "fake", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    answer = server.post(path, body | options)
    assert (answer.status, answer.error["param"]) == (400, "best_of")


def test_prompts_count_with_every_choice_that_is_generated_for_them(server: Running) -> None:
    answer = server.post(COMPLETIONS, {"model": "fake", "prompt": ["a"] * 100, "best_of": 11})
    assert (answer.status, answer.error["param"]) == (400, "best_of")
    assert "100 prompts × best_of = 11" in answer.error["message"]
