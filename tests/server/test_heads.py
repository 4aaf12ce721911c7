"""Heads of requests that are not taken: answered once, with the right status, and the server goes on as before."""

from __future__ import annotations

import pytest

from tests.server.harness import Running


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400, "invalid_http"),
        (b"GET /health HTTP/9.9\r\nhost: a\r\n\r\n", 400, "invalid_http"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"".join(b"x%d: 1\r\n" % i for i in range(300)) + b"\r\n", 431, "headers_too_large"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", 431, "headers_too_large"),
    ],
)
def test_a_head_that_is_not_taken_ends_its_connection(server: Running, head: bytes, status: int, code: str) -> None:
    with server.begin_raw(head + b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n") as sock:
        answer = sock.rest()
    assert answer.startswith(b"HTTP/1.1 %d" % status), answer[:80]
    assert answer.count(b"HTTP/1.1 ") == 1, "the request after it is not answered"
    assert code.encode() in answer
    assert server.get("/health").status == 200
    assert server.edge.bridge.in_flight == server.edge.bridge.choices == 0
