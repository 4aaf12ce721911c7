"""Clients that send or read too slowly are cut off, and nobody else notices."""

from __future__ import annotations

import pytest

from tests.server.harness import Running


def test_slow_heads_and_slow_bodies_are_cut_off(
    fresh: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("jaxllm.server.transport.http.HEADER_DEADLINE", 0.05)
        for data in (b"", b"GET /health HTTP/1.1\r\nhost:"):
            with fresh.begin_raw(data) as sock:
                assert sock.closed()
        with fresh.begin_raw(b"GET /health HTTP/1.1\r\nx: ") as sock:
            assert sock.cut_off(), "bytes that go on arriving do not put the end off"
    monkeypatch.setattr("jaxllm.server.requests.bodies.BODY_DEADLINE", 0.05)
    with fresh.begin_raw(
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{"
    ) as sock:
        assert sock.status() == 408
        assert b"connection: close" in sock.rest().lower(), "and the server hangs up"
    chunked = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    with fresh.begin_raw(chunked) as sock:
        while not sock.readable():
            sock.send(b"1\r\n \r\n")
        assert sock.status() == 408
    assert fresh.server_state.bodies.bytes_read == 0
    with fresh.begin_raw(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n") as sock:
        assert sock.status() == 200


def test_a_connection_that_is_not_read_is_cut_off_and_its_request_aborted(
    fresh: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxllm.server.transport.http.WRITE_DEADLINE", 0.05)
    body = {
        "model": "fake",
        "prompt": ["abc"] * 24,
        "ignore_eos": True,
        "max_tokens": 250,
        "stream": True,
        "logprobs": 20,
    }
    with fresh.begin("/v1/completions", body):
        assert fresh.control.saw(lambda: len(fresh.control.added) == 24)
        assert fresh.control.saw(lambda: not fresh.control.running)
        beside = {"model": "fake", "prompt": "abc", "stream": True}
        assert len(fresh.post("/v1/completions", beside).events()) == 3
        while fresh.server_state.active:
            assert fresh.get("/health").status == 200
    assert fresh.post("/v1/completions", {"model": "fake", "prompt": "abc"}).status == 200
