"""h11's side of a connection, without its state machine where no state can change, and chunks
without ASGI's coroutines."""

from __future__ import annotations

from typing import Any

import h11
from h11._writers import ChunkedWriter

CHUNKS = "jaxllm.chunks"  # where the message that starts a response gets its `Chunks`


class Connection(h11.Connection):
    """A server's. Most of what it sends are chunks in the midst of a stream, one a token: they are
    framed at once, since data within a body changes no state."""

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        """h11's; the bytes to write."""
        if type(event) is h11.Data and type(self._writer) is ChunkedWriter:
            return framed(event.data)
        return super().send(event)

    def data(self, data: bytes) -> bytes:
        """Part of the body as the bytes to write."""
        if type(self._writer) is ChunkedWriter:
            return framed(data)
        return super().send(h11.Data(data=data)) or b""


class Chunks:
    """Direct writes to the connection, for token streams.

    `http.response.start` carries it back to the application unless a middleware needs to see the
    body. `cycle` is uvicorn's, of this one response.
    """

    def __init__(self, cycle: Any):
        self._cycle = cycle
        # Found at once, for every token
        self._flow = cycle.flow
        self._conn = cycle.conn
        self._transport = cycle.transport

    @property
    def open(self) -> bool:
        """Whether a write would be taken: the client is there and reads, and the response has not
        ended."""
        cycle = self._cycle
        return not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)

    def write(self, data: bytes) -> None:
        """Write part of the body; only while `open`."""
        self._transport.write(self._conn.data(data))


def framed(data: bytes) -> bytes:
    """A chunk; nothing for no data, since an empty chunk ends the body."""
    if not data:
        return b""
    return b"%x\r\n%b\r\n" % (len(data), data)
