"""The order of requests: their rank, and queues in that order. Imports no jax.

A rank is a number that is fixed when the request arrives. Lower ranks go first; arrival decides
among equals. So all requests stand in one total order, which no admission, preemption or swap
changes. This order keeps the scheduler free of deadlock: the first running request is
never preempted.

It also prevents starvation. `priority` is a head start in time: a request ranks as if it had
arrived `HEAD_START` seconds earlier for every doubling of 1 + |priority| (later, when it is
positive). Head starts are bounded, so only requests that arrive within a bounded time can pass one
that waits.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from jaxllm.engine.scheduling.request import Request

HEAD_START = 10.0  # seconds

type Policy = Callable[[Request], float]


def fcfs(request: Request) -> float:
    """First come, first served."""
    return 0.0


def priority(request: Request) -> float:
    """By arrival, with a head start for a low `priority`: 10 s for −1, 35 s for −10, 310 s for
    −2³¹, and as much delay for 1, 10, 2³¹."""
    level = request.params.priority
    return request.arrival + math.copysign(HEAD_START * math.log2(1 + abs(level)), level)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}

by_order: Callable[[Request], tuple[float, ...]] = attrgetter("order")


class RequestQueue:
    """Requests sorted by `Request.order`, which must not change while they are in it."""

    def __init__(self) -> None:
        self._sorted: list[Request] = []
        self._members: set[Request] = set()

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def __iter__(self) -> Iterator[Request]:
        return iter(self._sorted)

    @property
    def first(self) -> Request:
        """The first in the order. Raises IndexError when the queue is empty."""
        return self._sorted[0]

    @property
    def last(self) -> Request:
        """The last in the order. Raises IndexError when the queue is empty."""
        return self._sorted[-1]

    def insert(self, request: Request) -> None:
        """Put a request into its place; cheap when that is the last."""
        insort(self._sorted, request, key=by_order)
        self._members.add(request)

    def remove(self, request: Request) -> None:
        """Take a request out. Raises KeyError when it is not in the queue."""
        self._members.remove(request)
        del self._sorted[bisect_left(self._sorted, request.order, key=by_order)]

    def pop_all(self) -> list[Request]:
        """Take every request out. Returns them in order."""
        taken = self._sorted
        self._sorted = []
        self._members.clear()
        return taken
