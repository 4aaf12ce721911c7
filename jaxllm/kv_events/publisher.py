"""Sends KV events to subscribers, and the newest of them again to who missed some.

A message has three frames: topic, sequence number (8 bytes, big-endian), payload (msgpack). A
replay request is an empty frame and the first number wanted; the answer is a message of an empty
frame, number and payload for each, and one with the number −1 at the end.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from typing import Any

import msgspec

from jaxllm.cache.events import KVEventBatch
from jaxllm.config import ConfigError
from jaxllm.kv_events.peers import Peers, monitor
from jaxllm.kv_events.settings import KVEventSettings, refused

MAX_REQUEST = 1024  # bytes of a message from a peer: a subscription, or a replay request
MAX_BUFFER = 64 << 20  # bytes of payloads kept for replays
LINGER = 1000  # milliseconds to deliver what was sent before `close`
END = (-1).to_bytes(8, signed=True)

logger = logging.getLogger("jaxllm")


class Publisher:
    """Opens the sockets of `settings`; `publish` is a listener of `KVEvents`.

    `publish` never waits: ZeroMQ's own thread sends, and drops what a slow subscriber has no space
    for. A thread answers replay requests. Raises ConfigError when a socket cannot be bound.

    Attributes:
        next_number: of the next batch.
    """

    def __init__(self, settings: KVEventSettings):
        self._zmq: Any = import_zmq()
        self._topic = settings.topic.encode()
        self._map = settings.format == "map"
        self._rank = settings.data_parallel_rank
        self._encoder = msgspec.msgpack.Encoder()
        self.next_number = 0
        self._buffer = ReplayBuffer(settings.buffer_steps)
        self._context = self._zmq.Context()
        self._monitors: list[Any] = []
        try:
            self._pub = self._socket(self._zmq.PUB, settings.hwm)
            if settings.binds:
                self._bind(self._pub, settings.endpoint)
            else:
                self._pub.connect(settings.endpoint)  # tried again until somebody is there
            if settings.replay_endpoint is not None:
                # A whole replay fits, so that none waits for a slow peer, and twice that: what
                # has been read is told back in halves of the queue
                router = self._socket(self._zmq.ROUTER, 2 * (settings.buffer_steps + 1))
                router.setsockopt(self._zmq.ROUTER_MANDATORY, 1)  # tells who has no space for more
                self._bind(router, settings.replay_endpoint)
                serve = threading.Thread(target=self._serve_replays, args=(router,), daemon=True)
                serve.start()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        Peers(self._zmq, self._monitors)
        for endpoint in settings.exposed:
            logger.warning(
                "KV events are published at %s: whoever is there can read the token ids of prompts "
                "(--kv-events-config)",
                endpoint,
            )

    def publish(self, batch: KVEventBatch) -> None:
        """Send a batch under the next number."""
        batch = msgspec.structs.replace(batch, data_parallel_rank=self._rank)
        payload = self._encoder.encode(batch if self._map else as_array(batch))
        number = self.next_number
        self.next_number += 1
        self._buffer.append(number, payload)
        self._pub.send_multipart((self._topic, number.to_bytes(8), payload))

    def close(self) -> None:
        """Deliver what was sent, within LINGER, and release the sockets."""
        self._pub.close(linger=LINGER)
        self._context.term()  # ends the thread of replays

    def _socket(self, socket_type: int, hwm: int) -> Any:
        socket = self._context.socket(socket_type)
        socket.setsockopt(self._zmq.MAXMSGSIZE, MAX_REQUEST)
        socket.setsockopt(self._zmq.SNDHWM, hwm)
        socket.setsockopt(self._zmq.LINGER, LINGER)
        socket.setsockopt(self._zmq.IPV6, True)
        self._monitors.append(monitor(self._zmq, socket))
        return socket

    def _bind(self, socket: Any, endpoint: str) -> None:
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise refused(f"cannot bind {endpoint}: {error.strerror}; choose another") from None

    def _serve_replays(self, router: Any) -> None:
        """Answer replay requests until the context ends. What is no request is ignored."""
        try:
            while True:
                match router.recv_multipart():
                    case [peer, b"", start] if len(start) == 8:
                        self._replay(router, peer, int.from_bytes(start, signed=True))
        except self._zmq.ContextTerminated:
            router.close(linger=0)

    def _replay(self, router: Any, peer: bytes, first: int) -> None:
        """Send the messages kept from number `first` on, but not to who has gone, or asks again and
        again without reading."""
        kept = [(number.to_bytes(8), payload) for number, payload in self._buffer.since(first)]
        try:
            for number, payload in (*kept, (END, b"")):
                router.send_multipart((peer, b"", number, payload), self._zmq.DONTWAIT)
        except self._zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise


class ReplayBuffer:
    """The newest messages: at most `steps` of them and MAX_BUFFER bytes. One thread appends,
    another reads."""

    def __init__(self, steps: int):
        self._steps = steps
        self._bytes = 0
        self._messages: deque[tuple[int, bytes]] = deque()
        self._lock = threading.Lock()

    def append(self, number: int, payload: bytes) -> None:
        """Keep a message, and drop the oldest that are too many."""
        with self._lock:
            self._messages.append((number, payload))
            self._bytes += len(payload)
            while len(self._messages) > self._steps or self._bytes > MAX_BUFFER:
                self._bytes -= len(self._messages.popleft()[1])

    def since(self, first: int) -> list[tuple[int, bytes]]:
        """The messages kept from number `first` on."""
        with self._lock:
            return [message for message in self._messages if message[0] >= first]


def as_array(batch: KVEventBatch) -> list[Any]:
    """A batch whose events are arrays headed by their names."""
    events = [[type(event).__name__, *msgspec.structs.astuple(event)] for event in batch.events]
    return [batch.ts, events, batch.data_parallel_rank]


def import_zmq() -> Any:
    """pyzmq. Raises ConfigError when it is not installed."""
    try:
        import zmq
    except ImportError:
        raise ConfigError(
            "--kv-events-config needs pyzmq; install it with pip install 'jaxllm[kv-events]'"
        ) from None
    return zmq
