"""The listed bad inputs against the demo model's server. After each number it is healthy, answers a
question as before, holds no page and shows no new series of metrics."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.bad_inputs import (
    COMPLETIONS,
    ELSEWHERE,
    INPUTS,
    KEY,
    MAX_BODY,
    ROOM,
    Sent,
    chat,
    completion,
)
from tests.server.demo_server import Demo
from tests.server.harness import Open, post_head
from tests.server.memory import resident, tree

GROWTH = 192 << 20  # bytes that server and engine may grow by over all inputs
SETTLING = 50  # rounds of good requests after which processes and allocators have what they keep
CANARY = {"model": "demo", "prompt": "the quick brown fox", "max_tokens": 12, "temperature": 0}


def read(sock: socket.socket) -> tuple[int, bytes]:
    """Status and body of a reply."""
    reply = http.client.HTTPResponse(sock)
    reply.begin()
    return reply.status, reply.read()


class Guarded(Demo):
    """The server, for those who have its key."""

    def __init__(self) -> None:
        super().__init__(
            *("--api-key", KEY, "--max-body-size", str(MAX_BODY), "--max-model-len", str(ROOM))
        )
        self.port = urlsplit(self.url).port or 0
        self.canary = self.answer()
        self.before = self.series()
        self.settle()
        self.resident = self.memory()

    def send(self, sent: Sent) -> tuple[int, bytes]:
        """Status and body of the reply."""
        if sent.raw:
            with socket.create_connection(("127.0.0.1", self.port), timeout=60) as sock:
                with suppress(OSError):  # it was answered before its end
                    sock.sendall(sent.raw)
                return read(sock)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(sent.method, sent.path, sent.data, sent.headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        except (BrokenPipeError, ConnectionResetError):
            return read(connection.sock)  # it was answered before its end
        finally:
            connection.close()

    def settle(self) -> None:
        """Use what starts at its first use, the workers of templates and grammars for example."""
        for _ in range(SETTLING):
            for good in (chat(200), completion(200, guided_regex="a+b", n=4)):
                status, body = self.send(good)
                assert status == 200, body
            assert self.answer() == self.canary

    def answer(self) -> Any:
        """The canary's choices."""
        status, body = self.send(Sent((200,), data=json.dumps(CANARY).encode()))
        assert status == 200, body
        return json.loads(body)["choices"]

    def scrape(self) -> list[str]:
        """The lines of /metrics."""
        request = urllib.request.Request(
            f"{self.url}/metrics", headers={"authorization": f"Bearer {KEY}"}
        )
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.read().decode().splitlines()

    def memory(self) -> int:
        """Bytes of the server and of its engine."""
        return sum(map(resident, tree(self.process.pid)))

    def assert_unharmed(self) -> None:
        """It is as it was."""
        assert self.send(Sent((200,), "GET", "/health"))[0] == 200
        for _ in range(100):  # each answer is a round trip of the loop that steps take
            assert self.answer() == self.canary
            if self.metric("vllm:num_requests_running") == 0:
                break
        assert self.metric("vllm:num_requests_running") == 0
        assert self.metric("vllm:num_requests_waiting") == 0
        assert self.metric("vllm:kv_cache_usage_perc") == 0
        assert self.series() == self.before
        assert self.memory() - self.resident < GROWTH


@pytest.fixture(scope="module")
def demo() -> Iterator[Guarded]:
    """One for all inputs."""
    demo = Guarded()
    try:
        yield demo
        assert demo.metric("jaxllm:compiles_after_warmup_total") == 0
        assert demo.metric("jaxllm:engine_step_failures_total") == 0
        assert demo.metric("jaxllm:self_check_failures_total") == 0
        assert demo.stop() == 0
        assert "Traceback" not in demo.log
    finally:
        demo.close()


def test_every_number_is_tested() -> None:
    assert sorted([*INPUTS, *ELSEWHERE]) == list(range(1, 77))
    tests = Path(__file__).parents[1]
    for file, name in ELSEWHERE.values():
        assert f"def {name}" in (tests / file).read_text(), file


@pytest.mark.slow
@pytest.mark.parametrize("number", INPUTS)
def test_a_bad_input_fails_alone(number: int, demo: Guarded) -> None:
    for at, sent in enumerate(INPUTS[number]):
        status, body = demo.send(sent)
        assert status in sent.statuses, (at, (sent.raw or sent.data or b"")[:200], body)
        if status >= 400 and sent.method != "HEAD":
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert len(body) < 4000
    demo.assert_unharmed()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("when", ["head", "body", "queued", "running", "answered"])
def test_who_leaves_at_any_time_leaves_nothing(
    when: str, n: int, stream: bool, demo: Guarded
) -> None:
    asked = {"model": "demo", "prompt": "a " * 200, "max_tokens": 150, "ignore_eos": True}
    data = json.dumps(asked | {"n": n, "stream": stream}).encode()
    head = post_head(COMPLETIONS, len(data)).replace(
        b"\r\n\r\n", f"\r\nauthorization: Bearer {KEY}\r\n\r\n".encode()
    )
    whole = head + data
    part = {"head": head[:40], "body": whole[:-9]}.get(when, whole)
    ahead = [Open(demo.port, whole) for _ in range(4 if when == "queued" else 0)]
    try:
        with Open(demo.port, part) as leaver:
            while when == "running" and not demo.metric("vllm:num_requests_running"):
                pass  # each look is a round trip
            while when == "queued" and not demo.metric("vllm:num_requests_waiting"):
                pass
            if when == "answered" and stream:
                assert leaver.status() == 200
    finally:
        for one in ahead:
            one.close()
    demo.assert_unharmed()
