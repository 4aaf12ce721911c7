"""A host without HTTP says why its engine process has ended."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.server.lifecycle import follow

pytestmark = pytest.mark.usefixtures("hang_ups")


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
    monkeypatch.setattr(follow, "stopping_signals", lambda: ())
    config = EngineConfig(nnodes=2, node_rank=1, tensor_parallel_size=2, group_key_file="key")
    with pytest.raises(ConfigError) as error:
        follow.follow(config, (sys.executable, "-c", f"import os, sys; {end}"))
    assert told in str(error.value)


ENGINE = """if True:
    import pathlib, socket, sys
    from jaxllm.server.engine.wire import Phase, encode
    with socket.socket(fileno=int(sys.argv[3])) as sock:
        sock.sendall(encode(Phase("Compiling", None, 12, 36)))
        pathlib.Path(sys.argv[1]).read_bytes()
"""
FOLLOWER = """if True:
    import sys
    from jaxllm.config import EngineConfig
    from jaxllm.server import logs
    from jaxllm.server.lifecycle import follow
    logs.configure("info", "text")
    follow.SAID_SECONDS = 0.05
    config = EngineConfig(nnodes=2, node_rank=1, tensor_parallel_size=2, group_key_file="key")
    sys.exit(follow.follow(config, (sys.executable, "-c", sys.argv[1], sys.argv[2])))
"""


def test_a_host_says_how_far_it_is_and_stays_when_its_terminal_goes(tmp_path: pathlib.Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    follower = subprocess.Popen(
        [sys.executable, "-c", FOLLOWER, ENGINE, str(gate)], stderr=subprocess.PIPE, text=True
    )
    assert follower.stderr is not None
    with follower.stderr as log, gate.open("wb"):

        def await_line(words: str) -> None:
            assert any(words in line for line in log), words

        await_line("loading host 1: compiled 12 of 36 programs, 0 s so far")
        for _ in range(2):  # as the kernel and a shell send it
            follower.send_signal(signal.SIGHUP)
        await_line("following until the controller stops")
        await_line("loading host 1")
        assert follower.poll() is None
        follower.send_signal(signal.SIGTERM)
        assert follower.wait(60) == 128 + signal.SIGTERM, "a second signal ends it"
