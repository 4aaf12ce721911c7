"""Sends pages of a shelf to engines that have the key."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress

import numpy as np

from jaxllm.kv_transfer.ring import Ring
from jaxllm.kv_transfer.settings import refused
from jaxllm.kv_transfer.shelf import Shelf
from jaxllm.kv_transfer.wire import (
    CLOSED,
    CREDIT,
    END,
    HEADER,
    MAX_PAGES,
    NONCE,
    Found,
    Peer,
    Refused,
    TransferError,
    Wanted,
    answer_greeting,
)

MAX_CONNECTIONS = 256
HANDSHAKE = 5.0  # seconds
IDLE = 300.0  # seconds without a request until a connection is closed
SEND = 30.0  # seconds to send a page, and what comes before the first
WAIT = 30.0  # seconds to wait for a page that is on its way to the shelf

logger = logging.getLogger("jaxllm")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; nobody is answered yet. Raises ConfigError when the address cannot be
    had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise refused(
            f"cannot bind {host} port {port}: {error.strerror}; choose another kv_ip or kv_port"
        ) from None


class PageServer:
    """Answers at a socket of `listen` until `close`; a thread for each connection.

    `page_bytes`: of each page of the shelf, which are for `fingerprint`.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        shelf: Shelf,
        fingerprint: bytes,
        page_bytes: int,
    ):
        self._listener = listener
        self._key = key
        self._shelf = shelf
        self._fingerprint = fingerprint
        self._page_bytes = page_bytes
        self._failures: set[str] = set()  # each kind is logged once
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="kv-pages", daemon=True).start()

    def close(self) -> None:
        """End the listener and every connection."""
        with self._lock:
            sockets = [*self._open, self._listener]
            self._open = set()
        for sock in sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that uses it
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except ConnectionAbortedError:
                continue
            except OSError:  # closed
                return
            with self._lock:
                takes = len(self._open) < MAX_CONNECTIONS
                if takes:
                    self._open.add(connection)
            if takes:
                args = (connection,)
                threading.Thread(target=self._serve, args=args, daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one peer until it goes or breaks a rule."""
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = Peer(connection, 0.0)
            peer.begin(HANDSHAKE)
            answer_greeting(peer, self._key)
            rings: dict[str, Ring] = {}
            while True:
                peer.begin(IDLE)
                self._answer(peer, peer.read_frame(), rings)
        except TransferError as error:
            self._report(str(error))
        except OSError:  # gone, or silent for too long
            pass
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _report(self, why: str) -> None:
        """Log a failure, the first of its kind."""
        cause = why.partition(":")[0]
        with self._lock:
            first = cause not in self._failures
            self._failures.add(cause)
        if first and why != CLOSED:
            logger.warning("KV pages were not sent: %s", why)

    def _answer(self, peer: Peer, wanted: object, rings: dict[str, Ring]) -> None:
        if not isinstance(wanted, Wanted):
            raise TransferError("a peer sends what only answers may be")
        if len(wanted.hashes) % NONCE or len(wanted.hashes) > MAX_PAGES * NONCE:
            raise TransferError(f"a peer asks for more than {MAX_PAGES} pages, or for parts of one")
        peer.begin(SEND)
        if (wanted.fingerprint, wanted.page_bytes) != (self._fingerprint, self._page_bytes):
            peer.send_frame(Refused())
            return
        keys = [
            wanted.hashes[start : start + NONCE] for start in range(0, len(wanted.hashes), NONCE)
        ]
        ring = self._ring(wanted.ring, rings)
        count = self._shelf.coming(keys)
        peer.send_frame(Found(count, ring is not None))
        window = None if ring is None else _Window(peer, ring)
        for number, key in enumerate(keys[:count]):
            with self._shelf.reading(key, WAIT) as page:
                peer.begin(SEND)
                if page is None:
                    peer.send(HEADER.pack(END, 0))
                    break
                header = HEADER.pack(number, page.checksum)
                if window is None:
                    peer.send(header, page.data)
                else:
                    window.send(number, header, page.data)
        if window is not None:
            window.drain()

    def _ring(self, name: str, rings: dict[str, Ring]) -> Ring | None:
        """The peer's shared memory, opened once a connection; None where it is out of reach."""
        if name and name not in rings:
            rings.clear()
            try:
                rings[name] = Ring.open(name, self._page_bytes)
            except ValueError as error:
                raise TransferError(str(error)) from None
            except OSError:  # another host or container
                return None
        return rings.get(name)


class _Window:
    """Puts pages into a ring, each when its slot is free."""

    def __init__(self, peer: Peer, ring: Ring):
        self._peer = peer
        self._ring = ring
        self._open = 0  # pages that the peer has not taken

    def send(self, number: int, header: bytes, page: np.ndarray) -> None:
        """Send the next page."""
        if self._open == self._ring.slots:
            self._await()
        self._ring.slot(number)[:] = page
        self._peer.send(header)
        self._open += 1

    def drain(self) -> None:
        """Wait until all are taken."""
        while self._open:
            self._await()

    def _await(self) -> None:
        """Wait until the peer has taken one, or more."""
        data = self._peer.read_some(self._open)
        if data.strip(CREDIT):
            raise TransferError("a peer sends what is no credit")
        self._open -= len(data)
