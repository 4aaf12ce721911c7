"""Scripts for the fake engine, and a client of /v1/responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from jaxllm.server.parsing.formats import Formats, find_formats
from tests.server.harness import Running

type Script = Callable[..., None]


@pytest.fixture
def script(server: Running) -> Iterator[Script]:
    """Lets the model write a text, and the server read it as Qwen3's."""

    def write(text: str, size: int = 3) -> None:
        server.server_state.formats = find_formats("qwen3", "hermes", None)
        server.control.pieces = [text[at : at + size] for at in range(0, len(text), size)]

    yield write
    server.server_state.formats = Formats()
    server.control.pieces = []


def prompt_of(server: Running) -> str:
    """The prompt of the latest request."""
    tokenizer = server.server_state.tokenizer
    assert tokenizer is not None
    return tokenizer.decode(server.control.added[-1].prompt.tokens, False)
