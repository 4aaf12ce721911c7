"""An authenticated connection between two hosts: frames of bounded length, each with a code that
only who has the group's key can make. Nothing is encrypted."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import threading
import time

from jaxllm.connections.frames import LENGTH, check_length, exactly, read_length

MAX_FRAME = 1 << 26  # bytes; the largest launch takes a few MiB
MEET_SECONDS = 5.0  # for a peer to show that it has the key
# A host without power ends no connection: after so many seconds it counts as gone
SILENT_SECONDS = 10
SEND_SECONDS = 60.0  # for a peer to take a frame
_MAGIC = b"jaxllm-hosts-1\0\0"
_NONCE = 32
_CODE = 16


class ChannelError(Exception):
    """A peer that has gone, has another key, or sends what nobody should."""


class SilentError(ChannelError):
    """A peer that does not show in time that it has the key."""


class Channel:
    """One end of a connection. One thread receives; any thread sends.

    `leads` tells the controller's end from a follower's. Raises ChannelError unless the peer shows
    within MEET_SECONDS that it has the same key, SilentError when it shows nothing.
    """

    def __init__(self, sock: socket.socket, key: bytes, leads: bool):
        self._sock = sock
        self._sending = threading.Lock()
        self._session = b""
        self._role = b"follows"
        self._peer_role = b"leads"
        if leads:
            self._role = b"leads"
            self._peer_role = b"follows"
        self._sent = self._received = 0
        self._meets_until: float | None = time.monotonic() + MEET_SECONDS
        _watch_silence(sock)
        try:
            self._meet(key, leads)
            self._meets_until = None
            # Of a send alone: who receives waits as long as it takes
            seconds = struct.pack("ll", int(SEND_SECONDS), 0)
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        except OSError as error:
            raise ChannelError(str(error) or type(error).__name__) from None

    def send(self, data: bytes) -> None:
        """One frame. Raises ChannelError when the peer has gone or takes nothing."""
        check_length(len(data), MAX_FRAME, ChannelError)
        with self._sending:
            code = self._code(self._role, self._sent, data)
            self._sent += 1
            try:
                self._sock.sendall(LENGTH.pack(len(data)) + code + data)
            except OSError as error:
                raise ChannelError(str(error) or type(error).__name__) from None

    def receive(self) -> bytes:
        """The next frame. Raises ChannelError when there is none, or it is not the peer's."""
        size = read_length(self._read, MAX_FRAME, ChannelError)
        code = exactly(_CODE, self._read)
        data = exactly(size, self._read)
        if not hmac.compare_digest(code, self._code(self._peer_role, self._received, data)):
            raise ChannelError("a frame was changed on its way")
        self._received += 1
        return data

    def last_as_process(self) -> None:
        """Keep the connection open until this process has ended: who waits for the end of one then
        waits for the end of the other."""
        os.dup(self._sock.fileno())

    def await_end(self, seconds: float) -> None:
        """Send no more, and wait until the peer has closed its end, or so long."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            self._sock.settimeout(seconds)
            while self._sock.recv(1 << 16):
                pass

    def close(self) -> None:
        """End the connection; a thread that receives gets ChannelError."""
        with contextlib.suppress(OSError):  # the peer was first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _meet(self, key: bytes, leads: bool) -> None:
        """Both ends show that they have the key; the follower shows it first."""
        mine = os.urandom(_NONCE)
        self._sock.sendall(_MAGIC + mine)
        greeting = exactly(len(_MAGIC) + _NONCE, self._read)
        if not greeting.startswith(_MAGIC):
            raise ChannelError("the other end does not speak this protocol")
        theirs = greeting[len(_MAGIC) :]
        nonces = mine + theirs if leads else theirs + mine
        self._session = hashlib.blake2b(nonces, key=hashlib.sha256(key).digest()).digest()
        if not leads:
            self._sock.sendall(self._code(self._role, -1, b""))
        shown = exactly(_CODE, self._read)
        if not hmac.compare_digest(shown, self._code(self._peer_role, -1, b"")):
            raise ChannelError("the other end has another key")
        if leads:
            self._sock.sendall(self._code(self._role, -1, b""))

    def _code(self, sender: bytes, number: int, data: bytes) -> bytes:
        """The code, of `_CODE` bytes, which proves that `sender` wrote its frame of this number."""
        code = hashlib.blake2b(key=self._session, digest_size=_CODE)
        code.update(sender + struct.pack("<q", number))
        code.update(data)
        return code.digest()

    def _limit(self) -> None:
        """A meeting ends in time, however few bytes come at once. Raises TimeoutError."""
        if self._meets_until is None:
            return
        if (left := self._meets_until - time.monotonic()) <= 0:
            raise TimeoutError
        self._sock.settimeout(left)

    def _read(self, most: int) -> bytes:
        try:
            self._limit()
            data = self._sock.recv(most)
        except TimeoutError:
            raise SilentError("the other end did not show in time that it has the key") from None
        except OSError as error:
            raise ChannelError(str(error) or type(error).__name__) from None
        if not data:
            raise ChannelError("the other end has closed the connection")
        return data


def _watch_silence(sock: socket.socket) -> None:
    """Have the system find out when the peer's machine has gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", SILENT_SECONDS // 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", SILENT_SECONDS // 2),
        ("TCP_USER_TIMEOUT", SILENT_SECONDS * 1000),
    ):
        if (option := getattr(socket, name, None)) is not None:  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
