"""Who has the key is heard, and nobody else."""

from __future__ import annotations

import socket
import struct
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from jaxllm.hosts import channel
from jaxllm.hosts.channel import MAX_FRAME, Channel, ChannelError, SilentError

KEY = b"a key of sixteen bytes or more"


def pair(sockets: tuple[socket.socket, socket.socket], other: bytes = KEY) -> list[Channel]:
    """Both ends, the controller's first."""
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(Channel, sock, key, leads)
            for sock, key, leads in zip(sockets, (KEY, other), (True, False), strict=True)
        ]
    return [end.result() for end in ends]


@pytest.fixture
def sockets() -> tuple[socket.socket, socket.socket]:
    """Two ends of one TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    return near, far


def test_frames_arrive_whole_and_in_order(sockets: tuple[socket.socket, socket.socket]) -> None:
    leader, follower = pair(sockets)
    sent = [b"", b"one", bytes(300_000), b"three"]
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [leader.send(data) for data in sent])
        assert [follower.receive() for _ in sent] == sent
        writing.result()
    follower.send(b"back")
    assert leader.receive() == b"back"
    for end in (leader, follower):
        end.close()


def test_another_key_is_refused_at_both_ends(sockets: tuple[socket.socket, socket.socket]) -> None:
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(Channel, sock, key, leads)
            for sock, key, leads in zip(sockets, (KEY, KEY + b"!"), (True, False), strict=True)
        ]
        assert "another key" in str(ends[0].exception())
        sockets[0].close()
        assert isinstance(ends[1].exception(), ChannelError)
    sockets[1].close()


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n" * 3, b"", bytes(48)])
def test_a_stranger_is_refused(
    words: bytes, sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MEET_SECONDS", 0.05)
    near, far = sockets
    far.sendall(words)
    with pytest.raises(ChannelError):
        Channel(near, KEY, leads=True)
    for sock in sockets:
        sock.close()


def test_a_stranger_who_says_little_at_a_time_gets_no_more_time(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MEET_SECONDS", 0.2)
    near, far = sockets
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(Channel, near, KEY, True)
        said = 0
        while not meeting.done():
            far.sendall(b"j")
            said += 1
            wait([meeting], timeout=0.05)
        assert isinstance(meeting.exception(), SilentError)
    assert said < 10
    for sock in sockets:
        sock.close()


class Recorded(socket.socket):
    """A socket that notes what is sent."""

    def sendall(self, data: bytes, *flags: int) -> None:  # type: ignore[override]
        self.__dict__.setdefault("sent", []).append(data)
        super().sendall(data, *flags)


def test_a_frame_that_is_changed_or_sent_again_is_refused(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    near, far = sockets
    noted = Recorded(fileno=near.detach())
    leader, follower = pair((noted, far))
    leader.send(b"ten pages")
    frame = noted.__dict__["sent"][-1]
    assert follower.receive() == b"ten pages"
    noted.sendall(frame)
    with pytest.raises(ChannelError, match="changed"):
        follower.receive()
    for end in (leader, follower):
        end.close()


def test_a_frame_has_a_bounded_length(sockets: tuple[socket.socket, socket.socket]) -> None:
    leader, follower = pair(sockets)
    sockets[0].sendall(struct.pack("<I", MAX_FRAME + 1))
    with pytest.raises(ChannelError, match="over the limit"):
        follower.receive()

    class Large(bytes):
        def __len__(self) -> int:
            return MAX_FRAME + 1

    with pytest.raises(ChannelError, match="over the limit"):
        leader.send(Large())
    for end in (leader, follower):
        end.close()


def test_an_end_that_closes_is_noticed(sockets: tuple[socket.socket, socket.socket]) -> None:
    leader, follower = pair(sockets)
    leader.close()
    with pytest.raises(ChannelError):
        follower.receive()
    follower.close()
