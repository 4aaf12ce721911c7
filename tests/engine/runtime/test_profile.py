"""Traces of a running engine: when they can begin and end, what is in them, and the ways to ask for
them."""

from __future__ import annotations

import pathlib

import jax
import pytest

from jaxllm.commands import Profile
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.runtime.profile import Profiler
from jaxllm.server.engine.wire import Answered, Ready, Start, Stop
from tests.server.engine.test_process import Peer
from tests.server.fake import Control
from tests.server.harness import Running, with_settings


def test_what_cannot_be_is_said_before_anything_is_traced(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="give --profiler-dir"):
        Profiler(None).start()
    with pytest.raises(ConfigError, match="no profile is running"):
        Profiler(str(tmp_path)).stop()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot profile into"):
        Profiler(str(tmp_path / "file")).start()
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *a, **k: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    profiler = Profiler(str(tmp_path))
    profiler.start()
    with pytest.raises(ConfigError, match="running already"):
        profiler.start()
    profiler.stop()
    with pytest.raises(ConfigError, match="no profile is running"):
        profiler.stop()


def test_the_engine_process_traces_itself_and_says_when_it_is_done(tmp_path):
    peer = Peer(Control())
    peer.send(Start(EngineConfig(model="fake", profiler_dir=str(tmp_path))))
    while not isinstance(peer.next(), Ready):
        pass
    answers: list[str | None] = []
    for start in (False, True, True, False):
        peer.send(Profile(start))
        while not isinstance(message := peer.next(), Answered):
            pass
        answers.append(message.error)
    peer.send(Stop())
    assert peer.ended() == 0
    peer.socket.close()
    assert [answer is None for answer in answers] == [False, True, False, True]
    assert list(pathlib.Path(tmp_path).rglob("*.xplane.pb"))


class Recorder:
    """A profiler that only notes."""

    def __init__(self, directory: str | None):
        self.seen: list[str] = []

    def start(self) -> None:
        self.seen.append("start")

    def stop(self) -> None:
        raise RuntimeError("the disk is full")


def test_the_routes_answer_when_it_is_done_or_why_it_is_not(monkeypatch):
    settings, root = with_settings(admin_keys=("root",)), {"authorization": "Bearer root"}
    with Running(None, settings) as server:  # has no directory
        refused = server.post("/start_profile", b"", **root)
        assert (refused.status, server.get("/start_profile", **root).status) == (400, 405)
        assert "give --profiler-dir" in refused.error["message"]
    monkeypatch.setattr("jaxllm.server.engine.process.Profiler", Recorder)
    with Running(None, settings) as server:
        assert server.post("/start_profile", b"").status == 403
        for _ in range(2):
            started = server.post("/start_profile", b"", **root)
            assert (started.status, started.body) == (200, b"")
        failed = server.post("/stop_profile", b"", **root)
        assert failed.status == 400
        assert "the profiler failed" in failed.error["message"]
        assert server.get("/health").status == 200
