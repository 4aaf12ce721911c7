"""Safetensors files as memory-mapped arrays (https://huggingface.co/docs/safetensors, "Format").

Headers are checked against the file before anything is read.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.weights.mapped import MappedFile
from jaxllm.weights.stored import STORED_DTYPES, Entry, Found

MAX_HEADER_BYTES = 100 * 2**20
INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs"  # what Git LFS leaves in place of a file
AGAIN = "download it again"


class BadFile(ValueError):
    """A file that cannot be read as safetensors at all; the message says why."""


@dataclass(frozen=True)
class SafetensorsFile:
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

    def tensor(self, name: str) -> np.ndarray:
        """A view of the file."""
        entry = self.entries[name]
        data = self.data[entry.begin : entry.end]
        return np.frombuffer(data, STORED_DTYPES[entry.dtype]).reshape(entry.shape)

    def close(self) -> None:
        """Close the file; views of it stay."""
        mapping = self.data.obj
        self.data.release()
        assert isinstance(mapping, MappedFile)
        mapping.close()


def holds(directory: Path) -> bool:
    """Whether the directory has weights in this format."""
    return os.path.lexists(directory / INDEX) or any(directory.glob("*.safetensors"))


def read(directory: Path, _: object = None) -> Found:
    """All tensors of a model directory, mapped and not yet read."""
    content = Found()
    listed = _listed(directory, content.problems)
    paths = _files(directory, listed, content.problems)
    opened = {path.name: _opened(path, content.problems) for path in paths}
    content.files = [file for file in opened.values() if file is not None]
    held = {name for file in content.files for name in file.entries}
    failed = {name for name, file in opened.items() if file is None}
    strays = sorted(
        name for name, file in listed.items() if file not in failed and name not in held
    )
    content.problems += [
        f"{listed[name]} lacks {name:.100}, which the index places there" for name in strays
    ]
    content.excused = {name for name, file in listed.items() if file in failed} | set(strays)
    # Without an index, the tensors of an unreadable file are unknown
    content.complete = bool(listed) or (bool(held) and not failed)
    return content


def _listed(directory: Path, problems: list[str]) -> dict[str, str]:
    """File name of each tensor in the index, {} without an index."""
    index = directory / INDEX
    if not os.path.lexists(index):
        return {}
    if not index.is_file():
        problems.append(f"{INDEX} is not a regular file")
        return {}
    try:
        listed = json.loads(index.read_bytes())["weight_map"]
        bad = [
            file for file in listed.values() if not isinstance(file, str) or Path(file).name != file
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        problems.append(f"{INDEX} has no weight_map from tensor names to file names")
        return {}
    if bad:
        problems.append(
            f"{INDEX} names {bad[0]!r:.80}, which is not the name of a file in this directory"
        )
        return {}
    return listed


def _files(directory: Path, listed: dict[str, str], problems: list[str]) -> list[Path]:
    if listed:
        return [directory / name for name in sorted(set(listed.values()))]
    if problems:
        return []
    single = directory / "model.safetensors"
    paths = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not paths:
        pickles = sorted(path.name for path in directory.glob("*.bin"))
        hint = "; download the weights into this directory"
        if pickles:
            hint = f"; {pickles[0]} is a pickle, which is never read: convert it to safetensors"
        problems.append(f"no *.safetensors file{hint}")
    return paths


def _opened(path: Path, problems: list[str]) -> SafetensorsFile | None:
    """The file, None when nothing of it can be read."""
    try:
        file = open_file(path)
    except BadFile as error:
        problems.append(f"{path.name}: {error}")
        return None
    problems += file.problems
    return file


def open_file(path: Path) -> SafetensorsFile:
    """Map a file and check its header. Raises BadFile when the header cannot be used."""
    try:
        if not stat.S_ISREG((status := path.stat()).st_mode):  # opening a FIFO would wait
            raise BadFile("not a regular file; replace it")
        size = status.st_size
        if size < 8:
            raise BadFile(f"truncated: it has only {size} bytes; {AGAIN}")
        buffer = MappedFile.open(path)
    except OSError as error:
        raise BadFile(f"cannot be opened ({error.strerror})") from None
    if buffer[: len(POINTER)] == POINTER:
        raise BadFile("it is a pointer of Git LFS; run git lfs pull")
    (length,) = struct.unpack("<Q", buffer[:8])
    if length > MAX_HEADER_BYTES:
        raise BadFile(
            f"not safetensors: it claims a header of {length} bytes (limit {MAX_HEADER_BYTES}); "
            f"{AGAIN}"
        )
    if 8 + length > size:
        raise BadFile(
            f"truncated: its header needs {8 + length} bytes, the file has {size}; {AGAIN}"
        )
    try:
        header = json.loads(buffer[8 : 8 + length])
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise BadFile(f"not safetensors: its header is not a JSON object; {AGAIN}")
    entries = {
        name: _entry(name, value) for name, value in header.items() if name != "__metadata__"
    }
    data = memoryview(buffer)[8 + length :]
    return SafetensorsFile(
        path.name, data, entries, _layout_problems(path.name, entries, len(data))
    )


def _entry(name: str, value: Any) -> Entry:
    try:
        dtype = value["dtype"]
        shape = value["shape"]
        begin, end = value["data_offsets"]
        legal = isinstance(dtype, str) and all(
            type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end)
        )
    except (KeyError, TypeError, ValueError):
        legal = False
    if not legal:
        raise BadFile(
            f"not safetensors: {name:.100} has no legal dtype, shape and data_offsets; {AGAIN}"
        )
    return Entry(dtype, tuple(shape), begin, end)


def _layout_problems(file: str, entries: dict[str, Entry], data_bytes: int) -> list[str]:
    """Faults of the data part.

    Tensors must have the bytes of their shape, follow each other without holes or overlaps, and end
    with the file.
    """
    problems = []
    position = 0
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
                f"the file has {data_bytes}; {AGAIN}"
            )
        elif entry.begin != position:
            fault = "overlaps the tensor" if entry.begin < position else "leaves a hole"
            problems.append(
                f"{where} {fault} before it: it begins at byte {entry.begin}, expected {position}"
            )
        position = max(position, entry.end)
    if position < data_bytes and not problems:
        problems.append(f"{file} has {data_bytes - position} bytes after its last tensor")
    return problems
