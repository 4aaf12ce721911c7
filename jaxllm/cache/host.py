"""Host accounting of pages in host memory: which prefix each holds, and which must stay. Imports no
jax.

A page comes here when the pool hands out a device page that still held a findable prefix, or from
another engine, for whose pages room is promised before. It is *pinned* while a request needs it
that was swapped or waits for it, and *cached* otherwise; cached pages are evicted in LRU order.
"""

from __future__ import annotations

from collections import ChainMap, Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile

from jaxllm.cache.events import HOST, KVEvents
from jaxllm.cache.pool import PoolError


class HostTier:
    """Hash → page of `num_pages` pages of host memory, of which at most `cached` hold prefixes that
    are not pinned.

    Attributes:
        promised: pages that were promised to prefixes and have no contents yet.
    """

    def __init__(self, num_pages: int, cached: int):
        if num_pages < 1 or not 0 <= cached <= num_pages:
            raise ValueError(f"a host tier of {num_pages} pages cannot cache {cached} of them")
        self.num_pages = num_pages
        self.cached = cached
        self.events: KVEvents | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._blank = list(range(self.num_pages - 1, -1, -1))
        self.promised: set[int] = set()
        self._pinned: dict[bytes, int] = {}
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        # Hashes that swapped requests need, stored or not
        self._pins: Counter[bytes] = Counter()

    @property
    def used(self) -> int:
        """Pages that hold something."""
        return len(self._pinned) + len(self._cached)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages of the longest chain of hits from the start of `hashes`."""
        stored = ChainMap(self._pinned, self._cached)
        found = list(takewhile(stored.__contains__, hashes))
        # Without the start of a chain the rest is useless, so the start is evicted last
        for key in reversed(found):
            if key in self._cached:
                self._cached.move_to_end(key)
        return [stored[key] for key in found]

    def save(self, key: bytes) -> int | None:
        """The host page that a device page about to be overwritten is copied to. None when its
        prefix is stored already, or there is no space for it."""
        if key in self._cached:
            self._cached.move_to_end(key)  # the device has used it since
            return None
        pinned = key in self._pins
        if key in self._pinned or not (pinned or self.cached):
            return None
        if (not pinned and len(self._cached) == self.cached) or not self._blank:
            if not self._cached:
                return None
            self._evict()
        page = self._blank.pop()
        (self._pinned if pinned else self._cached)[key] = page
        if self.events is not None:
            self.events.stored([key], None, [], medium=HOST)
        return page

    def promise(self, hashes: Sequence[bytes]) -> tuple[dict[bytes, int], int]:
        """Pin these prefixes, which depend on each other and are here or on their way, as far as
        there is room. Returns the pages for those on their way, and how many are pinned. All are
        found from now on; they are `promised` until `arrive` tells of contents."""
        self.pin(hashes)  # so that none makes room for another
        missing = [key for key in hashes if key not in self._pinned]
        while len(self._blank) < len(missing) and self._cached:
            self._evict()
        promised = {key: self._blank.pop() for key in missing[: len(self._blank)]}
        self._pinned |= promised
        self.promised.update(promised.values())
        pinned = sum(1 for _ in takewhile(self._pinned.__contains__, hashes))
        self.unpin(reversed(hashes[pinned:]))
        return promised, pinned

    def is_promised(self, key: bytes, page: int) -> bool:
        """Whether this prefix was promised this page, which has no contents yet."""
        return page in self.promised and page in (self._pinned.get(key), self._cached.get(key))

    def arrive(self, key: bytes, page: int) -> bool:
        """Note that a promised page has its contents; False when nobody waits for it any more."""
        if not self.is_promised(key, page):
            return False
        self.promised.remove(page)
        if self.events is not None:
            self.events.stored([key], None, [], medium=HOST)
        return True

    def pin(self, hashes: Iterable[bytes]) -> None:
        """Keep these prefixes, whether they are stored or come later, until `unpin` names them as
        often."""
        for key in hashes:
            self._pins[key] += 1
            if key in self._cached:
                self._pinned[key] = self._cached.pop(key)

    def unpin(self, hashes: Iterable[bytes]) -> None:
        """Undo a `pin` of these prefixes."""
        for key in hashes:
            if self._pins[key] < 1:
                raise PoolError("a prefix in host memory is unpinned, but it is not pinned")
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
                page = self._pinned.pop(key, None)
                if page is not None:
                    self._cached[key] = page
                    if len(self._cached) > self.cached:
                        self._evict()

    def clear(self) -> None:
        """Forget every prefix, pinned ones too."""
        self.forget([*self._pinned, *self._cached])

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Forget these prefixes, pinned ones too."""
        for key in hashes:
            for stored in (self._pinned, self._cached):
                if key in stored:
                    self._free(key, stored.pop(key))

    def _evict(self) -> None:
        """Take a page from the cached prefix that was used least recently."""
        self._free(*self._cached.popitem(last=False))

    def _free(self, key: bytes, page: int) -> None:
        self._blank.append(page)
        if page in self.promised:  # it has never been here
            self.promised.remove(page)
        elif self.events is not None:
            self.events.removed(key, HOST)

    def hashes_at(self, pages: Collection[int]) -> list[bytes]:
        """The prefixes that these pages hold, or will hold once they are copied."""
        wanted = set(pages)
        return [
            key
            for stored in (self._pinned, self._cached)
            for key, page in stored.items()
            if page in wanted
        ]

    def check(self, pinned: Iterable[Sequence[bytes]] = ()) -> None:
        """Raise `PoolError` unless each page holds one prefix or is blank, and exactly the prefixes
        `pinned` by swapped requests are pinned."""
        held = [*self._pinned.values(), *self._cached.values()]
        pages = sorted([*self._blank, *held])
        if pages != list(range(self.num_pages)) or not self.promised.issubset(held):
            raise PoolError(
                f"host pages are lost or used twice: {self.num_pages} pages,"
                f" {len(pages)} accounted for"
            )
        pins: Counter[bytes] = Counter()
        for hashes in pinned:
            pins.update(hashes)
        if (
            pins != self._pins
            or not self._pinned.keys() <= pins.keys()
            or len(self._cached) > self.cached
        ):
            raise PoolError("host memory pins other prefixes than swapped requests need")
