"""A choice that waits for its grammar or its pages blocks nobody, and nobody blocks it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from jaxllm.commands import Sleep
from jaxllm.config import EngineConfig
from jaxllm.messages import EngineStats, GenerateRequest, TextDelta
from jaxllm.server.engine.process import EngineProcess
from jaxllm.server.engine.wire import (
    Abort,
    Answered,
    Frames,
    Outputs,
    Start,
    Stop,
    ToServer,
    encode,
)
from tests.server.engine.test_process import DELTA, add
from tests.server.fake import RESOLVED


class Waiting:
    """An engine whose only request waits for its grammar; a plain request can run at once."""

    resolved = RESOLVED
    wait_seconds = 0.0

    def __init__(self) -> None:
        self.heard: Any = None
        self.asked = threading.Event()  # somebody looked whether there is anything to do
        self.steps: list[str] = []
        self.plain: list[str] = []
        self.built = False

    @property
    def has_work(self) -> bool:
        return bool(self.plain) or "guided" not in self.steps

    @property
    def awaits_grammar(self) -> bool:
        self.asked.set()
        return not self.plain and not self.built and "guided" not in self.steps

    def make_late(self, made: Callable[[], None]) -> None:
        pass

    def when_built(self, heard: Any) -> None:
        self.heard = heard

    def add(self, request: GenerateRequest) -> None:
        self.plain.append(request.id)

    def abort(self, request_id: str) -> None:
        pass

    @property
    def sleeper(self) -> Waiting:
        return self

    def sleep(self, level: int) -> None:
        raise ValueError("requests are running")

    def step(self) -> list[TextDelta]:
        assert self.plain or self.built, "a step would block"
        self.steps += self.plain or ["guided"]
        self.plain = []
        return [msgspec.structs.replace(DELTA, id=self.steps[-1])]

    def stats(self) -> EngineStats:
        return EngineStats()


def test_who_waits_for_a_grammar_holds_up_no_message_and_none_holds_up_the_grammar() -> None:
    engine = Waiting()
    here, there = socket.socketpair()
    here.settimeout(20)
    with here:
        process = EngineProcess(there, lambda config, on_phase: engine)  # type: ignore[arg-type, return-value]
        running = threading.Thread(target=process.run)
        running.start()
        frames, found = Frames[ToServer](ToServer), []

        def until(count: int) -> None:
            while (
                sum(isinstance(message, Outputs) and bool(message.deltas) for message in found)
                < count
            ):
                data = here.recv(1 << 16)
                assert data, found
                found.extend(frames.feed(data))

        here.sendall(encode(Start(EngineConfig())))
        assert engine.asked.wait(60)
        here.sendall(encode(Abort("nobody")) + encode(add("plain")))
        until(1)
        assert engine.steps == ["plain"]
        here.sendall(encode(Sleep(1)))
        while Answered("requests are running") not in found:
            found.extend(frames.feed(here.recv(1 << 16)))
        engine.built = True
        engine.heard()
        until(2)
        assert engine.steps == ["plain", "guided"]
        here.sendall(encode(Stop()))
        running.join(60)
    assert not running.is_alive()
