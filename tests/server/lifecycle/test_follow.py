"""A host without HTTP says why its engine process has ended."""

from __future__ import annotations

import sys

import pytest

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.server.lifecycle import follow


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("os.kill(os.getpid(), 9)", "host 1 was killed, as the system does when memory is short"),
        ("os.abort()", "host 1 was aborted, as it is when the controller of its hosts has gone"),
        ("sys.exit(3)", "host 1 ended with status 3; see the log"),
    ],
    ids=["killed", "aborted", "failed"],
)
def test_an_engine_process_that_ends_without_a_word_is_told_by_its_status(
    end: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "NUMBERS", ())
    config = EngineConfig(nnodes=2, node_rank=1, tensor_parallel_size=2, group_key_file="key")
    with pytest.raises(ConfigError) as error:
        follow.follow(config, (sys.executable, "-c", f"import os, sys; {end}"))
    assert told in str(error.value)
