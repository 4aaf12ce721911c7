"""What one step will run: frozen, made by the scheduler, free of devices and text."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.engine.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + length) of one request's sequence; `final` when a token is sampled
    after it."""

    request: Request
    start: int
    length: int
    final: bool


@dataclass(frozen=True, slots=True)
class Moves:
    """What travels between the pool and host memory before a step, in this order: pages that leave
    (page, place), places to be fetched to the device, and (place, page) of those that are put into
    the pool, which this plan or the one before has fetched."""

    saves: tuple[tuple[int, int], ...]
    fetches: tuple[int, ...]
    puts: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Traffic:
    """Pages that have come to host memory, and that were put into the pool from it, since the
    engine's start."""

    saved: int = 0
    loaded: int = 0


class TableWrite(NamedTuple):
    """An entry of a page table on the device: page `column` of the request in `slot` is `page`."""

    slot: int
    column: int
    page: int
    group: int  # the cache group whose table this is


@dataclass(frozen=True)
class Plan:
    """One step, in the order in which the device runs it.

    Attributes:
        decodes: Requests that run one token each.
        positions: Where decode i writes its KV, in tokens.
        chunks: Parts of prompts. A chunk carries the whole page table of its request.
        preempted: Requests that went back to the queue for this plan.
        copies: Pages copied before anything is computed, in order: (source, target, cache group).
        table_writes: Pages that the decodes were given, at most one per decode and cache group.
        moves: Transfers between pool and host memory, before the copies.
    """

    decodes: tuple[Request, ...]
    positions: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    preempted: tuple[Request, ...] = ()
    copies: tuple[tuple[int, int, int], ...] = ()
    table_writes: tuple[TableWrite, ...] = ()
    moves: Moves | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.length for chunk in self.chunks)

    @functools.cached_property
    def emitters(self) -> list[Request | None]:
        """Per row of a collected step: the request that gets a token, or None for a chunk that is
        not its prompt's last."""
        return [*self.decodes, *(chunk.request if chunk.final else None for chunk in self.chunks)]

    @functools.cached_property
    def asking(self) -> tuple[Request, ...]:
        """Those who get a token and ask for more than the sampler does."""
        return tuple(
            [
                request
                for request in self.emitters
                if request is not None and request.asked is not None
            ]
        )

    @property
    def slots(self) -> tuple[int, ...]:
        """Of each decode."""
        return tuple([request.slot for request in self.decodes])

    def begun(self, now: float) -> None:
        """Tell the requests of its chunks since when they run, and how much of their prompts is
        scored with this step."""
        for chunk in self.chunks:
            request = chunk.request
            request.scheduled_at = request.scheduled_at or now
            request.scored = max(request.scored, min(chunk.start + chunk.length, request.score_end))

    @property
    def empty(self) -> bool:
        """Whether nothing is computed; there may be moves."""
        return not self.decodes and not self.chunks


@dataclass(frozen=True, slots=True)
class Span:
    """Prompt positions [start, stop) to be scored; `row` is that of the first one among the step's
    chunk tokens."""

    request: Request
    start: int
    stop: int
    row: int


def spans(plan: Plan) -> list[Span]:
    """What a step computes of prompts whose log-probabilities are wanted, without what an earlier
    step has scored."""
    found: list[Span] = []
    row = 0
    for chunk in plan.chunks:
        request = chunk.request
        start, stop = (
            max(chunk.start, request.scored),
            min(chunk.start + chunk.length, request.score_end),
        )
        if start < stop:
            found.append(Span(request, start, stop, row + start - chunk.start))
        row += chunk.length
    return found
