"""Cuts off peers of a socket that send more than subscriptions and replay requests need.

ZeroMQ bounds a frame but not the frames of a message. It keeps those of a message that has not
ended, and two bytes of a peer's take 64 of memory. So the kernel is asked what it has received.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

MAX_RECEIVED = 1 << 20  # bytes from a peer beside its heartbeats: as many as 50,000 requests
HEARTBEATS = 16  # bytes a second: one of ZeroMQ's has nine
MAX_PEERS = 64
LOOK_MS = 100  # between two looks at what has been received
EVENT = struct.Struct("=Hi")  # of a socket monitor: what happened, and the file descriptor
RECEIVED = slice(128, 136)  # of Linux' struct tcp_info: tcpi_bytes_received

logger = logging.getLogger("jaxllm")


def monitor(zmq: Any, watched: Any) -> Any:
    """What tells of a socket's connections, for `Peers`; to be asked for before it binds."""
    events = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
    return watched.get_monitor_socket(events)


class Peer(NamedTuple):
    """A connection, and when it was first seen, in seconds of the monotonic clock."""

    connection: socket.socket
    since: float

    def allowed(self) -> float:
        """Bytes that it may have sent by now."""
        return MAX_RECEIVED + HEARTBEATS * (time.monotonic() - self.since)


class Peers:
    """The TCP connections of monitored sockets; a thread looks at them until their context ends.

    Other peers are on this machine, and were let in by the rights of a file. Where the kernel does
    not tell what it has received (not Linux), nobody is cut off.
    """

    def __init__(self, zmq: Any, monitors: Sequence[Any]):
        self._zmq = zmq
        self._monitors = monitors
        self._open: dict[int, Peer] = {}  # by ZeroMQ's descriptors; these are our own
        self._told = False
        threading.Thread(target=self._watch, name="kv-event-peers", daemon=True).start()

    def _watch(self) -> None:
        poller = self._zmq.Poller()
        for monitor in self._monitors:
            poller.register(monitor, self._zmq.POLLIN)
        try:
            while True:
                for ready, _ in poller.poll(LOOK_MS if self._open else None):
                    message, endpoint = ready.recv_multipart()
                    event, descriptor = EVENT.unpack(message)
                    self._changed(event, descriptor, endpoint.decode())
                for peer in self._open.values():
                    if received(peer.connection) > peer.allowed():
                        self._cut_off(peer.connection)
        except self._zmq.ContextTerminated:
            for monitor in self._monitors:
                monitor.close()
            for peer in self._open.values():
                peer.connection.close()

    def _changed(self, event: int, descriptor: int, endpoint: str) -> None:
        """A connection is there, or has gone."""
        if (gone := self._open.pop(descriptor, None)) is not None:
            gone.connection.close()
        if event == self._zmq.EVENT_DISCONNECTED:
            return
        connection = own(descriptor, endpoint)
        if connection is not None:
            self._open[descriptor] = Peer(connection, time.monotonic())
            if len(self._open) > MAX_PEERS:
                self._cut_off(connection)

    def _cut_off(self, peer: socket.socket) -> None:
        """End a connection; ZeroMQ then forgets it and what it sent."""
        with contextlib.suppress(OSError):
            peer.shutdown(socket.SHUT_RDWR)
        if not self._told:
            self._told = True
            logger.warning(
                "a peer of the sockets of KV events was cut off: more than %d bytes were sent, or "
                "more than %d peers are there (logged once)",
                MAX_RECEIVED,
                MAX_PEERS,
            )


def own(descriptor: int, endpoint: str) -> socket.socket | None:
    """A TCP connection of ZeroMQ's as a socket of our own. None where the kernel does not tell what
    it has received, or the connection has gone: its descriptor may be another file's by then, or a
    connection's whose ends are not of the `endpoint`."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    try:
        ends = [connection.getsockname(), connection.getpeername()]
        port = int(endpoint.rpartition(":")[2])
        if received(connection) >= 0 and port in [end[1] for end in ends]:
            return connection
    except (OSError, ValueError, IndexError):  # it has gone, or is no TCP
        pass
    connection.close()
    return None


def received(peer: socket.socket) -> int:
    """Bytes that a TCP connection has received; -1 where the kernel does not tell."""
    if not hasattr(socket, "TCP_INFO"):
        return -1
    try:
        info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED.stop)
    except OSError:  # no TCP
        return -1
    if len(info) == RECEIVED.stop:
        return int.from_bytes(info[RECEIVED], sys.byteorder)
    return -1
