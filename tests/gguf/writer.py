"""Writes small GGUF files, from the text of the format."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

ALIGNMENT = 32
PLAIN = {0: np.dtype("<f4"), 1: np.dtype("<f2"), 30: np.dtype(ml_dtypes.bfloat16)}
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = 2, 3, 6, 7, 8, 10, 11, 12, 13, 14
IQ4_NL, IQ4_XS, MXFP4 = 20, 23, 39
# Numbers of a block, its bytes, and where it has float16
BLOCKS = {
    Q4_0: (32, 18, (0,)),
    Q4_1: (32, 20, (0, 2)),
    Q5_0: (32, 22, (0,)),
    Q5_1: (32, 24, (0, 2)),
    Q8_0: (32, 34, (0,)),
    Q2_K: (256, 84, (80, 82)),
    Q3_K: (256, 110, (108,)),
    Q4_K: (256, 144, (0, 2)),
    Q5_K: (256, 176, (0, 2)),
    Q6_K: (256, 210, (208,)),
    IQ4_NL: (32, 18, (0,)),
    IQ4_XS: (256, 136, (0,)),
    MXFP4: (32, 17, ()),
}
SCALES = {**dict.fromkeys((Q8_0, IQ4_NL), 0.001), **dict.fromkeys((Q4_K, Q5_K), 0.0003)}
SCALES |= {IQ4_XS: 0.0001, Q6_K: 0.0001}


class Stored(NamedTuple):
    """A tensor as it is written; the shape is NumPy's."""

    number: int
    shape: tuple[int, ...]
    data: bytes

    @property
    def size(self) -> int:
        """Bytes of the data; without any, those that it should have."""
        count = math.prod(self.shape)
        if self.data:
            return len(self.data)
        if self.number in PLAIN:
            return count * PLAIN[self.number].itemsize
        numbers, length, _ = BLOCKS[self.number]
        return count // numbers * length


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def typed(value: Any) -> tuple[int, bytes]:
    """Number of the type, and the value."""
    if isinstance(value, bool):
        return 7, struct.pack("<B", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, text(value)
    pairs = [typed(each) for each in value]
    number = pairs[0][0] if pairs else 4
    return 9, struct.pack("<IQ", number, len(pairs)) + b"".join(data for _, data in pairs)


def plain(array: np.ndarray, number: int = 0) -> Stored:
    return Stored(number, array.shape, array.astype(PLAIN[number]).tobytes())


def quantised(array: np.ndarray, number: int) -> Stored:
    """Blocks of 32 as Q8_0 or Q4_0, rounded to the nearest."""
    blocks = array.astype(np.float32).reshape(-1, 32)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    scale = (largest / (127 if number == Q8_0 else 7)).astype("<f2")
    numbers = np.rint(blocks / np.maximum(scale.astype(np.float32), 1e-12))
    if number == Q8_0:
        packed = numbers.clip(-127, 127).astype(np.int8).view(np.uint8)
    else:
        nibbles = (numbers.clip(-8, 7) + 8).astype(np.uint8)
        packed = nibbles[:, :16] | (nibbles[:, 16:] << 4)
    rows = np.concatenate([scale.view(np.uint8), packed], axis=1)
    return Stored(number, array.shape, rows.tobytes())


def random_blocks(number: int, shape: tuple[int, ...]) -> Stored:
    """Random blocks of a quantised type, whose numbers are of order 0.1."""
    size, length, floats = BLOCKS[number]
    rng = np.random.default_rng(number)
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // size, length), np.uint8)
    for at in floats:
        scales = rng.uniform(0.5, 1, (len(blocks), 1)) * SCALES.get(number, 0.01)
        blocks[:, at : at + 2] = scales.astype("<f2").view(np.uint8)
    if number == MXFP4:
        blocks[:, 0] = rng.integers(118, 124, len(blocks))
    return Stored(number, shape, blocks.tobytes())


def header(metadata: Mapping[str, Any], tensors: Mapping[str, Stored], version: int = 3) -> bytes:
    found = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    for key, value in metadata.items():
        number, data = typed(value)
        found += [text(key), struct.pack("<I", number), data]
    offset = 0
    for name, tensor in tensors.items():
        axes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        found += [text(name), axes, struct.pack("<IQ", tensor.number, offset)]
        offset += padded(tensor.size)
    whole = b"".join(found)
    return whole.ljust(padded(len(whole)), b"\0")


def padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def write(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Path:
    data = b"".join(t.data.ljust(padded(len(t.data)), b"\0") for t in tensors.values())
    path.write_bytes(header(metadata, tensors) + data)
    return path


def write_empty(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Path:
    """A file with the header alone and as long as if it had the tensors."""
    first = header(metadata, tensors)
    with path.open("wb") as file:
        file.write(first)
        file.truncate(len(first) + sum(padded(tensor.size) for tensor in tensors.values()))
    return path
