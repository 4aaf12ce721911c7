"""Pages between the pool and host memory: what each plan saves, fetches and puts back. Imports no
jax.

The device runs a plan's moves before its step, saves first. So a page can be handed out in the very
plan that saves its contents. A page comes back in two plans: one fetches it to the device, and one
puts it into the pool when the copy is there, so that the copy runs beside steps and none waits for
it. Requests wait for their pages with slot and pages already assigned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from jaxllm.cache.host import HostTier
from jaxllm.cache.prefix import PrefixIndex
from jaxllm.engine.scheduling.cache_events import tell_stored
from jaxllm.engine.scheduling.plan import Moves
from jaxllm.engine.scheduling.request import Request


class _Transfer(NamedTuple):
    """A page on its way to the device: that with this number of the sequence of each of `requests`,
    which have the same pages up to this one and wait for it. The host tier pins it until it is
    there."""

    requests: list[Request]
    number: int
    key: bytes
    host_page: int
    page: int


class Link(NamedTuple):
    """Seconds that it takes to fetch pages and put them into the pool.

    Attributes:
        width: Pages that one program puts at most.
        program: Seconds of a program beside those of its pages.
        page: Seconds of each page.
    """

    width: int = 1
    program: float = 0.0
    page: float = 0.0

    @staticmethod
    def measured(width: int, one: float, full: float) -> Link:
        """From the seconds of one page and of `width` pages."""
        if width > 1:
            page = max(0.0, full - one) / (width - 1)
        else:
            page = full
        return Link(width, max(0.0, full - width * page), page)

    def seconds(self, pages: int) -> float:
        """Seconds of `pages` pages."""
        return -(-pages // self.width) * self.program + pages * self.page


class OffloadManager:
    """Moves pages for a scheduler; a plan fetches at most `max_fetches`.

    A cached prefix is fetched when that takes less time than computing it, as measured: `link`
    against `compute_seconds` of one page. Pages of a swapped request are always fetched, and those
    that were promised to a request as soon as they are there.

    Attributes:
        fetches_done: whether the device has what was fetched, as the engine knows.
    """

    def __init__(self, host: HostTier, index: PrefixIndex, max_fetches: int):
        self.host = host
        self.index = index
        self.max_fetches = max_fetches
        self.link = Link()
        self.compute_seconds = float("inf")
        self.fetches_done: Callable[[], bool] = lambda: True
        self.forget_all()

    def forget_all(self) -> None:
        """Forget everything that is stored or in transit."""
        self.host.reset()
        self._pending: deque[_Transfer] = deque()  # not fetched yet
        self._fetched: list[_Transfer] = []  # by one plan before, and on their way
        self._transfers: dict[bytes, _Transfer] = {}  # both of these, by hash
        self._ready: list[_Transfer] = []  # put into the pool by the plan in the making
        self._fetches: list[int] = []
        self._saves: list[tuple[int, int]] = []

    def save_evicted(self, key: bytes, page: int) -> None:
        """Save `page`, which held the prefix `key` and is being handed out.

        A page that this plan puts into the pool has no contents yet. It is not saved: its prefix is
        pinned in host memory until then, which stores no prefix twice.
        """
        host_page = self.host.save(key)
        if host_page is not None:
            self._saves.append((page, host_page))

    def promise(self, request: Request, hashes: list[bytes]) -> dict[bytes, int]:
        """Pin for a new request what host memory has of these prefixes, which depend on each other,
        or gets from elsewhere. Returns the host pages of those that must come, by hash."""
        promised, pinned = self.host.promise(hashes)
        request.pinned = hashes[:pinned]
        return promised

    def pin(self, request: Request, hashes: Sequence[bytes]) -> None:
        """Keep these prefixes for a waiting request until `unpin`, if they are there or come
        there."""
        request.pinned = list(hashes)
        self.host.pin(hashes)

    def unpin(self, request: Request) -> None:
        """Undo `pin`, or `promise`."""
        if request.pinned:
            self.host.unpin(request.pinned)
            request.pinned = []

    def lookup(self, hashes: Sequence[bytes], swapped: bool) -> list[int]:
        """Host pages of the longest stored prefix of `hashes`. Unless the request was `swapped` out
        or waits for what was promised: none when computing it is faster, and none without
        contents."""
        found = self.host.find(hashes)
        if swapped:
            return found
        found = list(takewhile(lambda page: page not in self.host.promised, found))
        faster = self.link.seconds(len(found)) < len(found) * self.compute_seconds
        if faster:
            return found
        return []

    def in_transit(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages that the longest run of `hashes`, from the first on, is on its way to."""
        run = takewhile(lambda transfer: transfer is not None, map(self._transfers.get, hashes))
        return [transfer.page for transfer in run if transfer is not None]

    def join(self, request: Request, hashes: Sequence[bytes]) -> None:
        """Let the request wait for pages that are on their way for others; it holds them too."""
        for key in hashes:
            self._transfers[key].requests.append(request)
        request.pages_in_transit += len(hashes)

    def enqueue(self, request: Request, first: int, host_pages: Sequence[int]) -> None:
        """Bring host pages, which the caller has pinned, to the request's pages from number `first`
        on."""
        request.pages_in_transit += len(host_pages)
        for i, host_page in enumerate(host_pages, first):
            new = _Transfer([request], i, request.hashes[i], host_page, request.pages[i])
            self._pending.append(new)
            self._transfers.setdefault(new.key, new)

    def fetch_pending(self) -> None:
        """Fetch pending pages that host memory has, as many as a plan may, unless others are on
        their way."""
        if self._fetched:
            return
        later: list[_Transfer] = []
        while self._pending and len(self._fetches) < self.max_fetches:
            transfer = self._pending.popleft()
            if transfer.host_page in self.host.promised:
                later.append(transfer)
                continue
            self._fetched.append(transfer)
            self._fetches.append(transfer.host_page)
        self._pending.extendleft(reversed(later))

    def put_fetched(self, waits: bool) -> None:
        """Put fetched pages into the pool; from now on the index finds them. Nothing happens before
        they are there, unless the device `waits` for them as it has nothing else to do."""
        if not (waits or self.fetches_done()):
            return
        for transfer in self._fetched:
            self._end(transfer)
            for request in transfer.requests:
                request.pages_in_transit -= 1
            new = self.index.register(transfer.key, transfer.page)
            if self.index.events is not None:
                tell_stored(self.index, transfer.requests[0], transfer.number, [new])
        self._ready += self._fetched
        self._fetched = []

    def flush(self) -> Moves | None:
        """The moves of the plan that was made."""
        puts = tuple((transfer.host_page, transfer.page) for transfer in self._ready)
        moves = Moves(tuple(self._saves), tuple(self._fetches), puts)
        self.host.unpin(transfer.key for transfer in reversed(self._ready))
        self._saves = []
        self._fetches = []
        self._ready = []
        if moves.saves or moves.fetches or moves.puts:
            return moves
        return None

    def cancel(self, request: Request) -> None:
        """Bring the request nothing more: it gives its pages back. What others wait for, too, is
        brought to them."""
        if not request.pages_in_transit:
            return
        request.pages_in_transit = 0
        for transfer in (*self._pending, *self._fetched):
            if request in transfer.requests:
                transfer.requests.remove(request)
                if not transfer.requests:
                    self._end(transfer)
                    self.host.unpin([transfer.key])
        self._pending = deque(t for t in self._pending if t.requests)
        self._fetched = [t for t in self._fetched if t.requests]

    def forget(self, hashes: Iterable[bytes]) -> set[Request]:
        """Forget these prefixes. Returns the requests to which some of them was in transit; they
        are brought nothing more."""
        keys = set(hashes)
        awaited = (t for t in (*self._pending, *self._fetched) if t.key in keys)
        awaiting = {request for transfer in awaited for request in transfer.requests}
        for request in awaiting:
            self.cancel(request)
        self.host.forget(keys)
        return awaiting

    def _end(self, transfer: _Transfer) -> None:
        """Nobody joins it any more."""
        if self._transfers.get(transfer.key) is transfer:
            del self._transfers[transfer.key]

    def check(self, swapped: Iterable[Sequence[bytes]]) -> None:
        """Raise `PoolError` unless host memory pins exactly the prefixes of these swapped requests
        and those in transit."""
        self.host.check([*swapped, [t.key for t in (*self._pending, *self._fetched, *self._ready)]])
