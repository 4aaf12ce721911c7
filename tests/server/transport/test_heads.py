"""Heads of requests that are not taken: answered once, with the right status, and the server goes
on as before."""

from __future__ import annotations

import logging
import socket

import pytest

from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running

HEAD = b"POST /tokenize HTTP/1.1\r\nhost: a\r\n"


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (
            b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n"
            b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
            "invalid_http",
        ),
        (b"GET /health HTTP/9.9\r\nhost: a\r\n\r\n", 400, "invalid_http"),
        (
            b"GET /health HTTP/1.1\r\nhost: a\r\n"
            + b"".join(b"x%d: 1\r\n" % i for i in range(300))
            + b"\r\n",
            431,
            "headers_too_large",
        ),
        (
            b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
            431,
            "headers_too_large",
        ),
    ],
)
def test_a_head_that_is_not_taken_ends_its_connection(
    server: Running, head: bytes, status: int, code: str
) -> None:
    with server.begin_raw(head + b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n") as sock:
        answer = sock.rest()
    assert answer.startswith(b"HTTP/1.1 %d" % status), answer[:80]
    assert answer.count(b"HTTP/1.1 ") == 1, "the request after it is not answered"
    assert code.encode() in answer
    assert server.get("/health").status == 200
    assert server.server_state.client.in_flight == server.server_state.client.choices == 0


def test_what_is_no_http_is_refused_without_names_of_python(server: Running) -> None:
    with server.begin_raw(b"no request at all\r\n\r\n") as sock:
        answer = sock.rest()
    assert b'"this is no HTTP/1.1 request: illegal request line"' in answer


@pytest.mark.parametrize(
    ("parts", "status", "code"),
    [
        (
            [b"GET /health HTTP/1.1\r\nhost: a\r\nx: ", b"y" * 5_000_000, b"\r\n\r\n"],
            431,
            "headers_too_large",
        ),
        (
            [
                HEAD + b"x: ",
                b"y" * 100_000,
                b"\r\ncontent-length: 9000000\r\n\r\n",
                b"z" * 9_000_000,
            ],
            431,
            "headers_too_large",
        ),
        (
            [HEAD + b"connection: close\r\ncontent-length: 50000000\r\n\r\n", b"z" * 50_000_000],
            413,
            "request_too_large",
        ),
        (
            [HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", b"z" * 5_000_000],
            400,
            "invalid_http",
        ),
        ([HEAD + b"transfer-encoding: chunked\r\n\r\n5;", b"z" * 5_000_000], 400, "invalid_http"),
    ],
    ids=["a long head", "a head and a body", "a long body", "a chunk", "a chunk's head"],
)
def test_who_goes_on_to_send_hears_why_nobody_reads_it(
    server: Running, parts: list[bytes], status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock,
        caplog.at_level(logging.ERROR),
    ):
        for part in parts:
            sock.sendall(part)
        sock.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 %d " % status) and code.encode() in answer
    assert server.get("/health").status == 200
    assert server.server_state.active == 0 and not caplog.records


def test_a_head_within_the_limits_may_come_in_pieces(server: Running) -> None:
    with server.begin_raw(b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 60_000) as sock:
        assert server.get("/health").status == 200, "the first piece was taken"
        sock.send(b"\r\n\r\n")
        assert sock.status() == 200


@pytest.mark.parametrize(
    ("head", "status", "limit"),
    [
        (b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 200_000, 431, "LINGER"),
        (HEAD + b"content-length: 50000000\r\n\r\n", 413, "EARLY_DEADLINE"),
    ],
)
def test_who_does_not_stop_sending_is_cut_off(
    server: Running, head: bytes, status: int, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"jaxllm.server.transport.http.{limit}", 0.05)
    with server.begin_raw(head) as sock:
        assert sock.status() == status
        assert sock.cut_off()


def test_heads_of_all_connections_hold_so_much_at_a_time(
    fresh: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxllm.server.transport.http.TOTAL_UNPARSED", 100_000)
    head, state = (
        b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 40_000,
        fresh._server.server_state,
    )

    def holding(size: int) -> None:
        while state.unparsed // 1000 != size // 1000:
            assert fresh.get("/version").status == 200, "a whole head finds room"

    with fresh.begin_raw(head) as first, fresh.begin_raw(head) as second:
        holding(80_000)
        with fresh.begin_raw(head[:15_000]) as third:
            holding(95_000)
            third.send(b"y" * 6000)
            assert (
                third.status() == 503
                and b"retry-after" in (answer := third.rest())
                and b"heads_full" in answer
            )
        holding(80_000)
        first.send(b"\r\n\r\n")
        assert first.status() == 200
        holding(40_000)
        second.send(b"\r\n\r\n" + head)
        assert second.status() == 200
        holding(40_000)
    holding(0)


def test_what_is_sent_behind_a_request_is_counted_too(
    fresh: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'{"model":"fake","prompt":"abc","max_tokens":200,"ignore_eos":true}'
    asking = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )
    state, control = fresh._server.server_state, fresh.control
    control.go.clear()
    with fresh.begin_raw(asking) as two:
        assert control.saw(lambda: len(control.added) == 1)
        two.send(asking)
        while state.unparsed != len(asking):
            assert fresh.get("/version").status == 200
        control.go.set()
        assert two.status() == 200
        assert control.saw(lambda: len(control.added) == 2 and not control.running)
        assert state.unparsed == 0
    control.go.clear()
    with fresh.begin_raw(asking) as greedy:
        assert control.saw(lambda: len(control.added) == 3)
        monkeypatch.setattr("jaxllm.server.transport.http.TOTAL_UNPARSED", 100)
        greedy.send(asking)
        assert greedy.closed()
        while fresh.server_state.active:
            assert fresh.get("/version").status == 200
    assert state.unparsed == 0
    while control.running:  # a step at a time, so that the abort arrives before the last token
        control.go.set()
        control.go.clear()
        assert fresh.get("/version").status == 200
    control.go.set()
    assert len(control.aborted) == 1


def test_a_server_that_stops_hears_nobody_out(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("LINGER", "EARLY_DEADLINE"):
        monkeypatch.setattr(f"jaxllm.server.transport.http.{limit}", 100.0)
    declared = HEAD + b"content-length: 50000000\r\n"
    with Running(tokenizer) as server:
        server._server.config.timeout_graceful_shutdown = None  # it waits for every connection
        refused = [
            server.begin_raw(head)
            for head in (
                declared + b"\r\n",
                declared + b"connection: close\r\n\r\n",
                b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000,
            )
        ]
        assert [sock.status() for sock in refused] == [413, 413, 431]
    assert all(sock.cut_off() for sock in refused), "and the server has ended"
    for sock in refused:
        sock.close()
