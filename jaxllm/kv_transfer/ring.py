"""Shared memory of two processes of one host: slots through which pages pass.

The fetching side makes it and unlinks its name as soon as the serving side has opened it, or could
not: nothing is left behind, however either ends.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

import numpy as np

FOLDER = Path("/dev/shm")
NAME = re.compile(r"jaxllm-kv-[0-9a-f]{32}")
# Sixteen pages of 2 MiB: with half as many, one side waits for the other. At least two slots
SIZE = 32 << 20  # bytes


class Ring:
    """Slots of `page_bytes` bytes; page number n passes through slot n modulo their number."""

    def __init__(self, descriptor: int, page_bytes: int, name: str):
        self.name = name
        self.slots = slots(page_bytes)
        self._page_bytes = page_bytes
        self._memory = mmap.mmap(descriptor, self.slots * page_bytes)

    @staticmethod
    def make(page_bytes: int) -> Ring:
        """New shared memory, all of it there. Raises OSError where there is none or too little."""
        name = f"jaxllm-kv-{secrets.token_hex(16)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(FOLDER / name, flags, 0o600)
        try:
            # Memory that is missing would end a process that writes to it
            os.posix_fallocate(descriptor, 0, slots(page_bytes) * page_bytes)
            return Ring(descriptor, page_bytes, name)
        except BaseException:
            os.unlink(FOLDER / name)
            raise
        finally:
            os.close(descriptor)

    @staticmethod
    def open(name: str, page_bytes: int) -> Ring:
        """The memory that a peer has made. Raises OSError where it is not there or is not this
        user's, ValueError where it is no such memory."""
        if not NAME.fullmatch(name):
            raise ValueError("a ring has another name")
        descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW)
        try:
            status = os.fstat(descriptor)
            size = slots(page_bytes) * page_bytes
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise PermissionError("a ring belongs to another user")
            if status.st_size != size:
                raise ValueError(f"a ring has another size: {status.st_size} bytes, not {size}")
            return Ring(descriptor, page_bytes, name)
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Take its name away; the memory stays while it is mapped."""
        with suppress(FileNotFoundError):
            os.unlink(FOLDER / self.name)

    def slot(self, number: int) -> np.ndarray:
        """The bytes of the slot of page `number`, uint8 `[page_bytes]`."""
        start = number % self.slots * self._page_bytes
        return np.frombuffer(self._memory, np.uint8, self._page_bytes, start)


def slots(page_bytes: int) -> int:
    """Slots of a ring."""
    return max(2, SIZE // page_bytes)
