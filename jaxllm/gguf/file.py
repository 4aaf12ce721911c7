"""The header of a GGUF file, and where its tensors lie
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Every count and offset is checked against the file before anything of that size is made.
"""

from __future__ import annotations

import functools
import math
import mmap
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config import ConfigError
from jaxllm.gguf.types import OFFSETS, TABLES, TYPES, UNREAD, BlockType
from jaxllm.tensors import Bounds, Deferred

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 2**28
MAX_AXES = 4
MAX_NAMED_FAULTS = 20
STRING = 8
ARRAY = 9
BOOL = np.dtype("?")
NUMBERS: Mapping[int, np.dtype] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: BOOL,
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
REMEDY = "download it again"
REMEDY_TYPE = "use a file in another type, such as Q4_K_M or Q8_0"


class _Fault(ValueError):
    """What is wrong with a file, without its name."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in its file.

    Attributes:
        name: in the file.
        type: of its blocks.
        shape: in NumPy's order, the reverse of the file's.
        data: its bytes.
    """

    name: str
    type: BlockType
    shape: tuple[int, ...]
    data: memoryview

    def deferred(self) -> Deferred:
        """Its numbers, computed where they are read: float32, or those of the file where its type
        is plain. Reading raises ConfigError where one is infinite."""
        return Deferred(self.shape, functools.partial(self._read, self.type.size, self._values))

    def parts(self) -> tuple[Deferred, ...]:
        """The numbers of its groups, and their scales and offsets, float32 [..., G]; () where it is
        plain. Reading raises ConfigError where one is infinite."""
        integers = self.type.integers
        if integers is None:
            return ()
        size = self.type.size
        group = self.type.group
        grouped = (*self.shape[:-1], self.shape[-1] // group)

        def part(index: int, shape: tuple[int, ...], entries: int) -> Deferred:
            values = functools.partial(self._part, index)
            return Deferred(shape, functools.partial(self._read, entries, values))

        scales, offsets = (part(index, grouped, size // group) for index in (1, 2))
        groups = (part(0, self.shape, size), scales, offsets)
        if integers in OFFSETS:
            return groups
        return groups[:2]

    def _read(
        self, size: int, part: Callable[[np.ndarray], np.ndarray], bounds: Bounds
    ) -> np.ndarray:
        """What `part` makes of the blocks that `bounds` need; `size` entries of each."""
        blocks = np.frombuffer(self.data, self.type.layout)
        rows = blocks.reshape(*self.shape[:-1], self.shape[-1] // self.type.size)
        first, last = bounds[-1]
        begin = first // size
        end = -(-last // size)
        needed = rows[(*(slice(*bound) for bound in bounds[:-1]), slice(begin, end))]
        entries = part(needed).reshape(*needed.shape[:-1], needed.shape[-1] * size)
        return entries[..., first - begin * size : last - begin * size]

    def _values(self, blocks: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            values = self.type.values(blocks)
        if not self.type.plain:
            self._check(values)
        return values

    def _part(self, index: int, blocks: np.ndarray) -> np.ndarray:
        assert self.type.groups is not None
        numbers = self.type.groups(blocks)[index]
        assert numbers is not None
        largest = np.abs(TABLES.get(self.type.integers or "", np.ones(1))).max()
        with np.errstate(over="ignore"):
            self._check(numbers if index == 0 else numbers * np.float32(largest))
        return numbers

    def _check(self, numbers: np.ndarray) -> None:
        if not np.isfinite(numbers).all():
            raise ConfigError(
                f"{self.name} has a scale that makes numbers infinite; {REMEDY} or convert it again"
            )


@dataclass(frozen=True)
class GgufFile:
    """A mapped file.

    Attributes:
        path: of the file.
        metadata: its keys and values; arrays are lists.
        tensors: by name.
        mapping: its bytes.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    mapping: mmap.mmap

    def close(self) -> None:
        """Close the file; no tensor of it may be read after that. Its memory is unmapped with the
        last view of it."""
        try:
            for tensor in self.tensors.values():
                tensor.data.release()
            self.mapping.close()
        except BufferError:  # a view is left
            return


def open_file(path: Path) -> GgufFile:
    """Map a file and check all of its header. Raises one ConfigError that names what is wrong."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a FIFO would wait
            raise _Fault("it is not a regular file")
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}") from None
    except ValueError as error:  # an empty file, too
        raise ConfigError(f"{path} is not a GGUF file: {error}; {REMEDY}") from None
    try:
        header = _Header(memoryview(mapping))
        metadata = header.metadata()
        tensors = header.tensors(_alignment(metadata))
        return GgufFile(path, metadata, tensors, mapping)
    except _Fault as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _alignment(metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or not 8 <= value <= 2**20 or value % 8:
        raise _Fault(f"general.alignment is {value!r:.40}, not a multiple of 8; {REMEDY}")
    return value


class _Header:
    """Reads a header from its beginning to its end. Raises _Fault."""

    def __init__(self, data: memoryview):
        self._data = data
        self._position = 0
        if bytes(data[:4]) != MAGIC:
            raise _Fault(f"it does not begin with GGUF; {REMEDY}")
        self._take(4)
        version = self._number(NUMBERS[4])
        if version not in VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big") in VERSIONS
            fault = "it is big-endian"
            if not swapped:
                fault = f"its version is {version}"
            raise _Fault(f"{fault}; versions 2 and 3 are read, little-endian: convert it again")
        self._tensors = self._count("tensors", 24)
        self._keys = self._count("keys", 13)

    def metadata(self) -> dict[str, Any]:
        """All keys and values."""
        values: dict[str, Any] = {}
        for _ in range(self._keys):
            key = self._string()
            if key in values:
                raise _Fault(f"the key {key!r:.100} is there twice; {REMEDY}")
            values[key] = self._value(int(self._number(NUMBERS[4])), key)
        return values

    def tensors(self, alignment: int) -> dict[str, StoredTensor]:
        """All tensors, which lie in the file without overlaps."""
        infos = [self._tensor_info() for _ in range(self._tensors)]
        start = -(-self._position // alignment) * alignment
        data = self._data[start:]
        faults = []
        tensors: dict[str, StoredTensor] = {}
        end = 0
        before = ""
        for name, number, shape, offset in sorted(infos, key=lambda info: info[3]):
            if name in tensors:
                raise _Fault(f"the tensor {name!r:.100} is there twice; {REMEDY}")
            fault = _fault(number, shape)
            if fault:
                faults.append(f"{name:.100} {fault}")
                continue
            block_type = TYPES[number]
            size = math.prod(shape) // block_type.size * block_type.layout.itemsize
            if offset % alignment:
                faults.append(f"{name:.100} begins at byte {offset}, no multiple of {alignment}")
            elif offset < end:
                faults.append(f"{name:.100} begins in the tensor {before:.100}")
            elif offset + size > len(data):
                faults.append(
                    f"{name:.100} ends at byte {offset + size} of the data, "
                    f"of which there are {len(data)}"
                )
            tensors[name] = StoredTensor(name, block_type, shape, data[offset : offset + size])
            end = offset + size
            before = name
        _refuse(faults)
        return tensors

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        """Name, number of the type, shape and offset."""
        name = self._string()
        axes = int(self._number(NUMBERS[4]))
        if not name.isprintable() or not name:
            raise _Fault(f"a tensor has the name {name!r:.100}; {REMEDY}")
        if not 1 <= axes <= MAX_AXES:
            raise _Fault(f"{name:.100} has {axes} axes; 1 to {MAX_AXES} are possible: {REMEDY}")
        sizes = [int(self._number(NUMBERS[10])) for _ in range(axes)]
        number = int(self._number(NUMBERS[4]))
        return name, number, tuple(reversed(sizes)), int(self._number(NUMBERS[10]))

    def _value(self, value_type: int, key: str) -> Any:
        if value_type == STRING:
            return self._string()
        if value_type in NUMBERS:
            return _native(self._number(NUMBERS[value_type]))
        if value_type != ARRAY:
            raise _Fault(f"{key:.100} has the unknown type {value_type}; {REMEDY}")
        value_type = int(self._number(NUMBERS[4]))
        if value_type == STRING:
            return self._strings(self._count(f"texts of {key:.100}", 8))
        if value_type not in NUMBERS:
            raise _Fault(
                f"{key:.100} is a list of the type {value_type}, which is not read; {REMEDY}"
            )
        dtype = NUMBERS[value_type]
        count = self._count(f"numbers of {key:.100}", dtype.itemsize)
        return _native(np.frombuffer(self._take(count * dtype.itemsize), dtype))

    def _count(self, things: str, least: int) -> int:
        """The next number, a count of things of at least `least` bytes each. Raises _Fault, which
        names the `things`, where the file is too short for them."""
        count = int(self._number(NUMBERS[10]))
        if count * least > len(self._data) - self._position:
            raise _Fault(
                f"it claims {count} {things}, but has {len(self._data)} bytes; it is cut off or "
                f"damaged: {REMEDY}"
            )
        return count

    def _string(self) -> str:
        taken = self._take(self._count("bytes of a text", 1))
        try:
            return str(taken, "utf-8")
        except UnicodeDecodeError:
            raise _Fault(f"the text before byte {self._position} is not UTF-8; {REMEDY}") from None

    def _strings(self, count: int) -> list[str]:
        """The next `count` texts, in a loop of its own: vocabularies have hundreds of thousands."""
        data = self._data
        end = self._position
        texts = []
        limit = min(len(data), MAX_HEADER_BYTES)
        for _ in range(count):
            begin = end + 8
            end = begin + int.from_bytes(data[end:begin], "little")
            if end > limit:
                break
            try:
                texts.append(str(data[begin:end], "utf-8"))
            except UnicodeDecodeError:
                raise _Fault(f"the text at byte {begin} is not UTF-8; {REMEDY}") from None
        self._take(end - self._position)  # raises where a text ends behind the file
        return texts

    def _number(self, dtype: np.dtype) -> Any:
        return np.frombuffer(self._take(dtype.itemsize), dtype)[0]

    def _take(self, count: int) -> memoryview:
        end = self._position + count
        if end > len(self._data):
            raise _Fault(f"its header is cut off at byte {len(self._data)}; {REMEDY}")
        if end > MAX_HEADER_BYTES:
            raise _Fault(f"its header has more than {MAX_HEADER_BYTES} bytes; {REMEDY}")
        taken = self._data[self._position : end]
        self._position = end
        return taken


def _native(value: Any) -> Any:
    """Python's numbers; one float32 becomes the shortest number that rounds to it."""
    if value.dtype == np.float32 and not value.shape:
        return float(str(value))
    return value.tolist()


def _fault(number: int, shape: tuple[int, ...]) -> str | None:
    """Why a tensor of this type and shape cannot be read."""
    if number not in TYPES:
        return f"has the type {UNREAD.get(number, number)}, which is not read: {REMEDY_TYPE}"
    if not all(0 < size < 2**48 for size in shape) or math.prod(shape) >= 2**48:
        return f"has the absurd shape {list(shape)}: {REMEDY}"
    if shape[-1] % TYPES[number].size:
        block_type = TYPES[number]
        return (
            f"has rows of {shape[-1]} numbers, which blocks of {block_type.size} "
            f"({block_type.name}) do not divide: {REMEDY_TYPE}"
        )
    return None


def _refuse(faults: list[str]) -> None:
    if faults:
        others = len(faults) - MAX_NAMED_FAULTS
        more = [f"and {others} more"] if others > 0 else []
        raise _Fault("; ".join([*faults[:MAX_NAMED_FAULTS], *more]))
