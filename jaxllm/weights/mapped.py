"""Mapped files whose bytes can also be read.

Copying out of a mapping costs a page fault for every few pages, and unmapping costs as much again,
in one thread: about a second for 15 GB in pages of 4 KiB. Reading the file costs neither.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np


class FileEnded(OSError):
    """A file that has become shorter than it was when it was mapped."""


class MappedFile(mmap.mmap):
    """A whole file, mapped read-only.

    Attributes:
        path: of the file.
        address: of its first byte in memory.
        handle: descriptor of the open file; None once it is closed.
    """

    path: Path
    address: int
    handle: int | None = None

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises OSError, and ValueError for an empty file."""
        handle = os.open(path, os.O_RDONLY)
        try:
            mapping = cls(handle, 0, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(handle)
            raise
        mapping.path = path
        mapping.handle = handle
        mapping.address = np.frombuffer(mapping, np.uint8).ctypes.data
        return mapping

    def close(self, close: Callable[[int], None] = os.close) -> None:  # for a late exit
        """Close the file. Its memory is unmapped with the last view of it."""
        handle = self.handle
        self.handle = None
        if handle is not None:
            close(handle)
        try:
            super().close()
        except BufferError:  # a view is left
            return

    __del__ = close


def read(view: np.ndarray, target: np.ndarray) -> bool:
    """Fill `target` with a view of a mapped file by reading the file; False where the view is of no
    such file, or either does not lie in one piece. Raises FileEnded, and OSError as `os.preadv`."""
    file = _file_of(view)
    if file is None or file.handle is None:
        return False
    if not (view.flags.c_contiguous and target.flags.c_contiguous):
        return False
    offset = view.ctypes.data - file.address
    rest = memoryview(target.reshape(-1).view(np.uint8))
    while rest:
        count = os.preadv(file.handle, [rest], offset)
        if not count:
            raise FileEnded(f"{file.path.name} ended at byte {offset} while it was read")
        offset = offset + count
        rest = rest[count:]
    return True


def _file_of(view: np.ndarray) -> MappedFile | None:
    base: object = view
    while isinstance(base, np.ndarray):
        base = base.base
    owner = base.obj if isinstance(base, memoryview) else base
    if isinstance(owner, MappedFile):
        return owner
    return None
