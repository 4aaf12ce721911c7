"""Slots: who is in which, and which are kept for whom. Imports no jax."""

from __future__ import annotations

from collections.abc import Iterable

from jaxllm.engine.scheduling.request import PromptSharing, Request


class Slots:
    """Hands out `count` slots. The members of a search are given all of its seats at once, when the
    first of them comes in, and give them back together when the last one leaves: so no two searches
    can each hold what the other one waits for."""

    def __init__(self, count: int):
        self.count = count
        self.searching: list[PromptSharing] = []  # searches that hold slots
        self._free = list(range(count - 1, -1, -1))  # the last is handed out next

    def has(self, request: Request) -> bool:
        """Whether the request could come in."""
        family = request.family
        if family is None or not family.seats:
            return bool(self._free)
        return bool(family.spare) if family.seated else len(self._free) >= family.seats

    def take(self, request: Request) -> int:
        """A slot for the request."""
        family = request.family
        if family is None or not family.seats:
            return self._free.pop()
        if not family.seated:
            family.spare = [self._free.pop() for _ in range(family.seats)]
            self.searching.append(family)
        family.seated += 1
        return family.spare.pop()

    def give(self, request: Request) -> None:
        """Take back the slot that the request is in."""
        family = request.family
        if family is None or not family.seats:
            self._free.append(request.slot)
            return
        family.spare.append(request.slot)
        family.seated -= 1
        if not family.seated:
            self._free += family.spare
            family.spare = []
            self.searching.remove(family)

    def check(self, running: Iterable[Request]) -> None:
        """Raise RuntimeError unless each slot is free, kept or in use, once."""
        running = list(running)
        families = {
            id(r.family): r.family for r in running if r.family is not None and r.family.seats
        }
        if sorted(map(id, self.searching)) != sorted(families):
            raise RuntimeError(
                f"{len(self.searching)} searches are said to hold slots, but {len(families)} do"
            )
        kept = [slot for family in families.values() for slot in family.spare]
        slots = sorted(self._free + kept + [request.slot for request in running])
        if slots != list(range(self.count)):
            raise RuntimeError(f"slots are leaked or held twice: {slots}")
