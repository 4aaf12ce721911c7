"""Slots of the device: which are free, which a beam search holds as one, which request may take one
next, and which run together. Imports no jax."""

from __future__ import annotations

from collections.abc import Iterable

from jaxllm.engine.scheduling.policy import RequestQueue, by_order
from jaxllm.engine.scheduling.request import PromptSharing, Request, Status


class Slots:
    """Assigns `count` slots, of which every so-manieth is of one of `groups` groups.

    A beam search takes all of its slots when its first beam is admitted and gives them back when
    its last beam leaves. So two searches never each hold slots that the other one waits for.

    Attributes:
        turn: the group whose slots run and are assigned now.
    """

    def __init__(self, count: int, groups: int = 1):
        self.count = count
        self._groups = groups
        self.turn = groups - 1
        self.searches: list[PromptSharing] = []  # that hold slots
        # Of each group; the last is assigned next
        self._free = [list(range(count))[group::groups][::-1] for group in range(groups)]

    def next_turn(self) -> int:
        """The turn of the group after."""
        self.turn = (self.turn + 1) % self._groups
        return self.turn

    def of_turn(self, running: Iterable[Request]) -> list[Request]:
        """Those of the running requests whose turn it is."""
        if self._groups == 1:
            return list(running)
        return [r for r in running if r.slot % self._groups == self.turn]

    def arrived(self, running: Iterable[Request]) -> list[Request]:
        """The requests with a prompt to compute whose pages have come, of the first group that has
        some. It is that group's turn."""
        ready = [r for r in running if not r.pages_in_transit and r.computed < r.prefill_end]
        while ready and not self.of_turn(ready):
            self.next_turn()
        return self.of_turn(ready)

    def next_to_admit(self, waiting: RequestQueue) -> Request | None:
        """The waiting request to admit next; None when it must not start yet.

        Usually the first in the queue. A beam whose search holds slots and pages goes before all
        others, because a request of a better rank may need those. Within a search a beam that
        waits for a token lets the others pass, because one of them may have to compute it. While
        pages of a search are in transit none of its beams starts: it will share them.
        """
        beams = [beam for search in self.searches for beam in search.members if _waits(beam)]
        if beams:
            first = min(beams, key=by_order)
        else:
            first = waiting.first
        if not first.is_beam:
            if first.tokens_known:
                return first
            return None
        if any(beam.pages_in_transit for beam in first.siblings):
            return None
        ready = (beam for beam in first.siblings if _waits(beam) and beam.tokens_known)
        return min(ready, key=by_order, default=None)

    def available(self, request: Request, waiting: int) -> bool:
        """Whether there is a slot for the request, one of `waiting`, in the group whose turn it is.
        A group gets no more than its share of all requests while others could run some."""
        search = request.sharing
        free = self._free[self.turn]
        if search is not None and search.active and search.slots:
            return bool(search.spare) and search.spare[-1] % self._groups == self.turn
        needed = 1
        if search is not None and search.slots:
            needed = search.slots
        held = self.count - sum(map(len, self._free))
        own = len(range(self.turn, self.count, self._groups)) - len(free)
        return len(free) >= needed and own * self._groups < held + waiting

    def assign(self, request: Request) -> int:
        """Take a slot for the request."""
        search = request.sharing
        free = self._free[self.turn]
        if search is None or not search.slots:
            return free.pop()
        if not search.active:
            search.spare = [free.pop() for _ in range(search.slots)]
            self.searches.append(search)
        search.active += 1
        return search.spare.pop()

    def unassign(self, request: Request) -> None:
        """Take back the request's slot."""
        search = request.sharing
        if search is None or not search.slots:
            self._free[request.slot % self._groups].append(request.slot)
            return
        search.spare.append(request.slot)
        search.active -= 1
        if not search.active:
            self._free[request.slot % self._groups] += search.spare
            search.spare = []
            self.searches.remove(search)

    def check(self, running: Iterable[Request]) -> None:
        """Raise RuntimeError unless each slot is free, spare or in use, once."""
        running = list(running)
        searches = {
            id(r.sharing): r.sharing for r in running if r.sharing is not None and r.sharing.slots
        }
        if sorted(map(id, self.searches)) != sorted(searches):
            raise RuntimeError(
                f"{len(self.searches)} searches are recorded as holding slots, but"
                f" {len(searches)} do"
            )
        spare = [slot for search in searches.values() for slot in search.spare]
        taken = spare + [request.slot for request in running]
        slots = sorted(sum(self._free, taken))
        if slots != list(range(self.count)):
            raise RuntimeError(f"slots are leaked or used twice: {slots}")


def _waits(request: Request) -> bool:
    return request.status is Status.WAITING
