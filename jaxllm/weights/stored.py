"""What a source of tensors gives: files, and the tensors in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from jaxllm.tensors import Deferred

type Tensor = np.ndarray | Deferred

PLAIN_DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# With the types of tensors that other tensors are packed in
STORED_DTYPES: Mapping[str, np.dtype] = {
    **PLAIN_DTYPES,
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
STORED_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


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


class TensorFile(Protocol):
    """A mapped file, or several that are read as one."""

    @property
    def name(self) -> str:
        """The name by which messages to an operator call the file."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Its tensors by name."""

    def tensor(self, name: str) -> Tensor:
        """One of them, read-only."""

    def close(self) -> None:
        """Close it; tensors that were taken from it stay until they are let go."""


@dataclass
class Found:
    """What a source finds in a model directory.

    Attributes:
        files: those that can be read.
        problems: faults of files, and tensors that do not lie where a header claims, a line each.
        excused: names of tensors that are missing because of a problem.
        complete: whether every tensor of the directory is in a file or excused.
    """

    files: Sequence[TensorFile] = ()
    problems: list[str] = field(default_factory=list)
    excused: set[str] = field(default_factory=set)
    complete: bool = True


class Source(Protocol):
    """A format of weights."""

    def holds(self, directory: Path) -> bool:
        """Whether the directory has weights in this format."""

    def read(self, directory: Path, opened: object = None) -> Found:
        """All its tensors, mapped and not yet read. `opened` is what `locate.find` has opened of
        the directory, if anything."""
