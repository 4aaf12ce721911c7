"""Who goes first: the rank of a request, and lines of requests in that order. Imports no jax.

A rank is a number that is fixed when the request arrives; lower goes first, and among equals who
came first. So all requests stand in one total order that never changes, whatever is admitted,
preempted or swapped. That is what keeps the scheduler free of deadlock: the first of those that run
is never preempted.

It also keeps anybody from starving. `priority` is a head start in time: a request ranks as if it
had arrived `HEAD_START` seconds earlier for every doubling of 1 + |priority| (later, when it is
positive). Head starts are bounded, so only requests that arrive within a bounded time can ever get
in front of one that waits.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import itemgetter

from jaxllm.engine.scheduling.request import Request

HEAD_START = 10.0  # seconds

type Policy = Callable[[Request], float]


def fcfs(request: Request) -> float:
    """First come, first served."""
    return 0.0


def priority(request: Request) -> float:
    """By arrival, with a head start for a low `priority`: 10 s for −1, 35 s for −10, 310 s for
    −2³¹, and as much delay for 1, 10, 2³¹."""
    wanted = request.params.priority
    return request.arrival + math.copysign(HEAD_START * math.log2(1 + abs(wanted)), wanted)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}


class RequestQueue:
    """Requests in the order of their `place`, which must not change while they stand in it."""

    def __init__(self) -> None:
        self._order: list[tuple[tuple[float, ...], Request]] = []
        self._members: set[Request] = set()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def __iter__(self) -> Iterator[Request]:
        return map(_request, self._order)

    @property
    def first(self) -> Request:
        """Who is next; raises IndexError when nobody is."""
        return self._order[0][1]

    @property
    def last(self) -> Request:
        """Who has to wait longest; raises IndexError when nobody does."""
        return self._order[-1][1]

    def add(self, request: Request) -> None:
        """Take a place; at the end it costs nothing."""
        insort(self._order, (request.place, request), key=_place)
        self._members.add(request)

    def remove(self, request: Request) -> None:
        """Leave. Raises KeyError when it does not stand here."""
        self._members.remove(request)
        del self._order[bisect_left(self._order, request.place, key=_place)]

    def clear(self) -> None:
        """Everybody leaves."""
        self._order.clear()
        self._members.clear()


_request: Callable[[tuple[tuple[float, ...], Request]], Request] = itemgetter(1)


def _place(entry: tuple[tuple[float, ...], Request]) -> tuple[float, ...]:
    return entry[0]
