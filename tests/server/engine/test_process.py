"""The engine process's side of the socket."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxllm.commands import Sleep, WakeUp
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.messages import EngineStats, GenerateRequest, TextDelta
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from jaxllm.server.engine.process import MAX_FAILED_STEPS, ORPHAN_GRACE, EngineProcess
from jaxllm.server.engine.wire import (
    Abort,
    Add,
    Answered,
    Died,
    Frames,
    Outputs,
    Phase,
    Ready,
    Start,
    StepFailed,
    Stop,
    ToServer,
    encode,
)
from tests.server.fake import Control, make

DELTA = TextDelta(id="x", index=0, token_ids=[5], text="", finish_reason="stop")


class Peer:
    """A hand-driven HTTP side."""

    def __init__(self, control: Control):
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(20)
        self.orphaned: queue.Queue[float] = queue.Queue()
        self.process = EngineProcess(theirs, make(control, None), self.orphaned.put)
        self.status: list[int] = []
        self.thread = threading.Thread(target=lambda: self.status.append(self.process.run()))
        self.thread.start()
        self._frames = Frames[ToServer](ToServer)
        self._got: list[Any] = []

    def send(self, *messages: Any) -> None:
        """All in one write."""
        self.socket.sendall(b"".join(encode(message) for message in messages))

    def next(self) -> Any:
        """The next message, None at the end."""
        while not self._got:
            data = self.socket.recv(4096)
            if not data:
                return None
            self._got += self._frames.feed(data)
        return self._got.pop(0)

    def ended(self) -> int:
        """Exit status."""
        self.thread.join(20)
        return self.status[0]


@pytest.fixture
def control() -> Control:
    """The hand on the engine."""
    return Control()


@pytest.fixture
def peer(control: Control) -> Iterator[Peer]:
    """An engine process that is ready."""
    peer = Peer(control)
    peer.send(Start(EngineConfig()))
    assert isinstance(peer.next(), Phase)
    assert isinstance(peer.next(), Ready)
    yield peer
    peer.socket.close()
    peer.thread.join(20)


def add(id: str, max_tokens: int = 2, **options: Any) -> Add:
    """A request."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)
    return Add(GenerateRequest(id=id, prompt=Prompt([1, 2, 3]), params=params))


def test_who_hears_that_it_is_ready_knows_its_stats(control: Control) -> None:
    peer = Peer(control)
    peer.send(Start(EngineConfig()))
    assert isinstance(peer.next(), Phase)
    assert peer.next().stats == EngineStats(num_pages=64, free_pages=64)
    peer.socket.close()
    assert peer.ended() == 1


def test_there_is_one_message_per_step_with_all_deltas(peer: Peer) -> None:
    peer.send(add("a"), add("b", n=2))
    first, second = peer.next(), peer.next()
    assert sorted((delta.id, delta.index) for delta in first.deltas) == [
        ("a", 0),
        ("b", 0),
        ("b", 1),
    ]
    assert [delta.finish_reason for delta in second.deltas] == ["length"] * 3
    assert second.stats.steps == 2


def test_an_abort_is_confirmed_by_fresh_stats_even_when_nothing_is_left_to_run(
    peer: Peer, control: Control
) -> None:
    control.go.clear()
    peer.send(add("a", 1_000_000))
    assert control.saw(lambda: len(control.added) == 1)
    peer.send(Abort("a"), Abort("never heard of"))
    control.go.set()
    seen = peer.next()
    while seen.stats.running:
        seen = peer.next()
    assert control.aborted == ["a"]


def test_who_hears_that_a_model_sleeps_has_been_told_its_state(peer: Peer) -> None:
    for command, level in ((Sleep(2), 2), (WakeUp(), 0)):
        peer.send(command)
        states = []
        while not isinstance(message := peer.next(), Answered):
            states.append(message.stats.sleep_level)
        assert message.error is None
        assert states[-1:] == [level]


def test_the_process_ends_when_told_to_and_has_other_hosts_end(
    peer: Peer, control: Control
) -> None:
    peer.send(Stop())
    assert peer.next() is None
    assert peer.ended() == 0
    assert control.left


def test_a_process_that_is_told_to_end_within_a_step_has_other_hosts_end(
    peer: Peer, control: Control
) -> None:
    control.go.clear()
    peer.send(add("a", 1000), Stop())
    assert control.saw(lambda: len(control.added) == 1)
    peer.socket.close()  # nobody hears of the step
    control.go.set()
    assert peer.ended() == 0
    assert control.left


def test_the_process_fails_when_the_other_side_has_gone_and_so_do_other_hosts(
    peer: Peer, control: Control
) -> None:
    peer.send(add("a", 1000))
    peer.socket.close()
    assert peer.orphaned.get(timeout=20) == ORPHAN_GRACE
    assert peer.ended() == 1
    assert not control.left


def test_a_process_that_still_loads_has_no_time_when_the_other_side_has_gone() -> None:
    ours, theirs = socket.socketpair()
    orphaned: queue.Queue[float] = queue.Queue()

    def load(config: EngineConfig, on_phase: Callable[[str, float], None]) -> Any:
        ours.close()
        assert orphaned.get(timeout=20) == 0
        raise ConfigError("loaded for nobody")

    ours.sendall(encode(Start(EngineConfig())))
    assert EngineProcess(theirs, load, orphaned.put).run() == 1


def test_phases_that_several_threads_report_at_once_arrive_whole() -> None:
    """Each is larger than the socket's buffer, so a send has many parts."""
    names = ["a" * 2_000_000, "b" * 2_000_000, "c" * 2_000_000]

    def load(config: EngineConfig, on_phase: Callable[[str, float], None]) -> Any:
        together = threading.Barrier(len(names))

        def report(name: str) -> None:
            together.wait()
            for turn in range(3):
                on_phase(name, turn)

        threads = [threading.Thread(target=report, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        raise ConfigError("loaded enough")

    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(60)
        ours.sendall(encode(Start(EngineConfig())))
        loading = threading.Thread(target=EngineProcess(theirs, load).run)
        loading.start()
        frames, found = Frames[ToServer](ToServer), []
        while data := ours.recv(1 << 16):
            found += frames.feed(data)
        loading.join(60)
    assert found.pop() == Died("loaded enough", True)
    assert sorted((each.name[0], each.seconds, len(each.name)) for each in found) == [
        (name[0], turn, len(name)) for name in names for turn in range(3)
    ]


def test_an_engine_whose_step_fails_goes_on(
    peer: Peer, control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    for turn in range(2 * MAX_FAILED_STEPS):
        control.fail_step = f"lost at 0xdeadbeef, {turn}"
        peer.send(add("a"))
        assert peer.next() == StepFailed()
        assert not peer.next().deltas
        control.fail_step = None
        peer.send(add("b", 1))
        assert [delta.finish_reason for delta in peer.next().deltas] == ["length"]
        assert caplog.text.count(f"deadbeef, {turn}") == 1


def test_an_engine_whose_steps_fail_again_and_again_gives_up_and_says_no_addresses(
    peer: Peer, control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    control.fail_step = "lost at 0xdeadbeef"
    for turn in range(1, MAX_FAILED_STEPS):
        peer.send(add(f"a{turn}"))
        while isinstance(message := peer.next(), Outputs):  # of the request that was aborted
            pass
        assert message == StepFailed()
        assert not peer.next().deltas
        control.fail_step = None
        peer.send(add(f"b{turn}", 10**9))  # that never ends by itself
        while not peer.next().deltas:  # a step that finishes nothing is no progress
            pass
        peer.send(Abort(f"b{turn}"))
        while peer.next().stats.running:
            pass
        control.fail_step = "lost at 0xdeadbeef"
    peer.send(add("last"))
    while isinstance(message := peer.next(), Outputs):
        pass
    assert isinstance(message, Died)
    assert message.reason == (
        f"RuntimeError: {MAX_FAILED_STEPS} steps failed without a finished request in between; "
        "the last one: RuntimeError: lost at 0x…"
    )
    assert peer.next() is None
    assert peer.ended() == 1
    assert "Traceback" in caplog.text


def test_a_configuration_that_cannot_work_is_the_operators_fault() -> None:
    peer = Peer(Control())
    peer.send(Start(EngineConfig(max_model_len=-7)))
    assert isinstance(peer.next(), Phase)
    assert peer.next() == Died("--max-model-len must be at least 1, got -7", True)
    assert peer.ended() == 1
    peer.socket.close()


def test_malformed_input_ends_the_process_rather_than_hanging_it(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    peer.socket.sendall(b"\x02\x00\x00\x00\xc1\xc1")
    assert peer.next() is None
    assert peer.ended() == 1
    assert "DecodeError" in caplog.text


class Patient:
    """An engine at work that can wait a minute for messages, and says when it is asked whether it
    can.
    """

    has_work = True
    awaits_grammar = False

    def __init__(self) -> None:
        self.asked = threading.Event()

    @property
    def wait_seconds(self) -> float:
        self.asked.set()
        return 60.0


def test_the_shortest_wait_ends() -> None:
    here, there = socket.socketpair()
    with here, there:
        process = EngineProcess(here, lambda config, on_phase: Patient())  # type: ignore[arg-type, return-value]

        def look() -> None:
            for turn in range(20_000):
                process.inbox.put(Abort("x"))
                process.inbox.get()
                list(process.messages_until(time.monotonic() + turn % 50 * 1e-7))

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        looking.join(60)
    assert not looking.is_alive()


def test_what_comes_while_somebody_looks_out_is_had_at_once() -> None:
    here, there = socket.socketpair()
    with here, there:
        process = EngineProcess(here, lambda config, on_phase: Patient())  # type: ignore[arg-type, return-value]
        arriving = process.messages_until(time.monotonic() + 3600)
        for name in "ab":
            process.inbox.put(Abort(name))
            assert next(arriving) == Abort(name)


def test_a_message_that_comes_while_the_engine_is_patient_is_there_before_the_next_step() -> None:
    engine, found = Patient(), []
    here, there = socket.socketpair()
    with here, there:
        process = EngineProcess(here, lambda config, on_phase: engine)
        looking = threading.Thread(target=lambda: found.append(list(process.due_messages(engine))))
        looking.start()
        assert engine.asked.wait(60)
        for message in (Abort("x"), Stop()):
            process.inbox.put(message)
        looking.join(60)
    assert found == [[Abort("x"), Stop()]]


def test_the_engine_steps_on_while_nobody_reads_what_it_says(peer: Peer, control: Control) -> None:
    """The socket takes a few of its messages, of 100 KB each."""
    params = SamplingParams(max_tokens=50, ignore_eos=True, logprobs=20)
    ids = [str(number) * 5000 for number in range(20)]
    requests = [GenerateRequest(id=id, prompt=Prompt([1, 2, 3]), params=params) for id in ids]
    peer.send(*map(Add, requests))
    done = control.saw(lambda: len(control.added) == len(ids) and not control.running, 20)
    assert done, "it waits for its reader"
    finished: list[str] = []
    while len(finished) < len(ids):
        finished += [delta.id for delta in peer.next().deltas if delta.finish_reason == "length"]
    assert sorted(finished) == sorted(ids)
