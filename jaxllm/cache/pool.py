"""Host accounting of KV pages: which are held, and which can be handed out. Imports no jax.

A page is *used* (one or more page tables hold it) or *free*. A free page is *blank* or *cached*. A
cached one still holds a prefix that the index can find, and is handed out only when no blank page
is left: LRU, from the longer of two lists (pages of finished requests, pages behind a sliding
window). So one long sequence, which releases many pages that are seldom looked for, does not evict
the prefixes of others.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.cache.prefix import PrefixIndex


class PoolError(RuntimeError):
    """The accounting of pages is broken: a bug, not a condition to handle."""


class OutOfPages(RuntimeError):
    """Fewer pages are free than were requested; none was handed out."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """How long pages live: the layers of a cache group see equally far back, so their pages are
    held and released together.

    Attributes:
        window: Tokens that a token sees, itself included; None: all before it.
        chunk: Tokens of one request that a step computes at most.
        decoded: Tokens of one request that steps in flight and the next one decode at most.
        tile: Keys that a kernel reads at once. Keys before the window in a tile that is partly seen
            have weight 0, but 0 · NaN is NaN, so they must not be another request's either.
    """

    window: int | None = None
    chunk: int = 1
    tile: int = 1
    decoded: int = 1

    def out_of_window(self, position: int, page_size: int) -> int:
        """Pages at the start of a sequence that no token from `position` on reads."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 2 - self.tile) // page_size

    def max_resident(self, num_tokens: int, page_size: int) -> int:
        """Pages that a request of `num_tokens` tokens holds at once, at most."""
        needed = -(-num_tokens // page_size)
        most = max(self.chunk, self.decoded)
        if self.window is None:
            return needed
        return min(needed, self._at_once(most, page_size))

    def decode_bound(self, page_size: int) -> int | None:
        """Pages that a request holds while it decodes, however long it becomes; None: unbounded."""
        if self.window is None:
            return None
        return self._at_once(self.decoded, page_size)

    def _at_once(self, tokens: int, page_size: int) -> int:
        """Pages that hold what a step of `tokens` tokens of a request reads and writes, wherever in
        a page it begins."""
        assert self.window is not None
        return -(-(self.window + self.tile + tokens - 3) // page_size) + 1


class PagePool:
    """Reference counts and free pages of a pool of `num_pages` pages of `page_size` tokens, for one
    cache group.

    `release` a request's pages tail first: the head of a prefix serves more requests, so it should
    be evicted last.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        index: PrefixIndex | None = None,
        lifetime: Lifetime | None = None,
    ):
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"a pool needs at least one page of one token, got {num_pages} pages of {page_size}"
            )
        self.num_pages = num_pages
        if index is not None and index.page_size != page_size:
            raise ValueError(
                f"the prefix index has pages of {index.page_size} tokens, the pool of {page_size}"
            )
        self.page_size = page_size
        self.lifetime = lifetime or Lifetime()
        self.index = index  # decides which released pages stay findable
        # Called with the hash and the number of a findable page that is handed out
        self.on_evict: Callable[[bytes, int], None] | None = None
        self.reset()

    def reset(self) -> None:
        """Take every page back, whatever its state, and forget every prefix."""
        self._references = [0] * self.num_pages
        # A stack: low pages first, then the warmest
        self._blank = list(range(self.num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        # Cached pages behind a sliding window, likewise
        self._behind_window: OrderedDict[int, None] = OrderedDict()
        if self.index is not None:
            self.index.clear()

    @property
    def free(self) -> int:
        """Pages that can be allocated now, cached ones included."""
        return len(self._blank) + len(self._cached) + len(self._behind_window)

    @property
    def usage(self) -> float:
        """Share of the pages that requests hold, 0 to 1."""
        return 1.0 - self.free / self.num_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def max_resident(self, num_tokens: int) -> int:
        """Pages that a request of `num_tokens` tokens holds at once, at most."""
        return self.lifetime.max_resident(num_tokens, self.page_size)

    def out_of_window(self, position: int) -> int:
        """Pages at the start of a sequence that no token from `position` on reads."""
        return self.lifetime.out_of_window(position, self.page_size)

    def references(self, page: int) -> int:
        """Number of page tables that hold `page`; 0 when it is free."""
        return self._references[page]

    def writable(self, page: int) -> bool:
        """Whether the holder of `page` may write it in place: no other table holds it, and the
        index does not find it."""
        return self._references[page] == 1 and (self.index is None or page not in self.index)

    def allocate(self, n: int) -> list[int]:
        """Hand out `n` pages with one reference each, or raise `OutOfPages`. Contents are
        undefined."""
        if n > self.free:
            raise OutOfPages(
                f"{n} KV pages are needed, but {self.free} of {self.num_pages} are free"
            )
        pages = []
        for _ in range(n):
            if self._blank:
                page = self._blank.pop()
            else:
                longer = max(self._behind_window, self._cached, key=len)
                page, _ = longer.popitem(last=False)
                key = None if self.index is None else self.index.evict(page)
                if key is not None and self.on_evict is not None:
                    self.on_evict(key, page)
            self._references[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that another table holds or that the prefix index just found,
        free or used."""
        for page in pages:
            if self._references[page] == 0:
                lru = self._cached if page in self._cached else self._behind_window
                if page not in lru:
                    raise PoolError(
                        f"page {page} is shared, but no table holds it and it is not cached"
                    )
                del lru[page]
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take a reference from each page. Pages without references become free at once, in LRU
        order of the argument."""
        self._release(pages, self._cached)

    def release_out_of_window(self, pages: Iterable[int]) -> None:
        """`release` pages behind the sliding window of a request that continues."""
        self._release(pages, self._behind_window)

    def _release(self, pages: Iterable[int], lru: OrderedDict[int, None]) -> None:
        for page in pages:
            left = self._references[page] - 1
            if left < 0:
                raise PoolError(f"page {page} is released, but no table holds it")
            self._references[page] = left
            if left == 0:
                if self.index is not None and page in self.index:
                    lru[page] = None
                else:
                    self._blank.append(page)

    def occupancy(self, cells: int) -> tuple[int, np.ndarray]:
        """A map of at most `cells` cells: pages per cell, and for each cell, as int [3, cells], the
        pages that tables hold, the cached pages, and the most references to one page."""
        per_cell = -(-self.num_pages // cells)
        references = np.array(self._references)
        cached = np.zeros(self.num_pages, np.int64)
        for lru in (self._cached, self._behind_window):
            cached[list(lru)] = 1
        starts = np.arange(0, self.num_pages, per_cell)
        held = np.add.reduceat((references > 0).astype(np.int64), starts)
        most = np.maximum.reduceat(references, starts)
        return per_cell, np.stack([held, np.add.reduceat(cached, starts), most])

    def check(self, tables: Iterable[Sequence[int]] = ()) -> None:
        """Raise `PoolError` unless references equal the page tables given, each page is used or
        free once, and every findable page is used or cached."""
        held: Counter[int] = Counter()
        for table in tables:
            if len(set(table)) != len(table):
                raise PoolError(f"a page table holds a page twice: {list(table)}")
            held.update(table)
        wrong = {p: (n, held[p]) for p, n in enumerate(self._references) if n != held[p]}
        if wrong or not set(held) <= set(range(self.num_pages)):
            raise PoolError(
                "references differ from page tables, page: (references, tables) ="
                f" {wrong or dict(held)}"
            )
        blank = set(self._blank)
        cached = self._cached.keys() | self._behind_window.keys()
        used = {p for p, n in enumerate(self._references) if n}
        if len(blank | cached) != self.free or (blank | cached) & used:
            twice = sorted(blank & cached | (blank | cached) & used)
            raise PoolError(f"pages are free twice or free and used: {twice}")
        lost = set(range(self.num_pages)) - blank - cached - used
        if lost:
            raise PoolError(f"pages are neither free nor used: {sorted(lost)}")
        if self.index is not None:
            stray = set(self.index.pages) & blank | set(self.index.pages) - set(
                range(self.num_pages)
            )
            if stray:
                raise PoolError(f"the prefix index finds pages that hold nothing: {sorted(stray)}")
