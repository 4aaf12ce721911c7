"""Safetensors files as memory-mapped arrays (https://huggingface.co/docs/safetensors, "Format").

Headers are checked against the file before anything is read.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import os
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.quantisation import PackedPart, PackedTensor, Scheme
from jaxllm.weights.deferred import Deferred

MAX_HEADER_BYTES = 100 * 2**20
INDEX = "model.safetensors.index.json"

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# With the types of tensors that other tensors are packed in
STORED_DTYPES: Mapping[str, np.dtype] = {
    **DTYPES,
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U8": np.dtype(np.uint8),
}


class BadFile(ValueError):
    """A file that cannot be read as safetensors at all; the message says why."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file's header.

    Attributes:
        dtype: its name in the format, such as "BF16".
        shape: of the tensor.
        begin: first byte in the data of the file.
        end: byte after the last one.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class TensorFile:
    """A mapped file.

    Attributes:
        name: of the file.
        data: its bytes behind the header.
        entries: its tensors by name.
        problems: tensors that do not lie in the file as the header claims.
    """

    name: str
    data: memoryview
    entries: dict[str, Entry]
    problems: list[str]


class Checkpoint:
    """All tensors of a model directory, mapped and not yet read.

    Attributes:
        directory: of the model.
        problems: all faults of its files, a line each.
    """

    def __init__(self, model_dir: str | Path):
        self.directory = Path(model_dir)
        self.problems: list[str] = []
        self._home: dict[str, TensorFile] = {}
        self._stored: dict[str, str] = {}  # names in their files of tensors that were renamed
        self._packed: dict[str, PackedTensor] = {}
        listed = self._listed()
        failed = {path.name for path in self._files(listed) if not self._add(path)}
        strays = sorted(
            name for name, file in listed.items() if file not in failed and name not in self._home
        )
        self.problems += [
            f"{listed[name]} lacks {name:.100}, which the index places there" for name in strays
        ]
        self._excused = {name for name, file in listed.items() if file in failed} | set(strays)
        # Without an index, the tensors of an unreadable file are unknown
        self._complete = bool(listed) or (bool(self._home) and not failed)

    @property
    def entries(self) -> dict[str, Entry]:
        """Every tensor found, by name; a packed one in place of its parts."""
        parts = {part.name for tensor in self._packed.values() for part in tensor.parts}
        found = {name: self._entry(name) for name in self._home if name not in parts}
        packed = {name: Entry("F32", each.shape, 0, 0) for name, each in self._packed.items()}
        return found | packed

    def _entry(self, name: str) -> Entry:
        return self._home[name].entries[self._stored.get(name, name)]

    def rename(self, read_name: Callable[[str], str | None]) -> None:
        """Know every tensor as `read_name` says, and forget those that it gives no name."""
        found: dict[str, str] = {}
        for old in self._home:
            new = read_name(old)
            if new in found:
                self.problems.append(f"{found[new]:.100} and {old:.100} are both read as {new}")
            elif new is not None:
                found[new] = old
        self._stored = {new: self._stored.get(old, old) for new, old in found.items()}
        self._home = {new: self._home[old] for new, old in found.items()}
        self._excused = {read_name(name) or name for name in self._excused}

    def add_folder(self, folder: str) -> None:
        """Add the tensors of a folder of the model, each as `folder/name`."""
        other = Checkpoint(self.directory / folder)
        self.problems += [f"{folder}: {problem}" for problem in other.problems]
        self._home |= {f"{folder}/{name}": file for name, file in other._home.items()}
        self._stored |= {f"{folder}/{name}": name for name in other._home}

    def unpack(self, scheme: Scheme) -> None:
        """Know the tensors that `scheme` packs as they are when they are unpacked."""
        packed = list(scheme.tensors(self.entries))
        parts = {part.name: part for tensor in packed for part in tensor.parts}
        self.problems += [
            f"{tensor.name} and {tensor.parts[0].name} are both there"
            for tensor in packed
            if tensor.name in self._home and tensor.name not in parts
        ]
        self.problems += [f"missing {name}" for name in self.missing(set(parts))]
        self.problems += filter(None, map(self._misfit, parts.values()))
        self._packed = {tensor.name: tensor for tensor in packed}

    def _misfit(self, part: PackedPart) -> str | None:
        """Why the stored tensor cannot be this part, or None."""
        if part.name not in self._home:
            return None
        entry = self._entry(part.name)
        if entry.shape != part.shape:
            return f"{part.name} has shape {list(entry.shape)}, expected {list(part.shape)}"
        if entry.dtype not in part.dtypes:
            known = ", ".join(part.dtypes)
            return f"{part.name} has dtype {entry.dtype}, which is not one of {known}"
        return None

    def missing(self, names: set[str]) -> list[str]:
        """Those of `names` that no file holds, without those of files in `problems`."""
        held = {*self._home, *self._packed, *self._excused}
        return sorted(names - held) if self._complete else []

    def view(self, name: str) -> np.ndarray | Deferred:
        """The tensor as a read-only view of its file; a packed one is unpacked where it is read."""
        if (tensor := self._packed.get(name)) is None:
            return self._array(name)
        arrays = [self._array(part.name) for part in tensor.parts]
        return Deferred(tensor.shape, functools.partial(tensor.unpack, arrays))

    def _array(self, name: str) -> np.ndarray:
        entry = self._entry(name)
        data = self._home[name].data[entry.begin : entry.end]
        return np.frombuffer(data, STORED_DTYPES[entry.dtype]).reshape(entry.shape)

    def _listed(self) -> dict[str, str]:
        """File name of each tensor in the index, {} without an index."""
        index = self.directory / INDEX
        if not os.path.lexists(index):
            return {}
        if not index.is_file():
            self.problems.append(f"{INDEX} is not a regular file")
            return {}
        try:
            listed = json.loads(index.read_bytes())["weight_map"]
            bad = [
                file
                for file in listed.values()
                if not isinstance(file, str) or Path(file).name != file
            ]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.problems.append(f"{INDEX} has no weight_map from tensor names to file names")
            return {}
        if bad:
            self.problems.append(
                f"{INDEX} names {bad[0]!r:.80}, which is not the name of a file in this directory"
            )
            return {}
        return listed

    def _files(self, listed: dict[str, str]) -> list[Path]:
        if listed:
            return [self.directory / name for name in sorted(set(listed.values()))]
        if self.problems:
            return []
        single = self.directory / "model.safetensors"
        found = [single] if single.exists() else sorted(self.directory.glob("*.safetensors"))
        if not found:
            pickles = sorted(path.name for path in self.directory.glob("*.bin"))
            hint = (
                f"; {pickles[0]} is a pickle, which is never read: convert it to safetensors"
                if pickles
                else ""
            )
            self.problems.append(f"no *.safetensors file{hint}")
        return found

    def _add(self, path: Path) -> bool:
        """Add the tensors of one file; False when nothing of it can be read."""
        try:
            file = open_file(path)
        except BadFile as error:
            self.problems.append(f"{path.name}: {error}")
            return False
        self.problems += file.problems
        self.problems += [
            f"{path.name} and {self._home[name].name} both hold {name:.100}"
            for name in file.entries
            if name in self._home
        ]
        self._home |= dict.fromkeys(file.entries, file)
        return True


def open_file(path: Path) -> TensorFile:
    """Map a file and check its header. Raises BadFile when the header cannot be used."""
    try:
        if not stat.S_ISREG((found := path.stat()).st_mode):  # opening a FIFO would wait
            raise BadFile("not a regular file")
        size = found.st_size
        with path.open("rb") as file:
            if size < 8:
                raise BadFile(f"truncated: it has only {size} bytes")
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise BadFile(f"cannot be opened ({error.strerror})") from None
    (length,) = struct.unpack("<Q", buffer[:8])
    if length > MAX_HEADER_BYTES:
        raise BadFile(
            f"not safetensors: it claims a header of {length} bytes (limit {MAX_HEADER_BYTES})"
        )
    if 8 + length > size:
        raise BadFile(f"truncated: its header needs {8 + length} bytes, the file has {size}")
    try:
        header = json.loads(buffer[8 : 8 + length])
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise BadFile("not safetensors: its header is not a JSON object")
    entries = {
        name: _entry(name, value) for name, value in header.items() if name != "__metadata__"
    }
    data = memoryview(buffer)[8 + length :]
    return TensorFile(path.name, data, entries, _layout_problems(path.name, entries, len(data)))


def _entry(name: str, value: Any) -> Entry:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        legal = isinstance(dtype, str) and all(
            type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end)
        )
    except (KeyError, TypeError, ValueError):
        legal = False
    if not legal:
        raise BadFile(f"not safetensors: {name:.100} has no legal dtype, shape and data_offsets")
    return Entry(dtype, tuple(shape), begin, end)


def _layout_problems(file: str, entries: dict[str, Entry], data_bytes: int) -> list[str]:
    """Faults of the data part.

    Tensors must have the bytes of their shape, follow each other without holes or overlaps, and end
    with the file.
    """
    problems, position = [], 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        where = f"{file}: {name:.100}"
        if entry.dtype in STORED_DTYPES and entry.end - entry.begin != (
            needed := math.prod(entry.shape) * STORED_DTYPES[entry.dtype].itemsize
        ):
            problems.append(
                f"{where} has {entry.end - entry.begin} bytes, "
                f"but {entry.dtype} {list(entry.shape)} needs {needed}"
            )
        elif entry.end > data_bytes:
            problems.append(
                f"{where} is truncated: it ends at byte {entry.end} of the data, "
                f"the file has {data_bytes}"
            )
        elif entry.begin != position:
            kind = "overlaps the tensor" if entry.begin < position else "leaves a hole"
            problems.append(
                f"{where} {kind} before it: it begins at byte {entry.begin}, expected {position}"
            )
        position = max(position, entry.end)
    if position < data_bytes and not problems:
        problems.append(f"{file} has {data_bytes - position} bytes after its last tensor")
    return problems
