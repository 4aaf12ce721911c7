"""Fetches pages from an engine that has computed them."""

from __future__ import annotations

import errno
import ipaddress
import os
import select
import socket
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np

from jaxllm.kv_transfer.checksum import checksum
from jaxllm.kv_transfer.ring import Ring
from jaxllm.kv_transfer.wire import (
    CREDIT,
    END,
    HEADER,
    MAX_PAGES,
    Found,
    Peer,
    TransferError,
    Wanted,
    greet,
)

MAX_IDLE = 32  # connections that are kept for later
ENDED = "this side fetches no more"
SILENT = 10.0  # seconds for which an address that did not answer in time is not asked again

type Address = tuple[str, int]


@dataclass(slots=True)
class _Connection:
    """A peer that has proved its key; a ring where it may be on this host."""

    peer: Peer
    ring: Ring | None
    used: bool = False

    def close(self) -> None:
        """Drop the connection and the ring's name, if it still has one."""
        if self.ring is not None:
            self.ring.unlink()
        with suppress(OSError):
            self.peer.socket.close()


class PageClient:
    """Fetches pages of `page_bytes` bytes that were made for `fingerprint`. Any thread may call it.

    `shared`: whether shared memory is tried where the peer is on this host. `patience`: seconds
    without an answer after which an address counts as silent; a fetch may have less time.

    Attributes:
        idle: connections that are kept for the next fetch, with their addresses, the oldest first.
        sockets: all that may be open.
    """

    def __init__(
        self,
        key: bytes,
        fingerprint: bytes,
        page_bytes: int,
        shared: bool = True,
        patience: float = 0.0,
    ):
        self._key = key
        self._fingerprint = fingerprint
        self._page_bytes = page_bytes
        self._shared = shared
        self._patience = patience
        self._lock = threading.Lock()
        self.idle: list[tuple[Address, _Connection]] = []
        self._closed = False
        self.sockets: WeakSet[socket.socket] = WeakSet()
        self._silent: dict[Address, float] = {}  # until when (time.monotonic)

    def fetch(
        self, address: Address, hashes: Sequence[bytes], seconds: float
    ) -> Generator[np.ndarray]:
        """Pages of the longest prefix of `hashes` that the peer has or gets, one by one, uint8
        `[page_bytes]`; each is checked, and valid until the next one is asked for.

        Raises TransferError when no more can be had: a damaged page, another model, an answer or a
        page that does not come within `seconds` of what came before.
        """
        asked = time.monotonic()
        try:
            try:
                connection, reply = self._ask(address, hashes[:MAX_PAGES], asked + seconds)
            except TimeoutError:
                if (now := time.monotonic()) - asked >= self._patience:
                    self._silent[address] = now + SILENT
                raise
            try:
                yield from self._pages(connection, reply, seconds)
            except BaseException:
                connection.close()
                raise
            self._keep(address, connection)
        except OSError as error:
            raise TransferError(error.strerror or str(error)) from None

    def close(self) -> None:
        """Close the connections that are kept, end fetches with TransferError, whatever they wait
        for, and begin no other."""
        with self._lock:
            self._closed = True
            idle = self.idle
            self.idle = []
            sockets = [*self.sockets]
        for sock in sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for _, connection in idle:
            connection.close()

    def _ask(
        self, address: Address, hashes: Sequence[bytes], until: float
    ) -> tuple[_Connection, Found]:
        """A connection, and the answer to the question for these pages."""
        while True:
            connection = self._take(address) or self._connect(address, until)
            peer = connection.peer
            ring = connection.ring
            peer.until = until
            name = "" if ring is None else ring.name
            wanted = Wanted(self._fingerprint, self._page_bytes, b"".join(hashes), name)
            try:
                peer.send_frame(wanted)
                answer = peer.read_frame()
                if ring is not None:
                    ring.unlink()  # the peer has it, or cannot have it
                if not isinstance(answer, Found):
                    raise TransferError("the peer holds pages of another model or layout")
                if not 0 <= answer.pages <= len(hashes) or (answer.shared and ring is None):
                    raise TransferError("the peer answers more than was asked")
                if not answer.shared:
                    connection.ring = None
                return connection, answer
            except BaseException as error:
                connection.close()
                # The peer may have closed it since; a new one tells more
                if not connection.used or not isinstance(error, (OSError, TransferError)):
                    raise
                if isinstance(error, TimeoutError):
                    raise

    def _connect(self, address: Address, until: float) -> _Connection:
        now = time.monotonic()
        if now < self._silent.get(address, now):
            raise TransferError("the peer did not answer in time just now")
        self._silent.pop(address, None)
        if (left := until - now) <= 0:
            raise TransferError("time is up")
        family, *protocol, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        peer = Peer(socket.socket(family, *protocol), until)
        try:
            self._reach(peer.socket, where, left)
            peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greet(peer, self._key)
            return _Connection(peer, self._ring(peer))
        except BaseException:
            peer.socket.close()
            raise

    def _reach(self, new: socket.socket, where: Any, seconds: float) -> None:
        """Connect the socket, which `close` may shut down meanwhile."""
        new.setblocking(False)
        error = new.connect_ex(where)
        with self._lock:  # from here on it can be shut down
            if self._closed:
                raise TransferError(ENDED)
            self.sockets.add(new)
        if error == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(new, select.POLLOUT)
            if not poll.poll(seconds * 1000):
                raise TimeoutError("timed out")
            error = new.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))

    def _ring(self, peer: Peer) -> Ring | None:
        """Shared memory, where the peer's address is one of this host."""
        here = peer.socket.getsockname()[0]
        there = peer.socket.getpeername()[0]
        local = here == there or ipaddress.ip_address(there).is_loopback
        if not (self._shared and local):
            return None
        try:
            return Ring.make(self._page_bytes)
        except OSError:  # none on this system, or full
            return None

    def _pages(self, connection: _Connection, reply: Found, seconds: float) -> Iterator[np.ndarray]:
        peer = connection.peer
        ring = connection.ring
        buffer = np.empty(0 if reply.shared else self._page_bytes, np.uint8)
        for number in range(reply.pages):
            peer.begin(seconds)
            index, wanted = HEADER.unpack(peer.read(HEADER.size))
            if index == END:
                return
            if index != number:
                raise TransferError("the peer sends pages out of order")
            if reply.shared:
                assert ring is not None
                buffer = ring.slot(number)
            else:
                peer.read_into(memoryview(buffer))
            if checksum(buffer) != wanted:
                raise TransferError(f"page {number} of {reply.pages} is damaged")
            yield buffer
            if reply.shared:
                peer.send(CREDIT)

    def _take(self, address: Address) -> _Connection | None:
        with self._lock:
            for index, (known, connection) in enumerate(self.idle):
                if known == address:
                    del self.idle[index]
                    connection.used = True
                    return connection
        return None

    def _keep(self, address: Address, connection: _Connection) -> None:
        with self._lock:
            self.idle.append((address, connection))
            full = self._closed or len(self.idle) > MAX_IDLE
            oldest = self.idle.pop(0)[1] if full else None
        if oldest is not None:
            oldest.close()
