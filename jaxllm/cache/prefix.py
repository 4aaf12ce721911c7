"""Which page holds which prefix: an index from the chained hash of full pages to the page. Imports
no jax.

A page's hash covers the keys of its own tokens (`Prompt.keys`) and, through its parent's hash,
those of every token before it, so equal hashes mean equal KV. The index holds no references: a page
may be in use or free (and then findable until the pool hands it out again).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

from jaxllm.cache.events import KVEvents

MAX_EVICTED = 1 << 16  # hashes of pages that are gone, to tell why they are not found


class PageHasher:
    """The chained hashes of full pages of `page_size` tokens. `start` is where the chains of
    requests without salt and adapter begin; hashers with different starts share no hash."""

    def __init__(self, page_size: int, start: bytes):
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self.start = start
        self._page = hashlib.sha256(b"jaxllm/page/1;parent=")

    def root(self, salt: str | None, adapter: bytes | None, owner: str | None = None) -> bytes:
        """The start of a request's chain. Requests share pages only within one salt and adapter
        identity, and, when the chain has an owner, within one owner."""
        if salt is None and adapter is None and owner is None:
            return self.start
        digest = hashlib.sha256(b"jaxllm/request/1;parent=" + self.start)
        fields = (
            (b"salt", salt and salt.encode()),
            (b"adapter", adapter),
            (b"owner", owner and owner.encode()),
        )
        for name, value in fields:
            digest.update(
                b";%s=none" % name if value is None else b";%s=%d:%s" % (name, len(value), value)
            )
        return digest.digest()

    def extend(self, hashes: list[bytes], keys: Sequence[int], root: bytes | None = None) -> None:
        """Append to `hashes` those of the full pages of tokens with these `keys`, of 32 bits, which
        start where `hashes` ends, or at `root` (by default the one that all requests share)."""
        size = self.page_size
        count = len(keys) // size
        data = memoryview(struct.pack(f"<{count * size}i", *keys[: count * size]))
        parent = hashes[-1] if hashes else root or self.start
        for i in range(count):
            digest = self._page.copy()
            digest.update(parent)
            digest.update(b";tokens=")
            digest.update(data[4 * size * i : 4 * size * (i + 1)])
            parent = digest.digest()
            hashes.append(parent)


class PrefixIndex(PageHasher):
    """Hash → page for full pages of `page_size` tokens.

    `root` identifies the KV (model, dtype, …): indexes with different roots share no hash. A
    request's salt and adapter go into the root of its own chain. `queries` and `hits` count the
    tokens looked up and found, once per request, when it first runs.
    """

    def __init__(self, page_size: int, root: bytes):
        # Every field is tagged and has a fixed or written-down length, so no two different inputs
        # give the same bytes.
        fields = b"jaxllm/root/1;page=%d;id=%d:" % (page_size, len(root)) + root
        super().__init__(page_size, hashlib.sha256(fields).digest())
        self.queries = 0
        self.hits = 0
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._evicted: dict[bytes, None] = {}  # the newest MAX_EVICTED, newest last
        self.events: KVEvents | None = None  # what leaves the index is told there

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        """Whether `page` can be found by its hash."""
        return page in self._hash_of

    @property
    def pages(self) -> dict[int, bytes]:
        """Every findable page with its hash (a copy)."""
        return dict(self._hash_of)

    def match(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """Pages of the longest chain of hits from the start of `hashes`, at most `limit` of them.
        Counts nothing."""
        found = takewhile(self._page_of.__contains__, islice(hashes, limit))
        return [self._page_of[key] for key in found]

    def find(self, key: bytes) -> int | None:
        """The page of this hash. Counts nothing."""
        return self._page_of.get(key)

    def count(self, queries: int, hits: int) -> None:
        """Add to the counters of tokens looked up and found."""
        self.queries += queries
        self.hits += hits

    def register(self, key: bytes, page: int) -> bool:
        """Make `page` findable; returns whether nothing with this hash was. Of two pages with equal
        contents the first stays; a page has one hash until evicted."""
        known = self._hash_of.get(page)
        if known is not None and known != key:
            raise ValueError(
                f"page {page} already holds another prefix; evict it before it is written again"
            )
        if known is not None or key in self._page_of:
            return False
        self._page_of[key] = page
        self._hash_of[page] = key
        return True

    def evict(self, page: int) -> bytes | None:
        """Forget `page`, which is about to be written, and return its hash; None when it is not
        known."""
        key = self._hash_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
            self._remember(key)
            if self.events is not None:
                self.events.removed(key)
        return key

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Forget the pages of these hashes, wherever they are known."""
        for key in hashes:
            page = self._page_of.pop(key, None)
            if page is not None:
                del self._hash_of[page]
                if self.events is not None:
                    self.events.removed(key)

    def clear(self) -> None:
        """Forget every page; pages in use stay with their requests."""
        for key in self._page_of:
            self._remember(key)
        self._page_of.clear()
        self._hash_of.clear()
        if self.events is not None:
            self.events.cleared()

    def was_evicted(self, key: bytes) -> bool:
        """Whether a page with this hash was known and has been evicted, or forgotten with all
        others, not too long ago."""
        return key in self._evicted

    def _remember(self, key: bytes) -> None:
        self._evicted.pop(key, None)
        self._evicted[key] = None
        if len(self._evicted) > MAX_EVICTED:
            del self._evicted[next(iter(self._evicted))]
