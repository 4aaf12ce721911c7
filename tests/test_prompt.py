"""What is computed of a prompt, and what tells its prefixes apart."""

from __future__ import annotations

import msgspec
import pytest

from jaxllm.prompt import Prompt

TOKENS = [3, 4, 5]


def test_keys_are_the_tokens_themselves_unless_something_else_is_said() -> None:
    assert Prompt(TOKENS).keys is TOKENS
    other = [-1, -2, 5]
    prompt = Prompt(TOKENS, other)
    assert prompt.tokens is TOKENS
    assert prompt.keys is other


@pytest.mark.parametrize("keys", [[], [1, 2], [1, 2, 3, 4]])
def test_each_token_has_a_key(keys: list[int]) -> None:
    with pytest.raises(ValueError, match=f"of 3 tokens has {len(keys)} keys"):
        Prompt(TOKENS, keys)


@pytest.mark.parametrize("prompt", [Prompt(TOKENS), Prompt(TOKENS, [-1, 4, 5], (b"image",))])
def test_a_prompt_travels_as_it_is(prompt: Prompt) -> None:
    data = msgspec.msgpack.encode(prompt)
    assert msgspec.msgpack.decode(data, type=Prompt) == prompt


def test_tokens_travel_once() -> None:
    tokens = list(range(1000))
    shared, apart = (len(msgspec.msgpack.encode(Prompt(tokens, keys))) for keys in (None, tokens))
    assert shared < 0.6 * apart
