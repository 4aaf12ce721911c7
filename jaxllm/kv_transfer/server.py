"""Sends pages of a shelf to engines that have the key."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress

from jaxllm.kv_transfer.ring import Ring
from jaxllm.kv_transfer.settings import refused
from jaxllm.kv_transfer.shelf import Shelf, StoredPage
from jaxllm.kv_transfer.wire import (
    CLOSED,
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
SEND = 30.0  # seconds of one answer
COPYING = 2.0  # seconds to wait for pages that are on their way to the shelf

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
        self._key, self._shelf = key, shelf
        self._fingerprint, self._page_bytes = fingerprint, page_bytes
        self._failures: set[str] = set()  # each kind is logged once
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="kv-pages", daemon=True).start()

    def close(self) -> None:
        """End the listener and every connection."""
        with self._lock:
            sockets, self._open = [*self._open, self._listener], set()
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes the thread that uses it
            one.close()

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
        kind = why.partition(":")[0]
        with self._lock:
            first = kind not in self._failures
            self._failures.add(kind)
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
        keys = [wanted.hashes[at : at + NONCE] for at in range(0, len(wanted.hashes), NONCE)]
        ring = self._ring(wanted.ring, rings)
        with self._shelf.reading(keys, COPYING) as pages:
            peer.send_frame(Found(len(pages), ring is not None))
            if ring is None:
                for number, page in enumerate(pages):
                    peer.send(HEADER.pack(number, page.checksum), page.data)
            else:
                _send_shared(peer, ring, pages)

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


def _send_shared(peer: Peer, ring: Ring, pages: list[StoredPage]) -> None:
    """Put pages into the ring, each when its slot is free, and await that all are taken."""
    taken = 0
    for number, page in enumerate(pages):
        while number - taken >= ring.slots:
            taken += _credits(peer, number - taken)
        ring.slot(number)[:] = page.data
        peer.send(HEADER.pack(number, page.checksum))
    while taken < len(pages):
        taken += _credits(peer, len(pages) - taken)


def _credits(peer: Peer, most: int) -> int:
    """Pages that the peer has taken since; at least one."""
    data = peer.read_some(most)
    if data.strip(b"\x01"):
        raise TransferError("a peer sends what is no credit")
    return len(data)
