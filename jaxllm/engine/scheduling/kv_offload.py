"""What plans move between the pool and host memory. Imports no jax.

The order of the device's work makes it simple: a plan's moves run before its step, first the pages
that leave, then those that come. So a page can be handed out in the very plan that saves what it
held. Pages that come are fetched to the device by one plan and put into the pool by the next, so
that the copy runs beside a step; their requests wait for them with slot and pages in hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxllm.cache.host import HostTier
from jaxllm.cache.prefix import PrefixIndex
from jaxllm.engine.scheduling.plan import Moves
from jaxllm.engine.scheduling.request import Request


class _Transfer(NamedTuple):
    """A page on its way to the device. Until it is there the host tier keeps it."""

    request: Request
    key: bytes
    place: int  # in host memory
    page: int


class Link(NamedTuple):
    """What it takes to fetch pages and put them into the pool: seconds of every program, which puts
    `width` pages at most, and of each page."""

    width: int = 1
    program: float = 0.0
    page: float = 0.0

    @staticmethod
    def measured(width: int, one: float, full: float) -> Link:
        """From what one page takes and what `width` pages take."""
        page = max(0.0, full - one) / (width - 1) if width > 1 else full
        return Link(width, max(0.0, full - width * page), page)

    def seconds(self, pages: int) -> float:
        """Of so many pages."""
        return -(-pages // self.width) * self.program + pages * self.page


class OffloadManager:
    """Moves pages for a scheduler; a plan fetches at most `seats` of them. What `link` says and
    `compute_seconds` of one page, as measured, decide whether a cached prefix is fetched or
    computed again; what a swapped request stands on is fetched in any case."""

    def __init__(self, host: HostTier, index: PrefixIndex, seats: int):
        self.host, self.index, self.seats = host, index, seats
        self.link, self.compute_seconds = Link(), float("inf")
        self.reset()

    def reset(self) -> None:
        """Forget everything that is here or under way."""
        self.host.reset()
        self._quay: deque[_Transfer] = deque()  # without a seat yet
        self._aboard: list[_Transfer] = []  # fetched by the plan before
        self._landed: list[_Transfer] = []  # put into the pool by the plan in the making
        self._fetches: list[int] = []
        self._saves: list[tuple[int, int]] = []

    def evicted(self, key: bytes, page: int) -> None:
        """The pool hands out `page`, which held the prefix `key`. A page that lands with this plan
        has nothing to save yet; but that prefix is kept in host memory until then, which takes none
        twice."""
        place = self.host.save(key)
        if place is not None:
            self._saves.append((page, place))

    def offers(self, hashes: Sequence[bytes], swapped: bool) -> list[int]:
        """Where in host memory the pages lie that begin the chain `hashes`, if fetching them is
        worth it.
        """
        found = self.host.find(hashes)
        return (
            found
            if swapped or self.link.seconds(len(found)) < len(found) * self.compute_seconds
            else []
        )

    def load(
        self, request: Request, keys: Sequence[bytes], places: Sequence[int], pages: Sequence[int]
    ) -> None:
        """Bring what lies at `places`, which the host tier must keep for this, to the request's
        pages."""
        request.arriving = len(pages)
        self._quay += [_Transfer(request, *rest) for rest in zip(keys, places, pages, strict=True)]

    def board(self) -> None:
        """Fetch what waits, as far as there are seats in this plan."""
        while self._quay and len(self._fetches) < self.seats:
            cargo = self._quay.popleft()
            self._aboard.append(cargo)
            self._fetches.append(cargo.place)

    def land(self) -> None:
        """Put into the pool what has been fetched; from here on it can be found."""
        for cargo in self._aboard:
            cargo.request.arriving -= 1
            self.index.register(cargo.key, cargo.page)
        self._landed += self._aboard
        self._aboard = []

    def depart(self) -> Moves | None:
        """The moves of the plan that was made."""
        puts = tuple((cargo.place, cargo.page) for cargo in self._landed)
        moves = Moves(tuple(self._saves), tuple(self._fetches), puts)
        self.host.let_go(cargo.key for cargo in reversed(self._landed))
        self._saves, self._fetches, self._landed = [], [], []
        return moves if moves.saves or moves.fetches or moves.puts else None

    def cancel(self, request: Request) -> None:
        """The request gives its pages back: nothing is brought to them any more."""
        if request.arriving:
            self.host.let_go(
                cargo.key for cargo in (*self._quay, *self._aboard) if cargo.request is request
            )
            self._quay = deque(cargo for cargo in self._quay if cargo.request is not request)
            self._aboard = [cargo for cargo in self._aboard if cargo.request is not request]
            request.arriving = 0

    def awaiting(self, hashes: Iterable[bytes]) -> set[Request]:
        """Requests to which one of these prefixes is being brought."""
        keys = set(hashes)
        return {cargo.request for cargo in (*self._quay, *self._aboard) if cargo.key in keys}

    def check(self, swapped: Iterable[Sequence[bytes]]) -> None:
        """Raise `PoolError` unless host memory keeps what these requests stand on and what is under
        way, and nothing else."""
        self.host.check(
            [*swapped, [cargo.key for cargo in (*self._quay, *self._aboard, *self._landed)]]
        )
