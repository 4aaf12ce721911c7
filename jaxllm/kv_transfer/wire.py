"""What two engines say to each other: a handshake of fixed length, then frames of 4 bytes of length
and msgpack, then headers of pages.

Neither side sends its key. Each proves that it has it by a keyed hash (HMAC-SHA256) of both sides'
random numbers, the serving side first; the two proofs begin with different words, so none can be
sent back. Pages are not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxllm.connections.frames import LENGTH, exactly, read_length

HELLO = b"jaxllm-kv-pages2"
NONCE = 32  # bytes, as of a proof and of a page's hash
MAX_FRAME = 1 << 22  # bytes
MAX_PAGES = 1 << 16  # of one request
HEADER = struct.Struct("<IQ")  # of a page: its number in the request or END, its checksum
END = 2**32 - 1  # instead of a number: no more pages come
CLOSED = "the peer has closed the connection"
CREDIT = b"\x01"  # a page was taken out of shared memory


class TransferError(Exception):
    """Pages cannot be had from a peer. The message is for the log."""


class Wanted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Asks for pages, from the first on until one is neither stored nor on its way there.

    Attributes:
        fingerprint: of the model and the layout that the pages must have.
        page_bytes: bytes of each page.
        hashes: NONCE bytes for each page.
        ring: name of shared memory to put the pages into; "" sends them behind their headers.
    """

    fingerprint: bytes
    page_bytes: int
    hashes: bytes
    ring: str = ""


class Found(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The answer: so many pages follow as they come, through shared memory or behind their headers;
    a header of END says that the rest will not."""

    pages: int
    shared: bool


class Refused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The answer to who asks for pages of another model or layout."""


type Frame = Wanted | Found | Refused

_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame.__value__)


@dataclass(slots=True)
class Peer:
    """A connected socket, on which everything ends at one time (time.monotonic)."""

    socket: socket.socket
    until: float

    def begin(self, seconds: float) -> None:
        """Let what follows take `seconds` from now."""
        self.until = time.monotonic() + seconds

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes. Raises TransferError at the end of the stream, OSError."""
        return exactly(size, self.read_some)

    def read_into(self, view: memoryview) -> None:
        """Fill `view`. Raises as `read` does."""
        while len(view):
            self._limit()
            if not (count := self.socket.recv_into(view)):
                raise TransferError(CLOSED)
            view = view[count:]

    def read_some(self, most: int) -> bytes:
        """At least one byte. Raises as `read` does."""
        self._limit()
        if not (data := self.socket.recv(most)):
            raise TransferError(CLOSED)
        return data

    def send(self, *parts: Any) -> None:
        """Send buffers one after another. Raises OSError."""
        for part in parts:
            self._limit()
            self.socket.sendall(part)

    def read_frame(self) -> Frame:
        """The next frame. Raises TransferError when it is too long or malformed, OSError."""
        size = read_length(self.read_some, MAX_FRAME, TransferError)
        try:
            return _decoder.decode(self.read(size))
        except (msgspec.MsgspecError, ValueError) as error:
            raise TransferError(f"a frame is malformed: {error}") from None

    def send_frame(self, frame: Frame) -> None:
        """Send a frame. Raises OSError."""
        body = msgspec.msgpack.encode(frame)
        self.send(LENGTH.pack(len(body)) + body)

    def _limit(self) -> None:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("time is up")
        self.socket.settimeout(left)


def greet(peer: Peer, key: bytes) -> None:
    """The handshake of who has connected. Raises TransferError when the other has no such key,
    OSError."""
    our_nonce = secrets.token_bytes(NONCE)
    peer.send(HELLO + our_nonce)
    their_nonce = peer.read(NONCE)
    proof = peer.read(NONCE)
    if not hmac.compare_digest(proof, prove(key, b"serve", our_nonce, their_nonce)):
        raise TransferError("the peer has another key")
    peer.send(prove(key, b"fetch", our_nonce, their_nonce))


def answer_greeting(peer: Peer, key: bytes) -> None:
    """The handshake of who listens. Raises TransferError when the other has no such key,
    OSError."""
    if peer.read(len(HELLO)) != HELLO:
        raise TransferError("a peer speaks another protocol")
    their_nonce = peer.read(NONCE)
    our_nonce = secrets.token_bytes(NONCE)
    peer.send(our_nonce + prove(key, b"serve", their_nonce, our_nonce))
    if not hmac.compare_digest(peer.read(NONCE), prove(key, b"fetch", their_nonce, our_nonce)):
        raise TransferError("a peer has another key")


def prove(key: bytes, *parts: bytes) -> bytes:
    """The keyed hash of parts, none of which can pass for another division of the same bytes."""
    framed = b"".join(LENGTH.pack(len(part)) + part for part in parts)
    return hmac.digest(key, framed, "sha256")
