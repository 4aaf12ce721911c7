"""uvicorn's h11 protocol with deadlines for slow clients, bounds for heads, and the JSON envelope for requests that are no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import h11
import orjson
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxllm.server.errors import ApiError, bad_request

HEADER_DEADLINE = 30.0  # seconds from a connection's first byte, or its opening, to a whole request head
MAX_HEADERS = 256
MAX_HEAD_BYTES = 64 << 10  # of all headers together
WRITE_DEADLINE = 120.0  # seconds that a full socket buffer may stay full


class HttpProtocol(H11Protocol):
    """One connection. httptools is never used: it has no limit on headers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio.Protocol"""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEADER_DEADLINE, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio.Protocol"""
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """asyncio.Protocol"""
        super().data_received(data)
        waiting = self.conn.their_state is h11.IDLE
        if waiting and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEADER_DEADLINE, self.transport.abort)
        elif not waiting and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def pause_writing(self) -> None:
        """The client does not read: it gets a while, then the connection ends and its request is aborted."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_DEADLINE, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def send_400_response(self, msg: str) -> None:
        """What could not be parsed as HTTP."""
        headers, body = last_words(bad_request(msg, code="invalid_http"))
        for event in (h11.Response(status_code=400, headers=headers, reason=b"Bad Request"), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def last_words(error: ApiError) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of a reply after which the connection is closed."""
    body = orjson.dumps(error.envelope())
    return [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")], body


def trouble_of(version: str, headers: Sequence[tuple[bytes, bytes]]) -> ApiError | None:
    """Why a request's head is not taken. One with two lengths may be two requests for a proxy before us."""
    if version not in ("1.0", "1.1"):
        return bad_request("this server speaks HTTP/1.1", code="invalid_http")
    size = sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MAX_HEADERS or size > MAX_HEAD_BYTES:
        limits = f"at most {MAX_HEADERS} headers of {MAX_HEAD_BYTES} bytes together are taken"
        return ApiError(431, f"the request has {len(headers)} headers of {size} bytes; {limits}", code="headers_too_large")
    if {name for name, _ in headers} >= {b"content-length", b"transfer-encoding"}:
        return bad_request("a request has either content-length or transfer-encoding", code="invalid_http")
    return None


class Heads:
    """Answers requests whose head is not taken, and closes their connections; the others are for `app`."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI"""
        trouble = trouble_of(scope["http_version"], scope["headers"]) if scope["type"] == "http" else None
        if trouble is None:
            return await self._app(scope, receive, send)
        headers, body = last_words(trouble)
        await send({"type": "http.response.start", "status": trouble.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: `lifecycle` decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's hook."""
        yield


def http_server(app: Any, root_path: str) -> HttpServer:
    """A server for `app` that is driven by `serve(sockets=…)` and `should_exit`."""
    config = uvicorn.Config(
        Heads(app),
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        root_path=root_path,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )
    return HttpServer(config)
