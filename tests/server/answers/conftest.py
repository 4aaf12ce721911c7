"""Servers whose model is scripted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxllm.server.parsing.formats import Formats
from jaxllm.tokenizer import Tokenizer
from tests.server.answers.speaker import ScriptedServer
from tests.server.answers.worlds import write_model


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, ScriptedServer]]:
    """One whose tokenizer has the markers of all formats as tokens, and one that writes them as
    text."""
    running = {
        tokens: ScriptedServer(
            Tokenizer.load(write_model(tmp_path_factory.mktemp("model"), tokens=tokens))
        )
        for tokens in (True, False)
    }
    with running[True], running[False]:
        yield running
    for server in running.values():
        server.server_state.formats = Formats()
