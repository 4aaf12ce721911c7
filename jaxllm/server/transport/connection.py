"""h11's side of a connection, without its state machine where no state can change."""

from __future__ import annotations

import h11
from h11._writers import ChunkedWriter


class Connection(h11.Connection):
    """A server's. Most of what it sends are chunks in the midst of a stream, one a token: they are
    framed at once, since data within a body changes no state."""

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        """h11's; the bytes to write."""
        if type(event) is h11.Data and type(self._writer) is ChunkedWriter:
            data = event.data
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        return super().send(event)
