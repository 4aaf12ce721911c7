"""The host that decides."""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import socket
import threading
import time
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.hosts.channel import Channel, ChannelError
from jaxllm.hosts.group import (
    JOIN_SECONDS,
    RETRY_SECONDS,
    TELL_SECONDS,
    GroupError,
    Lost,
    Place,
    difference,
    pack,
    shown,
    unpack,
)
from jaxllm.hosts.messages import (
    Command,
    End,
    Failed,
    Hello,
    Message,
    Opinion,
    Opinions,
    Welcome,
    decode,
    encode,
)

RESOLVE_SECONDS = 120.0  # until the controller's own name must be known
# Seconds for a follower to end by itself: JAX aborts it when this process has gone
LAST_WORDS = 10.0
MOST_GREETINGS = 64  # connections at once that have not shown the key

logger = logging.getLogger("jaxllm.engine")


def listen(host: str, port: int, flag: str = "--master-port") -> socket.socket:
    """A socket at the controller's address. Raises ConfigError where that cannot be."""
    try:
        family, socket_type, address = _resolve(host, port)
        sock = socket.socket(family, socket_type)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(MOST_GREETINGS)
        except OSError:
            sock.close()
            raise
        return sock
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is taken; end what listens there, or set another {flag} on "
                "every host"
            ) from None
        raise ConfigError(
            f"the controller cannot listen at {host}:{port} ({error.strerror or error}); "
            "--master-addr must be an address of the host with --node-rank 0"
        ) from None


def _resolve(host: str, port: int) -> tuple[int, int, Any]:
    """Family, kind and address. A name may be new to the network, as those of a cluster are."""
    deadline = time.monotonic() + RESOLVE_SECONDS
    while True:
        try:
            family, socket_type, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )[0]
            return family, socket_type, address
        except socket.gaierror:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)


class Controller:
    """Waits for the followers, then tells them what it does, in order.

    `lost(reason)` is called in a thread when a follower has gone. Raises ConfigError when it cannot
    listen, and when followers are missing after JOIN_SECONDS.
    """

    def __init__(self, place: Place, facts: dict[str, str], lost: Lost):
        self.count = place.count
        self._place = place
        self._facts = facts
        self._lost = lost
        self._channels: dict[int, Channel] = {}
        self._opinions: dict[int, queue.Queue[bytes | None]] = {
            rank: queue.Queue() for rank in range(1, place.count)
        }
        self._arrived = threading.Condition()
        self._closed = False
        with listen(place.host, place.port) as sock:
            threading.Thread(target=self._accept, args=(sock,), daemon=True).start()
            try:
                self._wait()
            finally:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        for rank, channel in sorted(self._channels.items()):
            self._send(rank, Welcome())
            threading.Thread(target=self._read, args=(rank, channel), daemon=True).start()

    def agree(self, value: Any) -> list[Any]:
        """As of `Hosts`."""
        values = [pack(value)]
        for rank in sorted(self._opinions):
            opinion = self._opinions[rank].get()
            if opinion is None:
                raise GroupError(f"host {rank} has gone")
            values.append(opinion)
        self._broadcast(Opinions(values))
        return unpack(values)

    def tell(self, command: bytes) -> None:
        """Have the followers do something. Raises GroupError."""
        self._broadcast(Command(command))

    def close(self, reason: str = "") -> None:
        """End the group: in order, or for a reason."""
        with self._arrived:
            if self._closed:
                return
            self._closed = True
        for channel in self._channels.values():
            with contextlib.suppress(ChannelError):
                channel.send(encode(Failed(reason) if reason else End()))
        deadline = time.monotonic() + LAST_WORDS
        for channel in self._channels.values():
            channel.await_end(max(0.001, deadline - time.monotonic()))
            channel.close()

    def _broadcast(self, message: Message) -> None:
        for rank in self._channels:
            self._send(rank, message)

    def _send(self, rank: int, message: Message) -> None:
        try:
            self._channels[rank].send(encode(message))
        except ChannelError as error:
            self._gone(rank, f"takes nothing ({error})")
            raise GroupError(f"host {rank} has gone") from None

    def _gone(self, rank: int, why: str) -> None:
        self._opinions[rank].put(None)
        with self._arrived:
            if self._closed:
                return
        reason = f"host {rank} of {self.count} {why}"
        self.close(reason)  # so that the others name it, too
        self._lost(reason)

    def _read(self, rank: int, channel: Channel) -> None:
        try:
            while True:
                match decode(channel.receive()):
                    case Opinion(value):
                        self._opinions[rank].put(value)
                    case Failed(reason):
                        channel.await_end(LAST_WORDS)
                        return self._gone(rank, f"has ended: {shown(reason)}")
                    case message:
                        return self._gone(rank, f"sent {type(message).__name__} out of turn")
        except (ChannelError, ValueError) as error:
            self._gone(rank, f"has gone: {error}")

    # --- until all are there

    def _wait(self) -> None:
        deadline = time.monotonic() + JOIN_SECONDS
        with self._arrived:
            while missing := sorted(self._opinions.keys() - self._channels):
                named = ", ".join(map(str, missing[:8]))
                if (left := deadline - time.monotonic()) <= 0:
                    self._closed = True
                    raise ConfigError(
                        f"of {self.count} hosts, those with --node-rank {named} did not come "
                        f"within {JOIN_SECONDS:.0f} s; see their logs"
                    )
                if not self._arrived.wait(min(left, TELL_SECONDS)):
                    logger.warning("waiting at %s for host %s", self._place.where, named)

    def _accept(self, listening: socket.socket) -> None:
        room = threading.Semaphore(MOST_GREETINGS)
        with contextlib.suppress(OSError):  # closed: all are there
            while True:
                sock, (host, *_) = listening.accept()
                room.acquire()
                threading.Thread(
                    target=self._greet, args=(sock, host, room), name="greet", daemon=True
                ).start()

    def _greet(self, sock: socket.socket, host: str, room: threading.Semaphore) -> None:
        """Take a follower in, or refuse whoever it is; nobody else waits for that."""
        try:
            channel = Channel(sock, self._place.key, leads=True)
        except ChannelError as error:
            logger.warning("a connection from %s was refused: %s", host, error)
            sock.close()
            return
        finally:
            room.release()
        try:
            hello = decode(channel.receive())
            refusal = self._refusal(hello)
            if refusal is None:
                assert isinstance(hello, Hello)
                self._join(hello.rank, channel)
                return
            logger.warning("a host at %s was refused: %s", host, refusal)
            channel.send(encode(Failed(refusal)))
        except (ChannelError, ValueError) as error:
            logger.warning("a host at %s was refused: %s", host, error)
        channel.close()

    def _refusal(self, hello: Message) -> str | None:
        if not isinstance(hello, Hello):
            return "it did not say who it is"
        if hello.rank not in self._opinions:
            return f"--node-rank {hello.rank} is none of 1 to {self.count - 1}"
        reason = difference(self._facts, hello.facts)
        return (
            reason and f"{shown(reason)}; start every host with the same version, files and flags"
        )

    def _join(self, rank: int, channel: Channel) -> None:
        with self._arrived:
            done = self._closed or self._channels.keys() == self._opinions.keys()
            before = channel if done else self._channels.get(rank)
            if not done:
                self._channels[rank] = channel  # a host that was started again
            self._arrived.notify_all()
        if before is not None:
            before.close()
