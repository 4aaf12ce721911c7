"""Pages that this engine holds for others, by hash."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from threading import Condition

import numpy as np


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A page's bytes, uint8 `[bytes]`, and their checksum. The bytes never change."""

    data: np.ndarray
    checksum: int


class Shelf:
    """Hash → page, at most `capacity` pages: those used least recently go first. Any thread may
    call it."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._changed = Condition()
        self._pages: OrderedDict[bytes, StoredPage] = OrderedDict()  # least recently used first
        self._expected: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._pages)

    def expect(self, keys: Sequence[bytes]) -> list[int]:
        """Which of `keys` are neither here nor expected, as positions; they are expected now."""
        with self._changed:
            missing = []
            for at, key in enumerate(keys):
                if key in self._pages:
                    self._pages.move_to_end(key)
                elif key not in self._expected:
                    self._expected.add(key)
                    missing.append(at)
            return missing

    def put(self, key: bytes, page: StoredPage) -> None:
        """Store an expected page."""
        with self._changed:
            self._expected.discard(key)
            self._pages[key] = page
            self._pages.move_to_end(key)
            while len(self._pages) > self._capacity:
                self._pages.popitem(last=False)
            self._changed.notify_all()

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop these pages, and expect them no more."""
        with self._changed:
            for key in keys:
                self._pages.pop(key, None)
                self._expected.discard(key)
            self._changed.notify_all()

    def longest(self, keys: Sequence[bytes], seconds: float) -> list[StoredPage]:
        """The pages of the longest chain of hits from the start of `keys`. Waits at most so long
        for expected ones."""
        with self._changed:
            self._changed.wait_for(lambda: not self._expected.intersection(keys), seconds)
            found = list(takewhile(self._pages.__contains__, keys))
            # Without the start of a chain the rest is useless, so the start goes last
            for key in reversed(found):
                self._pages.move_to_end(key)
            return [self._pages[key] for key in found]
