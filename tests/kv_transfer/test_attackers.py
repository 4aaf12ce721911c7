"""What strangers and faulty peers may send to the socket: it costs them the connection."""

from __future__ import annotations

import hmac
import os
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from jaxllm.kv_transfer import server as server_module
from jaxllm.kv_transfer.client import PageClient
from jaxllm.kv_transfer.ring import Ring
from jaxllm.kv_transfer.server import PageServer, listen
from jaxllm.kv_transfer.shelf import Shelf
from jaxllm.kv_transfer.wire import (
    HEADER,
    HELLO,
    MAX_FRAME,
    MAX_PAGES,
    Found,
    Peer,
    TransferError,
    Wanted,
    answer_greeting,
    greet,
)

KEY, FINGERPRINT, SIZE = b"k" * 16, b"f" * 32, 64
NAMES = [bytes(32), bytes([1]) * 32]
PICKLE = b"\x80\x04\x8c\x05posix\x8c\x06system\x93."


@pytest.fixture
def server() -> Iterator[PageServer]:
    shelf = Shelf(4, SIZE)
    for name in NAMES:
        shelf.put(name, [np.arange(SIZE, dtype=np.uint8)])
    server = PageServer(listen("127.0.0.1", 0), KEY, shelf, FINGERPRINT, SIZE)
    yield server
    client = PageClient(KEY, FINGERPRINT, SIZE)
    address = ("127.0.0.1", server.port)
    assert len(list(client.fetch(address, NAMES, 20.0))) == 2, "it still serves others"
    client.close()
    server.close()


def connect(server: PageServer) -> Peer:
    peer = Peer(socket.create_connection(("127.0.0.1", server.port)), 0.0)
    peer.begin(20.0)
    return peer


def assert_closed(peer: Peer) -> None:
    with pytest.raises((TransferError, ConnectionResetError)):
        peer.read(1)
    peer.socket.close()


def frame(body: bytes, size: int | None = None) -> bytes:
    return struct.pack("<I", len(body) if size is None else size) + body


@pytest.mark.parametrize(
    "greeting",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", HELLO[:-1] + b"9" + bytes(64), PICKLE * 8],
    ids=["http", "another version", "pickle"],
)
def test_a_stranger_learns_nothing(server, greeting):
    peer = connect(server)
    peer.send(greeting)
    assert_closed(peer)


def test_a_proof_that_is_sent_back_or_guessed_opens_nothing(server):
    for proof in (None, bytes(32), hmac.digest(KEY, b"fetch", "sha256")):
        peer = connect(server)
        peer.send(HELLO + bytes(32))
        own = peer.read(64)[32:]
        peer.send(own if proof is None else proof)
        assert_closed(peer)


def test_who_sends_half_a_greeting_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(server_module, "HANDSHAKE", 0.05)
    peer = connect(server)
    peer.send(HELLO[:5])
    assert_closed(peer)


def test_connections_are_bounded(server, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 1)
    first = connect(server)
    greet(first, KEY)
    first.send_frame(Wanted(FINGERPRINT, SIZE, NAMES[0]))
    assert first.read_frame() == Found(1, False)
    assert_closed(connect(server))
    monkeypatch.undo()
    first.socket.close()


WANTED = Wanted(FINGERPRINT, SIZE, NAMES[0])
BODY = msgspec.msgpack.encode(WANTED)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", MAX_FRAME + 1),
        frame(b""),
        frame(BODY[:-1]),
        frame(BODY + b"\0"),
        frame(PICKLE),
        frame(b"\x81" * 10_000),
        frame(msgspec.msgpack.encode({"type": "Wanted"})),
        frame(msgspec.msgpack.encode({**msgspec.to_builtins(WANTED), "hashes": 7})),
        frame(msgspec.msgpack.encode({**msgspec.msgpack.decode(BODY), "more": 1})),
        frame(msgspec.msgpack.encode(Found(1, False))),
        frame(msgspec.msgpack.encode(Wanted(FINGERPRINT, SIZE, b"?" * 33))),
        frame(msgspec.msgpack.encode(Wanted(FINGERPRINT, SIZE, bytes(32 * (MAX_PAGES + 1))))),
        frame(msgspec.msgpack.encode(Wanted(FINGERPRINT, SIZE, NAMES[0], "../../etc/passwd"))),
    ],
    ids=[
        "4 GiB",
        "over the limit",
        "empty",
        "truncated",
        "trailing",
        "pickle",
        "deep",
        "no fields",
        "wrong type",
        "unknown field",
        "an answer",
        "part of a hash",
        "too many pages",
        "a path",
    ],
)
def test_a_faulty_frame_of_who_has_the_key_ends_the_connection(server, data):
    peer = connect(server)
    greet(peer, KEY)
    peer.send(data)
    assert_closed(peer)


def test_a_frame_that_stops_half_way_ends_with_the_connection(server):
    peer = connect(server)
    greet(peer, KEY)
    peer.send(frame(BODY, len(BODY) + 9))
    peer.socket.shutdown(socket.SHUT_WR)
    assert_closed(peer)


def test_credits_for_pages_that_were_not_sent_end_the_connection(server):
    peer, ring = connect(server), Ring.make(SIZE)
    greet(peer, KEY)
    peer.send_frame(Wanted(FINGERPRINT, SIZE, b"".join(NAMES), ring.name))
    assert peer.read_frame() == Found(2, True)
    ring.unlink()
    peer.send(b"\x02" * 9)
    peer.read(2 * HEADER.size)
    assert_closed(peer)


# A peer that has the key and lies


def lying(answer: bytes) -> tuple[socket.socket, PageClient]:
    """A server with the key whose answer to any question is `answer`, and a client."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        peer = Peer(listener.accept()[0], 0.0)
        peer.begin(20.0)
        answer_greeting(peer, KEY)
        peer.read_frame()
        peer.send(answer)
        peer.socket.close()

    threading.Thread(target=serve, daemon=True).start()
    return listener, PageClient(KEY, FINGERPRINT, SIZE, shared=False)


FOUND = frame(msgspec.msgpack.encode(Found(1, False)))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (frame(msgspec.msgpack.encode(Found(2**31, False))), "more than was asked"),
        (frame(msgspec.msgpack.encode(Found(-1, False))), "more than was asked"),
        (frame(msgspec.msgpack.encode(Found(1, True))), "more than was asked"),
        (frame(BODY), "another model or layout"),
        (frame(PICKLE), "malformed"),
        (struct.pack("<I", 2**31), "over the limit"),
        (FOUND + HEADER.pack(7, 0) + bytes(SIZE), "out of order"),
        (FOUND + HEADER.pack(0, 1) + bytes(SIZE), "damaged"),
        (FOUND + HEADER.pack(0, 1) + bytes(SIZE - 1), "closed"),
        (FOUND, "closed"),
        (b"", "closed"),
    ],
    ids=[
        "too many",
        "negative",
        "unasked memory",
        "a question",
        "pickle",
        "2 GiB",
        "order",
        "damage",
        "truncated page",
        "no page",
        "nothing",
    ],
)
def test_a_lying_server_costs_a_fetch(answer, why):
    listener, client = lying(answer)
    with listener, pytest.raises(TransferError, match=why):
        list(client.fetch(listener.getsockname(), NAMES[:1], 20.0))
    assert client.idle == [], "nothing is asked of it again over this connection"


def test_random_bytes_never_open_or_break_it(server):
    for seed in range(20):
        peer = connect(server)
        peer.send(os.urandom(seed * 7 + 1))
        peer.socket.close()
