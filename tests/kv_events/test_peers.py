"""Peers of the sockets of KV events that want to fill the memory of the engine."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxllm.kv_events import peers
from jaxllm.kv_events.publisher import Publisher
from jaxllm.kv_events.settings import KVEventSettings
from tests.kv_events.test_publisher import Subscriber, batch, first_message

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "TCP_INFO"), reason="the kernel does not tell what it has received"
)

# ZMTP 3.0: a greeting without security, and the command that names the kind of socket
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE = b"\x01\x01x"  # a frame of one byte, behind which others come


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.fixture
def settings() -> KVEventSettings:
    return KVEventSettings(
        endpoint=f"tcp://127.0.0.1:{free_port()}",
        replay_endpoint=f"tcp://127.0.0.1:{free_port()}",
    )


@pytest.fixture
def publisher(settings: KVEventSettings) -> Iterator[Publisher]:
    made = Publisher(settings)
    yield made
    made.close()


@pytest.fixture
def subscriber(settings: KVEventSettings, publisher: Publisher) -> Iterator[Subscriber]:
    made = Subscriber(settings)
    yield made
    made.close()


def address(endpoint: str) -> tuple[str, int]:
    """Of a TCP socket of ZeroMQ."""
    host, _, port = endpoint.removeprefix("tcp://").partition(":")
    return host, int(port)


def connected(endpoint: str, kind: bytes) -> socket.socket:
    """A peer that has named its kind of socket."""
    peer = socket.create_connection(address(endpoint), timeout=60)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    peer.sendall(GREETING + bytes([4, len(ready)]) + ready)
    return peer


def send_until_cut_off(peer: socket.socket) -> None:
    """Send frames of a message that does not end."""
    while True:
        readable, writable, _ = select.select([peer], [peer], [], 60)
        assert readable or writable
        try:
            if readable and not peer.recv(4096):
                return
            if writable:
                peer.send(MORE * 10_000)
        except ConnectionError:
            return


@pytest.mark.parametrize("kind", ["DEALER", "SUB"])
def test_a_message_without_end_ends_its_connection_alone(
    kind: str, settings: KVEventSettings, publisher: Publisher, subscriber: Subscriber
) -> None:
    first_message(publisher, subscriber)
    endpoint = settings.replay_endpoint if kind == "DEALER" else settings.endpoint
    with connected(str(endpoint), kind.encode()) as peer:
        send_until_cut_off(peer)
    publisher.publish(batch(7, 8))
    last = publisher.next_number - 1
    while int.from_bytes(subscriber.sub.recv_multipart()[1]) != last:
        pass
    assert [number for number, _ in subscriber.replay(last)] == [last]


def test_more_peers_than_there_may_be_are_cut_off(
    monkeypatch: pytest.MonkeyPatch,
    settings: KVEventSettings,
    publisher: Publisher,
    subscriber: Subscriber,
) -> None:
    monkeypatch.setattr(peers, "MAX_PEERS", 2)
    first_message(publisher, subscriber)
    assert subscriber.replay(0)  # both of its sockets are connected
    third = socket.create_connection(address(settings.endpoint), timeout=60)
    with third, contextlib.suppress(ConnectionError):
        while third.recv(4096):  # ZeroMQ's greeting
            pass
    publisher.publish(batch(7, 8))
    assert subscriber.replay(publisher.next_number - 1)


def test_heartbeats_are_allowed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = peers.Peer(socket.create_connection(server.getsockname()), since=0.0)
        with peer.connection:
            monkeypatch.setattr(peers.time, "monotonic", lambda: 30 * 86400.0)
            assert peer.allowed() > peers.MAX_RECEIVED + 9 * 30 * 86400


def test_a_descriptor_that_is_another_files_by_now_is_left_alone(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, open(tmp_path / "file", "w") as file:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as peer:
            taken = peers.own(peer.fileno(), f"tcp://127.0.0.1:{port}")
            assert taken is not None
            taken.close()
            others = [(peer.fileno(), port + 1), (server.fileno(), port), (file.fileno(), port)]
            before = set(os.listdir("/proc/self/fd"))
            assert [peers.own(fd, f"tcp://127.0.0.1:{at}") for fd, at in others] == [None] * 3
            assert set(os.listdir("/proc/self/fd")) == before
