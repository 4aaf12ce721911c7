"""uvicorn's h11 protocol with deadlines for slow clients and the JSON envelope for requests that are no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import h11
import orjson
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxllm.server.errors import bad_request

HEADER_DEADLINE = 30.0  # seconds from a connection's first byte, or its opening, to a whole request head
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
        body = orjson.dumps(bad_request(msg, code="invalid_http").envelope())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        for event in (h11.Response(status_code=400, headers=headers, reason=b"Bad Request"), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: `lifecycle` decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's hook."""
        yield


def http_server(app: Any, root_path: str) -> HttpServer:
    """A server for `app` that is driven by `serve(sockets=…)` and `should_exit`."""
    config = uvicorn.Config(
        app,
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
