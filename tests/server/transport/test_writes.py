"""How many writes a reply takes. Each is a call of the system, and may wake the client."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from uvicorn.server import ServerState

from jaxllm.server.transport import http
from jaxllm.server.transport.connection import CHUNKS
from jaxllm.server.transport.http import LingeringTransport, http_server

START = {"type": "http.response.start", "status": 200, "headers": []}
REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


class Writes:
    """asyncio's transport, and what was written to it."""

    def __init__(self, transport: asyncio.Transport, seen: list[bytes]):
        self._transport, self._seen = transport, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """asyncio.Transport"""
        self._seen.append(bytes(data))
        self._transport.write(data)


def body(data: bytes, more: bool = False) -> dict[str, Any]:
    """A message with a part of a body."""
    return {"type": "http.response.body", "body": data, "more_body": more}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[bytes]]:
    """The writes of an application's reply to one request, from a server's connection."""

    async def serve(app: Any) -> list[bytes]:
        seen: list[bytes] = []

        class Recording(LingeringTransport):
            def __init__(self, transport: Any, protocol: Any):
                super().__init__(Writes(transport, seen), protocol)  # type: ignore[arg-type]

        monkeypatch.setattr(http, "LingeringTransport", Recording)
        server = http_server(app, "")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)

        def protocol() -> Any:
            state: ServerState = server.server_state
            return http.HttpProtocol(config=server.config, server_state=state, app_state={})

        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(protocol, sock=theirs)
        got = b""
        try:
            await loop.sock_sendall(ours, REQUEST)
            async with asyncio.timeout(20):
                while not got.endswith(b"0\r\n\r\n"):
                    got += await loop.sock_recv(ours, 1 << 16)
        finally:
            transport.close()
            ours.close()
        assert b"".join(seen) == got
        return seen

    return lambda app: asyncio.run(serve(app))


def test_a_reply_is_one_write(written: Callable[[Any], list[bytes]]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(body(b"all"))

    (whole,) = written(app)
    assert whole.startswith(b"HTTP/1.1 200 OK\r\n") and whole.endswith(b"3\r\nall\r\n0\r\n\r\n")


def test_a_stream_is_a_write_for_each_part(written: Callable[[Any], list[bytes]]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        start = dict(START)
        await send(start)
        await send(body(b"first", more=True))
        await asyncio.sleep(0)
        start[CHUNKS].write(b"second")
        await asyncio.sleep(0)
        await send(body(b"last"))

    first, second, last = written(app)
    assert first.startswith(b"HTTP/1.1 200 OK\r\n") and first.endswith(b"5\r\nfirst\r\n")
    assert (second, last) == (b"6\r\nsecond\r\n", b"4\r\nlast\r\n0\r\n\r\n")


def test_a_head_waits_for_no_body_that_is_not_there(
    written: Callable[[Any], list[bytes]],
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await send(body(b"late"))

    head, late = written(app)
    assert head.endswith(b"\r\n\r\n") and late.startswith(b"4\r\nlate\r\n")


def test_what_is_written_before_a_failure_is_sent(written: Callable[[Any], list[bytes]]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        with pytest.raises(RuntimeError):
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send(body(b"still"))

    assert b"".join(written(app)).endswith(b"5\r\nstill\r\n0\r\n\r\n")
