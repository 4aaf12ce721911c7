"""What an engine says while nobody reads it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from jaxllm.server.engine.outbox import Outbox

FULL = 8 << 20  # bytes that no socket's buffer takes


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a line."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(20)
    yield ours, theirs
    ours.close()
    theirs.close()


def read(sock: socket.socket, size: int) -> bytes:
    """So many bytes."""
    got = bytearray()
    while len(got) < size:
        got += sock.recv(1 << 20)
    return bytes(got)


def test_what_nobody_reads_is_kept_and_comes_in_order(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    outbox = Outbox(ours)
    said = [bytes([number % 256]) * 9973 for number in range(FULL // 9973)]
    for data in said:
        outbox.send(data)  # to send on the socket would wait for ever
    assert read(theirs, sum(map(len, said))) == b"".join(said)
    outbox.flush()
    outbox.send(b"later")
    assert read(theirs, 5) == b"later"


def test_every_message_of_several_threads_is_whole(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    outbox, size = Outbox(ours), 4099

    def speak(number: int) -> None:
        for _ in range(300):
            outbox.send(bytes([number]) * size)

    threads = [threading.Thread(target=speak, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    got = read(theirs, 4 * 300 * size)
    for thread in threads:
        thread.join(20)
    parts = [got[at : at + size] for at in range(0, len(got), size)]
    assert all(len(set(part)) == 1 for part in parts)
    assert {part[0]: sum(other == part for other in parts) for part in parts} == dict.fromkeys(
        range(4), 300
    )


def test_who_is_too_far_ahead_waits(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    outbox, done = Outbox(ours, limit=FULL // 2), threading.Event()
    outbox.send(bytes(FULL))

    def more() -> None:
        outbox.send(b"more")
        done.set()

    thread = threading.Thread(target=more)
    thread.start()
    assert not done.wait(0.05)
    assert read(theirs, FULL + 4)[-4:] == b"more"
    assert done.wait(20)
    thread.join(20)


def test_whoever_speaks_or_waits_hears_that_the_other_side_has_gone(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    outbox, heard = Outbox(ours, limit=1), threading.Event()
    outbox.send(bytes(FULL))

    def more() -> None:
        with pytest.raises(OSError):
            outbox.send(b"more")
        heard.set()

    thread = threading.Thread(target=more)
    thread.start()
    theirs.close()
    assert heard.wait(20)
    thread.join(20)
    outbox.flush()
    with pytest.raises(OSError):
        outbox.send(b"again")
