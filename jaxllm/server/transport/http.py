"""uvicorn's h11 protocol with deadlines for slow clients, limits of heads and JSON error replies.

A connection that is closed during a request lingers until the client has received the reply.
tests/server/transport/test_uvicorn.py checks the internals of uvicorn that are used here.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import sys
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from jaxllm.server.errors import ApiError, bad_request, overloaded, sanitize
from jaxllm.server.transport.connection import CHUNKS, Chunks, Connection
from jaxllm.server.transport.event_loop import SOCKETS
from jaxllm.server.transport.sockets import listen

# Seconds from a connection's first byte, or its opening, to a whole request head
HEADER_DEADLINE = 30.0
MAX_HEADERS = 256
MAX_HEAD_BYTES = 64 << 10  # of all headers together
MAX_UNPARSED = 2 * MAX_HEAD_BYTES  # of an unfinished head, with the bytes between headers
TOTAL_UNPARSED = 256 << 20  # of all connections
EARLY_DEADLINE = 30.0  # seconds from an early reply to the end of the request's body
LINGER = 5.0  # seconds that a client may go on sending after the reply
WRITE_DEADLINE = 120.0  # seconds that a full socket buffer may stay full
TLS_BUFFER = 32 << 10  # bytes, from a TLS connection's opening; asyncio's own are 256 KiB

_ABSOLUTE = re.compile(rb"https?://[^/]*", re.IGNORECASE)


class HttpState(ServerState):
    """State that all connections share."""

    unparsed: int = 0  # bytes received that belong to no request yet


class HttpProtocol(H11Protocol):
    """One connection. httptools is never used: it does not limit headers.

    Attributes:
        lingering: whether the reply is sent and input is read only to be dropped.
    """

    server_state: HttpState
    transport: LingeringTransport  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.conn = Connection(h11.SERVER, MAX_UNPARSED)
        self._application = self.app
        self.app = self._run_application
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self.lingering = False
        self._stopping = False
        self._unparsed = 0  # this connection's part of `server_state.unparsed`

    async def _run_application(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI; the message that starts a response gets what writes its chunks. A head is written
        with the part of the body that follows at once, and the end of a body with its last part: a
        write costs as much as all else of a short reply."""
        cycle = self.cycle
        transport = self.transport

        async def sending(message: Message) -> None:
            transport.hold()
            try:
                await send(message)
            except BaseException:
                transport.release()
                raise
            if message["type"] == "http.response.start":
                message[CHUNKS] = Chunks(cycle)
                self.loop.call_soon(transport.release)
            else:
                transport.release()

        await self._application(scope, receive, sending)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio.Protocol"""
        super().connection_made(LingeringTransport(transport, self))  # type: ignore[arg-type]
        self._head_timer = self.loop.call_later(HEADER_DEADLINE, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio.Protocol"""
        for timer in (self._head_timer, self._write_timer, self._end_timer):
            if timer is not None:
                timer.cancel()
        self._count_unparsed(0)
        super().connection_lost(exc)

    @property
    def request_received(self) -> bool:
        """Whether no part of a request is still to arrive."""
        return self.conn.their_state not in (h11.SEND_BODY, h11.ERROR)

    def linger(self, transport: asyncio.Transport) -> None:
        """Close, after the client has stopped sending unless the server stops.

        Closing a socket with unread input resets it, and the client would lose the reply.
        """
        if self.lingering or self._stopping or self.request_received:
            return transport.close()
        self.lingering = True
        if transport.can_write_eof():  # TLS has no half-closed connections
            transport.write_eof()
        transport.resume_reading()
        self._end_timer = self.loop.call_later(LINGER, transport.abort)

    def shutdown(self) -> None:
        """uvicorn's hook: requests in progress go on, lingering connections close."""
        self._stopping = True
        if self.lingering:
            return self.transport.close()
        super().shutdown()

    def data_received(self, data: bytes) -> None:
        """asyncio.Protocol"""
        if self.lingering:
            return
        super().data_received(data)
        self._count_unparsed(len(self.conn.trailing_data[0]))
        if self._unparsed and self.server_state.unparsed > TOTAL_UNPARSED:
            return self._refuse_head()
        if (
            self._end_timer is None
            and not self.request_received
            and self.conn.our_state is h11.DONE
        ):
            self._end_timer = self.loop.call_later(EARLY_DEADLINE, self.transport.abort)
        elif self._end_timer is not None and self.request_received and not self.lingering:
            self._end_timer.cancel()
            self._end_timer = None
        waiting = self.conn.their_state is h11.IDLE
        if waiting and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEADER_DEADLINE, self.transport.abort)
        elif not waiting and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def on_response_complete(self) -> None:
        """uvicorn's hook: pipelined input is parsed now, so count it again."""
        super().on_response_complete()
        if self._unparsed:
            self._count_unparsed(len(self.conn.trailing_data[0]))

    def _count_unparsed(self, size: int) -> None:
        """Set this connection's unparsed bytes: part of a head, or input sent ahead."""
        self.server_state.unparsed += size - self._unparsed
        self._unparsed = size

    def _refuse_head(self) -> None:
        """End the connection for want of memory: with a 503 during a head, which ends a request
        in progress without one."""
        if self.conn.our_state is not h11.IDLE:
            return self.transport.abort()
        self._answer(
            overloaded("too many heads of requests arrive at once; retry later", "heads_full")
        )
        self.transport.close()

    def pause_writing(self) -> None:
        """The client does not read: after WRITE_DEADLINE the connection and its request end."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_DEADLINE, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def send_400_response(self, msg: str) -> None:
        """Answer input that is no HTTP; uvicorn calls this while h11's exception is handled. A
        reply that has begun is left as it is."""
        began = self.conn.our_state is not h11.IDLE
        if began:
            self.cycle.disconnected = True  # its application sees a client that has gone
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._answer(parse_error(sys.exception(), whole_head=began))
        self.transport.close()

    def _answer(self, error: ApiError) -> None:
        error.headers["connection"] = "close"
        headers, body = error.http_reply()
        start = h11.Response(
            status_code=error.status, headers=headers, reason=HTTPStatus(error.status).phrase
        )
        for event in (start, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")


class LingeringTransport:
    """A transport whose `close` is its protocol's `linger`, and which can hold what is written."""

    def __init__(self, transport: asyncio.Transport, protocol: HttpProtocol):
        self._transport = transport
        self._protocol = protocol
        self._held: list[bytes] = []
        # Found at once, for every token
        self.write: Callable[[bytes], None] = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def hold(self) -> None:
        """Write nothing until `release`, and then all at once."""
        self.write = self._held.append

    def release(self) -> None:
        """Write what was held, and from now on at once."""
        self.write = self._transport.write
        if self._held:
            self._transport.write(b"".join(self._held))
            self._held.clear()

    def close(self) -> None:
        """asyncio.Transport"""
        self.release()
        self._protocol.linger(self._transport)

    def is_closing(self) -> bool:
        """asyncio.Transport"""
        return self._protocol.lingering or self._transport.is_closing()


def parse_error(why: BaseException | None, whole_head: bool) -> ApiError:
    """The reply to input that h11 cannot parse, in or after a head."""
    if isinstance(why, h11.RemoteProtocolError) and why.error_status_hint == 431 and not whole_head:
        return head_too_large(f"more than {MAX_UNPARSED} bytes")
    reason = str(why).partition(": bytearray(")[0]  # the client knows what it has sent
    return bad_request(f"this is no HTTP/1.1 request: {sanitize(reason)}", code="invalid_http")


def head_too_large(size: str) -> ApiError:
    """The 431; `size` says how large the head is."""
    limits = f"at most {MAX_HEADERS} headers of {MAX_HEAD_BYTES} bytes together are taken"
    return ApiError(431, f"the head of the request has {size}; {limits}", code="headers_too_large")


def head_error(version: str, headers: Sequence[tuple[bytes, bytes]]) -> ApiError | None:
    """The refusal of a request's head, if any. A proxy may read a head with two lengths as two
    requests."""
    if version not in ("1.0", "1.1"):
        return bad_request("this server speaks HTTP/1.1", code="invalid_http")
    size = sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MAX_HEADERS or size > MAX_HEAD_BYTES:
        return head_too_large(f"{len(headers)} headers of {size} bytes")
    if {name for name, _ in headers} >= {b"content-length", b"transfer-encoding"}:
        return bad_request(
            "a request has either content-length or transfer-encoding", code="invalid_http"
        )
    return None


def origin_form(scope: Scope) -> Scope:
    """`scope` with the path alone of an absolute request target (RFC 9112, 3.2.2):
    `GET http://host/v1/models` gets /v1/models."""
    root = scope.get("root_path", "")
    raw = scope.get("raw_path", b"")[len(root.encode()) :]
    if not _ABSOLUTE.match(raw):
        return scope
    raw = _ABSOLUTE.sub(b"", raw) or b"/"
    path = root + unquote(raw.decode("ascii"))
    return {**scope, "raw_path": root.encode() + raw, "path": path}


class HeaderLimits:
    """ASGI middleware that refuses heads over the limits and closes their connections."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI"""
        refusal = None
        if scope["type"] == "http":
            refusal = head_error(scope["http_version"], scope["headers"])
        if refusal is None:
            return await self._app(origin_form(scope), receive, send)
        refusal.headers["connection"] = "close"
        await send_error(refusal, send)


async def send_error(error: ApiError, send: Send) -> None:
    """An error as a whole HTTP reply."""
    headers, body = error.http_reply()
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: `lifecycle` decides when to stop."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.server_state: HttpState = HttpState()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's hook. `backlog` is how many connections asyncio accepts in a turn, too, which
        is fewer than may wait."""
        await super().startup(sockets)
        for sock in sockets or ():
            listen(sock)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's hook."""
        yield


def http_server(app: Any, root_path: str, tls: ssl.SSLContext | None = None) -> HttpServer:
    """A server for `app` that is driven by `serve(sockets=…)` and `should_exit`."""
    config = uvicorn.Config(
        HeaderLimits(app),
        http=HttpProtocol,
        h11_max_incomplete_event_size=MAX_UNPARSED,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        root_path=root_path,
        backlog=SOCKETS,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )
    config.load()
    config.ssl = tls
    SSLProtocol.max_size = TLS_BUFFER
    return HttpServer(config)
