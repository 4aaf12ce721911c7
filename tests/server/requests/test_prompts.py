"""Prompts on their way in: truncation on both endpoints, for text and token ids."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from jaxllm.server.requests.limits import TRUNCATED_CHARS
from tests.server.harness import Running


def seen(server: Running) -> list[int]:
    """The prompt that the engine was given last."""
    return server.control.added[-1].prompt.tokens


@pytest.mark.parametrize(
    "prompt", ["abcdefgh", [97, 98, 99, 100, 101, 102, 103, 104]], ids=["text", "ids"]
)
@pytest.mark.parametrize(("keep", "kept"), [(3, 3), (8, 8), (200, 8), (-1, 8)])
def test_a_prompt_keeps_its_last_tokens(
    server: Running, client: openai.OpenAI, prompt: Any, keep: int, kept: int
) -> None:
    client.completions.create(model="fake", prompt=prompt)
    whole = seen(server)
    answer = client.completions.create(
        model="fake", prompt=prompt, extra_body={"truncate_prompt_tokens": keep}
    )
    assert seen(server) == whole[-kept:]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == kept


@pytest.mark.parametrize(
    "prompt",
    ["a" * 300, "a" * 100_000, [97] * 300, [320] * 100 + [97] * 300],
    ids=["text", "long text", "ids", "ids that do not exist"],
)
def test_a_prompt_beyond_the_context_runs_when_it_may_be_truncated(
    server: Running, client: openai.OpenAI, prompt: Any
) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="fake", prompt=prompt, max_tokens=10)
    client.completions.create(
        model="fake", prompt=prompt, max_tokens=10, extra_body={"truncate_prompt_tokens": -1}
    )
    assert len(seen(server)) == 246
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(
            model="fake", prompt=prompt, max_tokens=10, extra_body={"truncate_prompt_tokens": 256}
        )


def test_a_text_that_takes_seconds_to_tokenise_is_refused_though_it_may_be_truncated(
    client: openai.OpenAI,
) -> None:
    for text in ("a" * (TRUNCATED_CHARS + 1), "a" * (13 * TRUNCATED_CHARS)):
        with pytest.raises(openai.APIStatusError, match=r"tokenised|cannot fit|larger than"):
            client.completions.create(
                model="fake", prompt=text, extra_body={"truncate_prompt_tokens": 3}
            )


def test_a_chat_is_truncated_as_it_was_rendered(server: Running, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "x" * 20}]
    client.chat.completions.create(model="fake", messages=messages)
    whole = seen(server)
    answer = client.chat.completions.create(
        model="fake", messages=messages, extra_body={"truncate_prompt_tokens": 7}
    )
    assert seen(server) == whole[-7:]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 7


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_options_of_the_text_reach_the_engine(server: Running, path: str) -> None:
    wanted = {
        "detokenize": False,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    given = (
        {"prompt": "a"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "a"}]}
    )
    assert server.post(path, {"model": "fake", **given, **wanted}).status == 200
    params = server.control.added[-1].params
    assert {name: getattr(params, name) for name in wanted} == wanted
