"""Pages that this engine holds for others, by hash."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from threading import Condition

import numpy as np

from jaxllm.kv_transfer.checksum import checksum
from jaxllm.kv_transfer.cores import CORES


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A page's bytes, uint8 `[page_bytes]`, their place on the shelf, and their checksum."""

    data: np.ndarray
    place: int
    checksum: int


class Shelf:
    """Hash → page, at most `capacity` pages of `page_bytes` bytes: those used least recently go
    first. Any thread may call it.

    The memory is one array, written once at the start: the system provides it then, which would
    else take longer than copying a page, and between two tokens.

    Attributes:
        capacity: in pages.
    """

    def __init__(self, capacity: int, page_bytes: int):
        self.capacity = capacity
        self._memory = np.empty((capacity, page_bytes), np.uint8)
        with ThreadPoolExecutor(CORES) as pool:
            wait([pool.submit(part.fill, 0) for part in np.array_split(self._memory, CORES)])
        self._blank = list(range(capacity - 1, -1, -1))
        self._changed = Condition()
        self._pages: OrderedDict[bytes, StoredPage] = OrderedDict()  # least recently used first
        self._readers: Counter[int] = Counter()  # of places
        self._gone: set[int] = set()  # places of dropped pages that are still being read
        self._expected: set[bytes] = set()  # being copied here
        self._announced: Counter[bytes] = Counter()  # by how many who compute them

    def __len__(self) -> int:
        return len(self._pages)

    def expect(self, keys: Sequence[bytes]) -> list[int]:
        """The positions of those `keys` that are neither here nor expected; they are expected
        now."""
        with self._changed:
            missing = []
            for index, key in enumerate(keys):
                if key in self._pages:
                    self._pages.move_to_end(key)
                elif key not in self._expected:
                    self._expected.add(key)
                    missing.append(index)
            return missing

    def put(self, key: bytes, parts: Sequence[np.ndarray]) -> None:
        """Copy a page here, whose bytes are those of `parts` one behind the other. While all pages
        are being read, it is dropped."""
        place = self._take_place()
        if place is None:
            self.forget([key])
            return
        data = self._memory[place]
        offset = 0
        for part in parts:
            flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            data[offset : offset + len(flat)] = flat
            offset += len(flat)
        page = StoredPage(data, place, checksum(data))
        with self._changed:
            self._expected.discard(key)
            self._drop(key)
            self._pages[key] = page
            self._changed.notify_all()

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop these pages, and expect them no more."""
        with self._changed:
            for key in keys:
                self._drop(key)
                self._expected.discard(key)
            self._changed.notify_all()

    def announce(self, keys: Iterable[bytes]) -> None:
        """These pages will be computed: whoever asks for them waits, until as many calls of
        `withdraw` name them."""
        with self._changed:
            self._announced.update(keys)

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """Undo an `announce` of these pages: those that are not here or being copied here do not
        come."""
        with self._changed:
            self._announced -= Counter(keys)
            self._changed.notify_all()

    def coming(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are here or on their way."""
        with self._changed:
            count = sum(
                1 for _ in takewhile(lambda key: key in self._pages or self._waits(key), keys)
            )
            # Without the start of a chain the rest is useless, so the start goes last
            for key in reversed(keys[:count]):
                if key in self._pages:
                    self._pages.move_to_end(key)
            return count

    @contextmanager
    def reading(self, key: bytes, seconds: float) -> Iterator[StoredPage | None]:
        """A page, which stays as it is within the block. Waits at most so long while it is on its
        way; None when it does not come."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._pages or not self._waits(key), seconds)
            if (page := self._pages.get(key)) is not None:
                self._readers[page.place] += 1
        try:
            yield page
        finally:
            if page is not None:
                with self._changed:
                    self._release(page.place)

    def _waits(self, key: bytes) -> bool:
        return key in self._expected or key in self._announced

    def _take_place(self) -> int | None:
        """A place without a page, if need be that of the page used least recently of those that
        nobody reads."""
        with self._changed:
            if not self._blank:
                unread = (
                    key for key, page in self._pages.items() if page.place not in self._readers
                )
                if (oldest := next(unread, None)) is not None:
                    self._drop(oldest)
            return self._blank.pop() if self._blank else None

    def _drop(self, key: bytes) -> None:
        page = self._pages.pop(key, None)
        if page is None:
            return
        if page.place in self._readers:
            self._gone.add(page.place)
        else:
            self._blank.append(page.place)

    def _release(self, place: int) -> None:
        """One reader less; the place of a page that is gone is blank after the last."""
        self._readers[place] -= 1
        if not self._readers[place]:
            del self._readers[place]
            if place in self._gone:
                self._gone.remove(place)
                self._blank.append(place)
