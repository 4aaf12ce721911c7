"""Safetensors files as memory-mapped arrays. Headers are checked against the file before anything is read."""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

MAX_HEADER_BYTES = 100 * 2**20

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
)


class BadFile(ValueError):
    """This file cannot be read as safetensors; the message says why."""


@dataclass(frozen=True)
class Entry:
    """One tensor of one file: its dtype name, shape, and byte range after the header."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """All tensors of a model directory. `problems` lists what is wrong with its files; `view` maps a tensor without reading it."""

    def __init__(self, model_dir: str | Path):
        self.directory = Path(model_dir)
        self.entries: dict[str, Entry] = {}
        self.problems: list[str] = []
        self._buffers: dict[Path, mmap.mmap] = {}
        listed = self._listed()
        for path in self._files(listed):
            self._add(path)
        for name, file in sorted(listed.items()):
            if name not in self.entries and file not in {p.split(":")[0] for p in self.problems}:
                self.problems.append(f"{file}: lacks {name}, which the index places there")

    def view(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of its file."""
        entry = self.entries[name]
        data_start = len(self._buffers[entry.file]) - self._data_bytes(entry.file)
        count = math.prod(entry.shape)
        if count == 0:
            return np.zeros(entry.shape, DTYPES[entry.dtype])
        flat = np.frombuffer(self._buffers[entry.file], DTYPES[entry.dtype], count, data_start + entry.begin)
        return flat.reshape(entry.shape)

    def _data_bytes(self, file: Path) -> int:
        (header,) = struct.unpack("<Q", self._buffers[file][:8])
        return len(self._buffers[file]) - 8 - header

    def _listed(self) -> dict[str, str]:
        """Tensor → file name of model.safetensors.index.json, {} without an index."""
        index = self.directory / "model.safetensors.index.json"
        if not index.is_file():
            return {}
        try:
            listed = json.loads(index.read_bytes())["weight_map"]
            bad = [file for file in listed.values() if not isinstance(file, str) or Path(file).name != file]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.problems.append(f"{index.name}: no weight_map from tensor names to file names")
            return {}
        if bad:
            self.problems.append(f"{index.name}: {bad[0]!r:.80} is not the name of a file in this directory")
            return {}
        return listed

    def _files(self, listed: dict[str, str]) -> list[Path]:
        if listed:
            return [self.directory / name for name in sorted(set(listed.values()))]
        found = sorted(self.directory.glob("*.safetensors"))
        single = self.directory / "model.safetensors"
        if not found and not self.problems:
            others = sorted(p.name for p in self.directory.glob("*.bin"))
            hint = f"; {others[0]} is a pickle, which is never read: convert it to safetensors" if others else ""
            self.problems.append(f"{self.directory} has no *.safetensors file{hint}")
        return [single] if single in found else found

    def _add(self, path: Path) -> None:
        try:
            self._buffers[path], entries = open_file(path)
        except BadFile as error:
            self.problems.append(f"{path.name}: {error}")
            return
        for name, entry in entries.items():
            if name in self.entries:
                self.problems.append(f"{path.name}: {name} is also in {self.entries[name].file.name}")
            self.entries[name] = entry


def open_file(path: Path) -> tuple[mmap.mmap, dict[str, Entry]]:
    """Map a file and read its header. Raises BadFile when it is missing, truncated or inconsistent."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 8:
                raise BadFile(f"truncated: {size} bytes are no safetensors file")
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise BadFile(f"cannot be opened: {error.strerror}") from None
    (length,) = struct.unpack("<Q", buffer[:8])
    if length > MAX_HEADER_BYTES:
        raise BadFile(f"not safetensors: it claims a header of {length} bytes (limit {MAX_HEADER_BYTES})")
    if 8 + length > size:
        raise BadFile(f"truncated: the header needs {8 + length} bytes, the file has {size}")
    try:
        header = json.loads(buffer[8 : 8 + length])
        entries = {name: _entry(path, name, value) for name, value in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError, RecursionError) as error:
        raise error if isinstance(error, BadFile) else BadFile("not safetensors: the header is not a JSON object") from None
    _check_layout(entries, size - 8 - length)
    return buffer, entries


def _entry(path: Path, name: str, value: Any) -> Entry:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, begin, end]
        legal = isinstance(dtype, str) and all(type(n) is int and 0 <= n < 2**63 for n in numbers)
    except (KeyError, TypeError, ValueError):
        legal = False
    if not legal:
        raise BadFile(f"{name:.100} has no legal dtype, shape and data_offsets")
    if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise BadFile(f"{name:.100} has {end - begin} bytes, but {dtype} {tuple(shape)} needs {math.prod(shape) * DTYPES[dtype].itemsize}")
    return Entry(path, dtype, tuple(shape), begin, end)


def _check_layout(entries: dict[str, Entry], data_bytes: int) -> None:
    """Tensors must follow each other without holes or overlaps and end where the file ends."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position or entry.end < entry.begin:
            kind = "overlaps another tensor" if entry.begin < position else "leaves a hole before it"
            raise BadFile(f"{name:.100} {kind} (bytes {entry.begin} to {entry.end}, expected to start at {position})")
        position = entry.end
    if position > data_bytes:
        raise BadFile(f"truncated: its tensors need {position} bytes, the file has {data_bytes}")
    if position < data_bytes:
        raise BadFile(f"has {data_bytes - position} bytes after its last tensor")
