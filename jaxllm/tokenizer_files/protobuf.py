"""Protocol buffers' wire format: fields of a message, and a message by field numbers.

https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator

VARINT = 0
FIXED64 = 1
BYTES = 2
FIXED32 = 5
SIZES = {FIXED64: 8, FIXED32: 4}


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Field numbers and values: integers of varints, else the bytes.

    Raises ValueError where the message is cut off or is none.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == BYTES:
            size, at = _varint(data, at)
        elif kind in SIZES:
            size = SIZES[kind]
        else:
            raise ValueError(f"byte {at} begins no field of a protocol buffer")
        if at + size > len(data):
            raise ValueError("the file ends within a field; it was cut off")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("the file ends within a number; it was cut off")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError(f"byte {at} is within a number of more than ten bytes")
