"""Fields that the engine gets as they are."""

from __future__ import annotations

import pytest

from jaxllm.config import EngineConfig
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_salt_reaches_the_engine(fresh: Running, path: str) -> None:
    body = {
        "model": "fake",
        "max_tokens": 1,
        ("prompt" if path == COMPLETIONS else "messages"): "a" if path == COMPLETIONS else USER,
    }
    assert fresh.post(path, body | {"cache_salt": "s" * 128}).status == 200
    assert fresh.post(path, body).status == 200
    assert [request.cache_salt for request in fresh.control.added] == ["s" * 128, None]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_priority_reaches_the_engine_of_a_server_with_that_policy(
    tokenizer: Tokenizer, path: str
) -> None:
    with Running(
        tokenizer, config=EngineConfig(model="fake", scheduling_policy="priority")
    ) as running:
        body = {
            "model": "fake",
            "max_tokens": 1,
            ("prompt" if path == COMPLETIONS else "messages"): "a" if path == COMPLETIONS else USER,
        }
        assert running.post(path, body | {"priority": -7}).status == 200
        assert [request.params.priority for request in running.control.added] == [-7]
        assert running.post(path, body | {"priority": 2**31}).error["param"] == "priority"
