"""Choices of one prompt share its pages: whose pages a request may start from, and how far. Imports
no jax."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jaxllm.cache.pool import PagePool
from jaxllm.engine.scheduling.plan import Chunk
from jaxllm.engine.scheduling.request import PromptSharing, Request, Status


@dataclass(frozen=True, slots=True)
class SharedPages:
    """The first `tokens` tokens of a request are in the pages of `lender`, which has computed
    `computed` in all."""

    lender: Request
    tokens: int
    computed: int


def loan(request: Request, newest: Chunk | None, pools: Sequence[PagePool]) -> SharedPages | None:
    """What the family of a waiting request has most of; None when no running member has computed
    the whole prompt and still has the pages that the request's next token sees. Where a token is
    still to be written, whole pages are lent.

    A step writes the KV of all its tokens before it attends, so what the plan in the making
    computes counts, `newest` included.
    """
    best = None
    for member in request.family.members if request.family is not None else ():
        if member.status is not Status.RUNNING or member.arriving:
            continue
        computed = (
            member.computed
            if newest is None or newest.request is not member
            else newest.start + newest.length
        )
        if computed < len(request.prompt):
            continue
        tokens = len(request.prompt) + agreeing(
            request.output, member.output, computed - len(request.prompt)
        )
        if tokens < request.num_tokens:
            tokens -= tokens % pools[0].page_size
        position = min(tokens, request.num_tokens - 1)
        if any(
            table.behind > pool.behind(position)
            for pool, table in zip(pools, member.tables, strict=True)
        ):
            continue  # it has gone on, and given them back
        if best is None or tokens > best.tokens:
            best = SharedPages(member, tokens, computed)
        if tokens == request.num_tokens:
            break
    return best


def about_to_grow(family: PromptSharing | None, tokens: int) -> int:
    """How many running members hold no page of their own beyond their first `tokens` tokens: the
    next step of each takes one."""
    members = family.members if family is not None else ()
    return sum(member.status is Status.RUNNING and member.room <= tokens for member in members)


def forked(parent: Request, arrival: int) -> Request:
    """A request in the state of `parent`, with the same pages, which has its place right behind
    it."""
    child = replace(parent, place=(*parent.place[:2], arrival))
    child.tables = tuple(replace(table, pages=list(table.pages)) for table in parent.tables)
    child.output, child.hashes = list(parent.output), list(parent.hashes)
    if parent.status is Status.RUNNING:
        child.room = parent.room = parent.computed
    return child


def whose_turn(waiting: Iterable[Request], searching: Iterable[PromptSharing]) -> Request | None:
    """The first in the queue; but before all others a beam for which its search holds slots and
    pages, which somebody of a better rank may wait for. While it waits for a token, which another
    beam of its search may have to be computed for, that one. Nobody, while pages of its search are
    on their way, which it will share."""
    beams = [
        beam for family in searching for beam in family.members if beam.status is Status.WAITING
    ]
    first = min(beams, key=_place) if beams else next(iter(waiting))
    if not first.searches or first.family is None:
        return first if told(first) else None
    if any(member.arriving for member in first.family.members):
        return None
    ready = (
        member
        for member in first.family.members
        if member.status is Status.WAITING and told(member)
    )
    return min(ready, key=_place, default=None)


def awaited(request: Request) -> bool:
    """Whether other beams of its search hold slots and pages until the request has run."""
    return request.family is not None and request.family.seated > 0


def told(request: Request) -> bool:
    """Whether the host knows every token that was drawn for the request: none is in flight or
    undecided."""
    return request.num_scheduled_outputs == len(request.output)


def _place(request: Request) -> tuple[float, ...]:
    return request.place


def agreeing(one: list[int], other: list[int], most: int) -> int:
    """How many tokens two outputs have in common at their start, at most `most`."""
    length = min(len(one), len(other), most)
    if one[:length] == other[:length]:
        return length
    return next(i for i in range(length) if one[i] != other[i])
