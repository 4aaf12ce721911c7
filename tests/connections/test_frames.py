"""Lengths that are announced, and what is read of them."""

from __future__ import annotations

import io

import pytest

from jaxllm.connections.frames import LENGTH, PIECE, exactly, read_length


def test_bytes_that_come_in_pieces_are_put_together() -> None:
    stream = io.BytesIO(b"0123456789")
    assert exactly(7, lambda most: stream.read(min(most, 3))) == b"0123456"
    assert stream.read() == b"789" and exactly(0, stream.read) == b""


def test_no_more_is_asked_for_at_once_than_a_piece() -> None:
    asked: list[int] = []

    def read(most: int) -> bytes:
        asked.append(most)
        return bytes(most)

    assert exactly(2 * PIECE + 1, read) == bytes(2 * PIECE + 1)
    assert asked == [PIECE, PIECE, 1]


def test_a_length_over_the_limit_is_refused_before_a_byte_is_read() -> None:
    stream = io.BytesIO(LENGTH.pack(8) + LENGTH.pack(9) + b"frame")
    assert read_length(stream.read, 8, EOFError) == 8
    with pytest.raises(EOFError, match="a frame of 9 bytes is over the limit of 8"):
        read_length(stream.read, 8, EOFError)
    assert stream.read() == b"frame"
