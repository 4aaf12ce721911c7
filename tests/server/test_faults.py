"""What clients see when something under or beside the server fails: docs/testing.md lists the
faults, and the tests elsewhere that hold for the others."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.messages import TextDelta
from tests.by_layer import spoiled
from tests.server.harness import Open, Running
from tests.server.memory import resident
from tests.server.real import Real, served

COMPLETIONS = "/v1/completions"
VICTIM, HEALTHY = [7] * 9, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
STEPS = 6  # until a fault comes, when both requests generate


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, repo: Path) -> Iterator[Real]:
    """A server whose engine computes."""
    yield from served(tmp_path_factory.mktemp("random"), repo)


def greedy(prompt: list[int], **extra: Any) -> dict[str, Any]:
    """A request of 24 tokens."""
    asked = {"model": "fake", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    return asked | {"ignore_eos": True} | extra


def text_of(real: Real, prompt: list[int]) -> str:
    """The whole answer."""
    answer = real.post(COMPLETIONS, greedy(prompt))
    assert answer.status == 200
    return answer.json()["choices"][0]["text"]


def ended(stream: Open) -> list[Any]:
    """The events of a stream until [DONE]."""
    assert stream.status() == 200
    events: list[Any] = []
    while not (line := stream.line()).startswith(b"data: [DONE]"):
        if line.startswith(b"data: "):
            events.append(json.loads(line.removeprefix(b"data: ")))
    return events


def said(events: list[Any]) -> str:
    """The text of a stream without errors."""
    return "".join(event["choices"][0]["text"] for event in events)


def two_streams(
    real: Real, monkeypatch: pytest.MonkeyPatch, fault: Callable[[], None]
) -> tuple[list[Any], list[Any]]:
    """The events of VICTIM and HEALTHY, which run beside each other when `fault` comes between two
    steps."""
    engine, steps = real.engine, 0
    run_step = engine.step

    def step() -> list[TextDelta]:
        nonlocal steps
        steps += len(engine.scheduler._running) == 2
        if steps == STEPS:
            steps += 1
            fault()
        return run_step()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", step)
        with (
            real.begin(COMPLETIONS, greedy(VICTIM, stream=True)) as victim,
            real.begin(COMPLETIONS, greedy(HEALTHY, stream=True)) as healthy,
        ):
            found = ended(victim), ended(healthy)
    assert steps > STEPS, "there was a fault"
    return found


def assert_serves_on(real: Real, canary: str) -> None:
    """It is healthy, answers as ever, and holds nothing."""
    assert real.get("/health").status == real.get("/ready").status == 200
    assert text_of(real, HEALTHY) == canary
    stats = real.engine.stats()
    assert stats.free_pages == stats.num_pages


@pytest.mark.slow
def test_logits_that_are_no_numbers_end_their_stream_and_no_other(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary, engine = text_of(real, HEALTHY), real.engine

    def poison() -> None:
        (page,) = (one.pages[0] for one in engine.scheduler._running if one.prompt.tokens == VICTIM)
        engine.runner.kv = spoiled(engine.runner.kv, 0, page)

    victim, healthy = two_streams(real, monkeypatch, poison)
    assert victim[-1]["error"]["type"] == "server_error"
    assert "finite" in victim[-1]["error"]["message"]
    assert said(healthy) == canary
    assert_serves_on(real, canary)


@pytest.mark.slow
@pytest.mark.parametrize(
    "reason",
    ["RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes", "INTERNAL: device lost"],
    ids=["memory", "device"],
)
def test_a_step_that_finds_no_memory_or_raises_ends_its_streams_and_the_server_goes_on(
    real: Real, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    canary, runner = text_of(real, HEALTHY), real.engine.runner
    forward = runner.forward

    def fail(plan: Any) -> Any:
        monkeypatch.setattr(runner, "forward", forward)
        raise RuntimeError(reason)

    both = two_streams(real, monkeypatch, lambda: monkeypatch.setattr(runner, "forward", fail))
    for events in both:
        error = events[-1]["error"]
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert reason not in error["message"], "it is for the log"
        assert len(events) > 2, "what came before the fault was sent"
    assert_serves_on(real, canary)


def test_ten_times_more_than_it_takes_is_refused_at_once_and_the_rest_completes(
    fresh: Running,
) -> None:
    capacity = fresh.server_state.client.capacity
    fresh.control.go.clear()
    body = {"model": "fake", "prompt": "abc"}
    burst = [fresh.begin(COMPLETIONS, body) for _ in range(10 * capacity)]
    try:
        answered: set[Open] = set()
        while len(answered) < 9 * capacity:
            (ready, _, _) = select.select([one.socket for one in burst], [], [], 60)
            assert ready
            answered = {one for one in burst if one.readable()}
        for one in answered:
            refused = one.answer()
            assert (refused.status, refused.error["code"]) == (503, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
        assert fresh.get("/health").status == 200
        fresh.control.go.set()
        assert {one.status() for one in burst if one not in answered} == {200}
    finally:
        for one in burst:
            one.close()
    client = fresh.server_state.client
    assert (client.choices, client.in_flight) == (0, 0)


def test_a_clock_that_jumps_disturbs_no_request(
    fresh: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    for jump in (-1e6, 1e6, 0):
        fresh.control.go.clear()
        with fresh.begin(COMPLETIONS, {"model": "fake", "prompt": "abc", "stream": True}) as stream:
            assert fresh.control.saw(lambda: bool(fresh.control.running))
            monkeypatch.setattr(time, "time", lambda jump=jump: now() + jump)
            fresh.control.go.set()
            assert said(ended(stream)) == "abc"
        assert fresh.get("/health").json()["status"] == "ok"
    lines = fresh.get("/metrics").body.decode().splitlines()
    assert not [line for line in lines if "_seconds_sum" in line and " -" in line]


@pytest.mark.slow
def test_a_stopped_engine_process_shows_in_health_and_goes_on_where_it_was(launch: Any) -> None:
    server = launch("--stall-timeout", "1", frozen=True).up()
    with server.begin(stream=True) as stream:
        server.busy()
        os.kill(server.engine, signal.SIGSTOP)
        while server.get("/health")[0] == 200:
            pass  # each look is a round trip
        status, body = server.get("/health")
        assert (status, json.loads(body)["status"]) == (503, "stalled")
        assert server.get("/v1/models")[0] == 200, "what needs no engine is answered"
        os.kill(server.engine, signal.SIGCONT)
        os.kill(server.engine, signal.SIGUSR1)
        assert len(ended(stream)) == 50
    assert server.get("/health")[0] == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0


@pytest.mark.slow
def test_a_stopped_http_process_loses_nothing_that_the_engine_said(launch: Any) -> None:
    """The engine goes on, and keeps what the socket between them does not take."""
    server = launch(frozen=True).up()
    streams = [server.begin(stream=True, n=8, logprobs=20) for _ in range(3)]
    try:
        while json.loads(server.get("/load")[1])["server_load"] < len(streams):
            pass
        server.busy()
        server.process.send_signal(signal.SIGSTOP)
        os.kill(server.engine, signal.SIGUSR1)
        await_asleep(server.engine)
        before = resident(server.engine)
        server.process.send_signal(signal.SIGCONT)
        for stream in streams:
            assert len(ended(stream)) == 8 * 50
        assert resident(server.engine) - before < 64 << 20
        assert server.get("/health")[0] == 200
    finally:
        for stream in streams:
            stream.close()
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0


def await_asleep(pid: int) -> None:
    """Wait until every thread of a process has slept for a while."""
    quiet, used = 0, -1
    while quiet < 20:
        time.sleep(0.01)  # what is waited for is that nothing happens
        stats = Path(f"/proc/{pid}/task").glob("*/stat")
        fields = [stat.read_text().rpartition(")")[2].split() for stat in stats]
        now = sum(int(each[11]) + int(each[12]) for each in fields)
        quiet = quiet + 1 if now == used and all(each[0] == "S" for each in fields) else 0
        used = now


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_a_full_disk_under_the_log_and_the_caches_stops_nothing(tmp_path: Path) -> None:
    """Logs go to /dev/full, and no file can grow: programs are compiled and not kept."""
    path = tmp_path / "socket"
    command = [
        *("prlimit", "--fsize=0", sys.executable, "-m", "jaxllm.server", "--model", "demo"),
        *("--uds", str(path), "--access-log", "--log-requests", "--max-model-len", "64"),
        *("--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--enforce-eager"),
        *("--compilation-cache-dir", str(tmp_path / "programs")),
    ]
    environment = {name: value for name, value in os.environ.items() if name[:4] != "JAX_"}
    with open("/dev/full", "wb", buffering=0) as full:
        process = subprocess.Popen(command, stdout=full, stderr=full, env=environment)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            while sock.connect_ex(str(path)) != 0:
                assert process.poll() is None
                time.sleep(0.1)
            body = b'{"prompt": "What is 2 + 3?", "max_tokens": 4}'
            head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
            sock.sendall(head % len(body) + body)
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
