"""Reads of a connection whose length is known beforehand: fixed, or written before a frame."""

from __future__ import annotations

import struct
from collections.abc import Callable

LENGTH = struct.Struct("<I")  # of a frame, before it
PIECE = 1 << 20  # bytes; what a peer announces takes no memory before it comes

type Read = Callable[[int], bytes]  # at least one byte and at most so many; raises at the end


def exactly(size: int, read: Read) -> bytes:
    """`size` bytes. Raises what `read` raises."""
    data = bytearray()
    while len(data) < size:
        data += read(min(size - len(data), PIECE))
    return bytes(data)


def read_length(read: Read, limit: int, error: type[Exception]) -> int:
    """The bytes of the frame that follows. Raises `error` when they are over the limit, and what
    `read` raises."""
    (size,) = LENGTH.unpack(exactly(LENGTH.size, read))
    check_length(size, limit, error)
    return size


def check_length(size: int, limit: int, error: type[Exception]) -> None:
    """Raise `error` when a frame is over the limit."""
    if size > limit:
        raise error(f"a frame of {size} bytes is over the limit of {limit}")
