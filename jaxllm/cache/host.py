"""Host accounting of the pages that lie in host memory: which prefix each holds, and which must
stay. Imports no jax.

A page comes here when the pool hands out a device page that still held a findable prefix. It is
*kept* while a swapped request stands on it, and *cached* otherwise; cached ones are forgotten least
recently used first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence

from jaxllm.cache.pool import PoolError


class HostTier:
    """Hash → page of `num_pages` pages of host memory. At most `cached` of them hold what nobody
    has asked to keep."""

    def __init__(self, num_pages: int, cached: int):
        if num_pages < 1 or not 0 <= cached <= num_pages:
            raise ValueError(f"a host tier of {num_pages} pages cannot cache {cached} of them")
        self.num_pages, self.cached = num_pages, cached
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._blank = list(range(self.num_pages - 1, -1, -1))
        self._kept: dict[bytes, int] = {}
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        # Hashes that swapped requests stand on, here or not
        self._wanted: Counter[bytes] = Counter()

    @property
    def used(self) -> int:
        """Pages that hold something."""
        return len(self._kept) + len(self._cached)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages of the longest chain of hits from the start of `hashes`."""
        pages: list[int] = []
        used: list[bytes] = []
        for key in hashes:
            page = self._kept.get(key)
            if page is None:
                page = self._cached.get(key)
                if page is None:
                    break
                used.append(key)
            pages.append(page)
        # Without the start of a chain the rest is of no use, so it should go last
        for key in reversed(used):
            self._cached.move_to_end(key)
        return pages

    def save(self, key: bytes) -> int | None:
        """Where to copy a device page to that is about to be overwritten; None when it is here
        already, is not wanted or finds no room."""
        if key in self._cached:
            self._cached.move_to_end(key)  # the device had it in use since
            return None
        wanted = key in self._wanted
        if key in self._kept or not (wanted or self.cached):
            return None
        if (not wanted and len(self._cached) == self.cached) or not self._blank:
            if not self._cached:
                return None
            self._blank.append(self._cached.popitem(last=False)[1])
        page = self._blank.pop()
        (self._kept if wanted else self._cached)[key] = page
        return page

    def keep(self, hashes: Iterable[bytes]) -> None:
        """Hold on to these prefixes, whether they are here or come later, until `let_go` names them
        as often."""
        for key in hashes:
            self._wanted[key] += 1
            if key in self._cached:
                self._kept[key] = self._cached.pop(key)

    def let_go(self, hashes: Iterable[bytes]) -> None:
        """Take back a `keep` of these prefixes."""
        for key in hashes:
            if self._wanted[key] < 1:
                raise PoolError("a prefix in host memory is let go, but nobody keeps it")
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key]
                page = self._kept.pop(key, None)
                if page is not None:
                    self._cached[key] = page
                    if len(self._cached) > self.cached:
                        self._blank.append(self._cached.popitem(last=False)[1])

    def clear(self) -> None:
        """Nothing is found here any more; who keeps a prefix finds nothing."""
        self.forget([*self._kept, *self._cached])

    def forget(self, hashes: Iterable[bytes]) -> None:
        """These prefixes must not be found here again; who keeps one finds nothing."""
        for key in hashes:
            page = self._kept.pop(key, None)
            if page is None:
                page = self._cached.pop(key, None)
            if page is not None:
                self._blank.append(page)

    def at(self, places: Collection[int]) -> list[bytes]:
        """Hashes of what lies, or is to lie, at these places."""
        return [
            key
            for line in (self._kept, self._cached)
            for key, place in line.items()
            if place in places
        ]

    def check(self, kept: Iterable[Sequence[bytes]] = ()) -> None:
        """Raise `PoolError` unless each page holds one prefix or is blank, and what is kept is what
        these swapped requests stand on."""
        pages = sorted([*self._blank, *self._kept.values(), *self._cached.values()])
        if pages != list(range(self.num_pages)):
            raise PoolError(
                f"host pages are lost or used twice: {self.num_pages} pages, {len(pages)} accounted for"
            )
        wanted: Counter[bytes] = Counter()
        for hashes in kept:
            wanted.update(hashes)
        if (
            wanted != self._wanted
            or not self._kept.keys() <= wanted.keys()
            or len(self._cached) > self.cached
        ):
            raise PoolError("host memory keeps other prefixes than swapped requests stand on")
