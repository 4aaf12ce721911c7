"""What one side of a socket says, without waiting until the other side reads it."""

from __future__ import annotations

import socket
import threading
from collections import deque

LIMIT = 64 << 20  # bytes that the other side may be behind: half a minute of the fastest engines


class Outbox:
    """Sends in order, from any thread. Only what the socket does not take at once is kept, and a
    thread sends that; `limit` bytes of it at most, or a message more."""

    def __init__(self, sock: socket.socket, limit: int = LIMIT):
        self._sock = sock
        self._limit = limit
        self._changed = threading.Condition()
        self._kept: deque[bytes] = deque()
        self._size = 0
        self._failed: OSError | None = None

    def send(self, data: bytes) -> None:
        """Send `data`; waits only while the other side is too far behind. Raises OSError when it
        has gone."""
        with self._changed:
            if not self._kept:
                data = data[self._taken(data) :]
            self._changed.wait_for(lambda: self._size <= self._limit or self._failed is not None)
            if self._failed is not None:
                raise self._failed
            if data:
                self._keep(data)

    def flush(self) -> None:
        """Wait until everything is sent, or the other side has gone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._kept)

    def _taken(self, data: bytes) -> int:
        """How many bytes the socket takes at once."""
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _keep(self, data: bytes) -> None:
        self._kept.append(data)
        self._size += len(data)
        if len(self._kept) == 1:
            threading.Thread(target=self._send_kept, name="outbox", daemon=True).start()

    def _send_kept(self) -> None:
        """Until nothing is left."""
        data: bytes | None = self._kept[0]
        while data is not None:
            failed = self._failure(data)
            with self._changed:
                self._failed = failed
                if failed is not None:
                    self._kept.clear()
                else:
                    self._size -= len(self._kept.popleft())
                data = self._kept[0] if self._kept else None
                self._changed.notify_all()

    def _failure(self, data: bytes) -> OSError | None:
        """Send it all."""
        try:
            self._sock.sendall(data)
        except OSError as error:
            return error
        return None
