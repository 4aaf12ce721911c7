"""Host accounting of KV pages: who holds which, and which can be handed out. Imports no jax.

A page is *used* (one or more page tables hold it) or *free*. A free page is *blank* or *cached*: a
cached one still holds a prefix that the index can find, and is handed out only when no blank page
is left: least recently released first, of those that requests had to the end or of those that they
gave back behind a window, whichever are more. So one long sequence, which gives back many pages
that few will look for, leaves others theirs; and what many look for in the midst of theirs can
stay, too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jaxllm.cache.prefix import PrefixIndex


class PoolError(RuntimeError):
    """The accounting of pages is broken: a bug, not a condition to handle."""


class OutOfPages(RuntimeError):
    """Fewer pages are free than were asked for; nothing was handed out."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers whose attention sees equally far back: their pages are held and given back together.

    `window` counts the tokens that a token sees, itself included; None: all before it. `chunk` is
    how many tokens of one request a step computes at most. A kernel reads keys `tile` at a time:
    what lies before the window in a tile that is partly seen has weight 0, but 0 · NaN is NaN, so
    it must not be another request's either.
    """

    window: int | None = None
    chunk: int = 1
    tile: int = 1

    def behind(self, position: int, page_size: int) -> int:
        """Pages at the start of a sequence that no token from `position` on reads."""
        return (
            0
            if self.window is None
            else max(0, position - self.window + 2 - self.tile) // page_size
        )

    def most(self, num_tokens: int, page_size: int) -> int:
        """Pages that a request of `num_tokens` tokens holds at once, at most."""
        needed = -(-num_tokens // page_size)
        return needed if self.window is None else min(needed, self._at_once(self.chunk, page_size))

    def steady(self, page_size: int) -> int | None:
        """Pages that a request holds while it generates, however long it becomes; None: there is no
        limit.
        """
        return None if self.window is None else self._at_once(1, page_size)

    def _at_once(self, tokens: int, page_size: int) -> int:
        """Pages that hold what a step of so many tokens of a request reads and writes, wherever in
        a page it begins."""
        assert self.window is not None
        return -(-(self.window + self.tile + tokens - 3) // page_size) + 1


class PagePool:
    """Reference counts and free pages of a pool of `num_pages` pages of `page_size` tokens, for the
    layers of one kind.

    `release` a request's pages tail first: the head of a prefix serves more requests, so it should
    be evicted last.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        index: PrefixIndex | None = None,
        kind: Kind | None = None,
    ):
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"a pool needs at least one page of one token, got {num_pages} pages of {page_size}"
            )
        self.num_pages = num_pages
        if index is not None and index.page_size != page_size:
            raise ValueError(
                f"the prefix index counts pages of {index.page_size} tokens, the pool of {page_size}"
            )
        self.page_size = page_size
        self.kind = kind or Kind()
        self.index = index  # which decides which released pages stay findable
        # Told of a findable page that is handed out, and of its hash
        self.evicted: Callable[[bytes, int], None] | None = None
        self.reset()

    def reset(self) -> None:
        """Take every page back, whatever was true of it, and forget every prefix."""
        self._references = [0] * self.num_pages
        # A stack: low pages first, then the warmest
        self._blank = list(range(self.num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        # Cached pages that were given back behind a window, likewise
        self._passed: OrderedDict[int, None] = OrderedDict()
        if self.index is not None:
            self.index.clear()

    @property
    def free(self) -> int:
        """Pages that can be allocated now, cached ones included."""
        return len(self._blank) + len(self._cached) + len(self._passed)

    @property
    def usage(self) -> float:
        """Share of the pages that requests hold, 0 to 1."""
        return 1.0 - self.free / self.num_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def most(self, num_tokens: int) -> int:
        """Pages that a request of `num_tokens` tokens holds at once, at most."""
        return self.kind.most(num_tokens, self.page_size)

    def behind(self, position: int) -> int:
        """Pages at the start of a sequence that no token from `position` on reads."""
        return self.kind.behind(position, self.page_size)

    def references(self, page: int) -> int:
        """How many page tables hold `page`; 0 when it is free."""
        return self._references[page]

    def writable(self, page: int) -> bool:
        """Whether the one holder of `page` may write it in place: nobody else holds it and the
        index does not find it."""
        return self._references[page] == 1 and (self.index is None or page not in self.index)

    def allocate(self, n: int) -> list[int]:
        """Hand out `n` pages with one reference each, or raise `OutOfPages`. Contents are
        undefined."""
        if n > self.free:
            raise OutOfPages(f"{n} KV pages wanted, {self.free} of {self.num_pages} are free")
        pages = []
        for _ in range(n):
            if self._blank:
                page = self._blank.pop()
            else:
                more = self._passed if len(self._passed) >= len(self._cached) else self._cached
                page, _ = more.popitem(last=False)
                key = None if self.index is None else self.index.evict(page)
                if key is not None and self.evicted is not None:
                    self.evicted(key, page)
            self._references[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that another table holds or that the prefix index just found,
        free or used."""
        for page in pages:
            if self._references[page] == 0:
                line = self._cached if page in self._cached else self._passed
                if page not in line:
                    raise PoolError(
                        f"page {page} is shared, but nobody holds it and it is not cached"
                    )
                del line[page]
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take a reference from each page; those without any become free at once, the last one
        named most recent."""
        self._release(pages, self._cached)

    def release_behind(self, pages: Iterable[int]) -> None:
        """`release` pages that lie behind the window of a request which goes on."""
        self._release(pages, self._passed)

    def _release(self, pages: Iterable[int], line: OrderedDict[int, None]) -> None:
        for page in pages:
            left = self._references[page] - 1
            if left < 0:
                raise PoolError(f"page {page} is released, but nobody holds it")
            self._references[page] = left
            if left == 0:
                if self.index is not None and page in self.index:
                    line[page] = None
                else:
                    self._blank.append(page)

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
                f"references differ from page tables, page: (references, tables) = {wrong or dict(held)}"
            )
        blank, cached = set(self._blank), self._cached.keys() | self._passed.keys()
        used = {p for p, n in enumerate(self._references) if n}
        if len(blank | cached) != self.free or (blank | cached) & used:
            raise PoolError(
                f"pages are free twice or free and used: {sorted(blank & cached | (blank | cached) & used)}"
            )
        lost = set(range(self.num_pages)) - blank - cached - used
        if lost:
            raise PoolError(f"pages are neither free nor used: {sorted(lost)}")
        if self.index is not None:
            stray = set(self.index.pages) & blank | set(self.index.pages) - set(
                range(self.num_pages)
            )
            if stray:
                raise PoolError(f"the prefix index finds pages that hold nothing: {sorted(stray)}")
