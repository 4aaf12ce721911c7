"""What one step runs, and its limits: free of devices and text. Imports no jax."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from jaxllm.engine.scheduling.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one step and one request.

    Attributes:
        max_num_seqs: Slots.
        max_num_batched_tokens: Tokens of a step, decodes included.
        max_model_len: Tokens of a sequence.
        groups: Groups of slots that steps take in turn: one for each stage of a pipeline.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    groups: int = 1

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Decode(msgspec.Struct, frozen=True, gc=False):  # made for every row of every step
    """A request's row of a step that continues its output.

    Its inputs are the last token drawn for the request and `count - 1` drafts of the tokens that
    follow. The step draws a token behind each input, up to the first that is not the next draft. So
    it gives `count` tokens at most, and one at least unless the row has ended.

    Attributes:
        request: Whose row it is.
        first: Position of its first input, whose KV it writes. Where steps in flight have drafts,
            the least: later by as many of these as are accepted.
        count: Inputs.
    """

    request: Request
    first: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of one request's sequence; `final` when a token is sampled after it."""

    request: Request
    start: int
    length: int
    final: bool

    @property
    def end(self) -> int:
        """The token after it."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Moves:
    """Transfers between the pool and host memory before a step, in the order of the fields.

    Attributes:
        saves: (page, host page) of pages that are copied to host memory.
        fetches: Host pages that are copied to the device, beside the pool.
        puts: (host page, page) of fetched pages that are written into the pool; this plan or the
            one before has fetched them.
    """

    saves: tuple[tuple[int, int], ...]
    fetches: tuple[int, ...]
    puts: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Traffic:
    """Pages saved to host memory and loaded from it since the engine's start."""

    saved: int = 0
    loaded: int = 0


class PageCopy(NamedTuple):
    """The contents of page `source` of a cache group are copied to page `target`."""

    source: int
    target: int
    group: int


class TableWrite(NamedTuple):
    """An entry of a page table on the device: page `column` of the request in `slot` is `page`."""

    slot: int
    column: int
    page: int
    group: int  # the cache group whose table this is


@dataclass(frozen=True)
class Plan:
    """One step.

    Attributes:
        decodes: Rows of requests that continue their output.
        chunks: Parts of prompts. A chunk carries the whole page table of its request.
        preempted: Requests that went back to the queue for this plan.
        copies: Pages to copy before anything is computed, in this order.
        table_writes: Pages that the decodes were given; of each one and cache group at most
            `pages_of_decode` of the most inputs that the engine's decodes have.
        moves: Transfers between pool and host memory, before the copies.
        group: Of the slots that run.
        drafts: Drafts that its decodes have, in all: their inputs beyond one each.
    """

    decodes: tuple[Decode, ...]
    chunks: tuple[Chunk, ...]
    preempted: tuple[Request, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    table_writes: tuple[TableWrite, ...] = ()
    moves: Moves | None = None
    group: int = 0
    drafts: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that it computes."""
        return len(self.decodes) + self.drafts + sum([chunk.length for chunk in self.chunks])

    @functools.cached_property
    def emitters(self) -> list[Request | None]:
        """The request that gets tokens, per row of a collected step; None for a chunk that is not
        its prompt's last."""
        rows: list[Request | None] = [decode.request for decode in self.decodes]
        rows += [chunk.request if chunk.final else None for chunk in self.chunks]
        return rows

    @functools.cached_property
    def processed_requests(self) -> tuple[Request, ...]:
        """Requests that get tokens and have logits options."""
        return tuple(
            [
                request
                for request in self.emitters
                if request is not None and request.logits_options is not None
            ]
        )

    @functools.cached_property
    def slots(self) -> tuple[int, ...]:
        """The slot of each decode."""
        return tuple([decode.request.slot for decode in self.decodes])

    def mark_started(self, now: float) -> None:
        """Note in the requests of its chunks when they were scheduled, and which prompt positions
        this step scores."""
        for chunk in self.chunks:
            request = chunk.request
            request.scheduled_at = request.scheduled_at or now
            request.scored = max(request.scored, min(chunk.end, request.score_end))

    @property
    def empty(self) -> bool:
        """Whether nothing is computed; there may be moves."""
        return not self.decodes and not self.chunks


def pages_of_decode(most_inputs: int, page_size: int) -> int:
    """Pages of a cache group that a plan gives a decode at most, where the engine's decodes have
    `most_inputs` inputs or fewer: new ones, and a copy of a page that others may read.

    Before, its request has pages for all `computed` tokens, so new ones hold its own inputs only.
    Others read tokens before `first` at most, so of its pages from there on they hold that of
    `first` or none. Without drafts `first` is `computed`, whose page is either new or copied. Where
    the engine has drafts, both may be needed for a single input: with drafts in flight `first` lies
    before `computed`, perhaps in a page before.
    """
    if most_inputs == 1:
        return 1
    return 1 + -(-most_inputs // page_size)


@dataclass(frozen=True, slots=True)
class Span:
    """Prompt positions [start, stop) to be scored; `row` is that of the first one among the step's
    chunk tokens."""

    request: Request
    start: int
    stop: int
    row: int


def spans(plan: Plan) -> list[Span]:
    """Prompt positions of a plan whose log-probabilities are wanted and not scored yet."""
    found: list[Span] = []
    row = 0
    for chunk in plan.chunks:
        request = chunk.request
        start = max(chunk.start, request.scored)
        stop = min(chunk.end, request.score_end)
        if start < stop:
            found.append(Span(request, start, stop, row + start - chunk.start))
        row += chunk.length
    return found
