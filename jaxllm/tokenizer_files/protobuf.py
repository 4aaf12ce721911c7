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
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire_type = key & 7
        if wire_type == VARINT:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if wire_type == BYTES:
            size, position = _varint(data, position)
        elif wire_type in SIZES:
            size = SIZES[wire_type]
        else:
            raise ValueError(f"byte {position} begins no field of a protocol buffer")
        if position + size > len(data):
            raise ValueError("the file ends within a field; it was cut off")
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise ValueError("the file ends within a number; it was cut off")
        value |= (data[position] & 0x7F) << shift
        position += 1
        if data[position - 1] < 0x80:
            return value, position
    raise ValueError(f"byte {position} is within a number of more than ten bytes")
