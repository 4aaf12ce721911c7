"""Choices of one prompt share its pages: which member's pages a request may start from. Imports no
jax."""

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


def find_shared_pages(
    request: Request, newest: Chunk | None, pools: Sequence[PagePool]
) -> SharedPages | None:
    """The member that shares most with a waiting request.

    None when no running member has computed the whole prompt and still holds the pages that the
    request's next token sees. Where a token is still to be written, only whole pages are shared. A
    step writes the KV of all its tokens before it attends, so tokens of the plan in the making
    count, those of its chunk `newest` included.
    """
    best = None
    for member in request.sharing.members if request.sharing is not None else ():
        if member.status is not Status.RUNNING or member.pages_in_transit:
            continue
        computed = (
            member.computed
            if newest is None or newest.request is not member
            else newest.start + newest.length
        )
        if computed < len(request.prompt):
            continue
        tokens = len(request.prompt) + common_length(
            request.output, member.output, computed - len(request.prompt)
        )
        if tokens < request.num_tokens:
            tokens -= tokens % pools[0].page_size
        position = min(tokens, request.num_tokens - 1)
        if any(
            table.out_of_window > pool.out_of_window(position)
            for pool, table in zip(pools, member.tables, strict=True)
        ):
            continue  # its window has moved on, and it has given them back
        if best is None or tokens > best.tokens:
            best = SharedPages(member, tokens, computed)
        if tokens == request.num_tokens:
            break
    return best


def members_needing_pages(sharing: PromptSharing | None, tokens: int) -> int:
    """How many running members have no page of their own beyond their first `tokens` tokens, and
    so take one in their next step."""
    members = sharing.members if sharing is not None else ()
    return sum(member.status is Status.RUNNING and member.capacity <= tokens for member in members)


def forked_from(parent: Request, arrival: int) -> Request:
    """A request in the state of `parent`, with the same pages, right behind it in the order."""
    child = replace(parent, order=(*parent.order[:2], arrival))
    child.tables = tuple(replace(table, pages=list(table.pages)) for table in parent.tables)
    child.output, child.hashes = list(parent.output), list(parent.hashes)
    if parent.status is Status.RUNNING:
        child.capacity = parent.capacity = parent.computed
    return child


def next_to_admit(waiting: Iterable[Request], searches: Iterable[PromptSharing]) -> Request | None:
    """The waiting request to admit next; None when it must not start yet.

    Usually the first in the queue. A beam whose search holds slots and pages goes before all
    others, because a request of a better rank may need those. Within a search a beam that waits
    for a token lets the others pass, because one of them may have to compute it. While pages of a
    search are in transit none of its beams starts: it will share them.
    """
    beams = [beam for search in searches for beam in search.members if _waits(beam)]
    first = min(beams, key=_order) if beams else next(iter(waiting))
    if not first.is_beam or first.sharing is None:
        return first if tokens_known(first) else None
    if any(member.pages_in_transit for member in first.sharing.members):
        return None
    ready = (member for member in first.sharing.members if _waits(member) and tokens_known(member))
    return min(ready, key=_order, default=None)


def holds_search_slots(request: Request) -> bool:
    """Whether other beams of its search hold slots and pages until the request has run."""
    return request.sharing is not None and request.sharing.active > 0


def tokens_known(request: Request) -> bool:
    """Whether the host knows every token drawn for the request: none is in flight or undecided."""
    return request.num_scheduled_outputs == len(request.output)


def common_length(one: list[int], other: list[int], limit: int) -> int:
    """Length of the longest common prefix of two outputs, at most `limit`."""
    length = min(len(one), len(other), limit)
    if one[:length] == other[:length]:
        return length
    return next(i for i in range(length) if one[i] != other[i])


def _waits(request: Request) -> bool:
    return request.status is Status.WAITING


def _order(request: Request) -> tuple[float, ...]:
    return request.order
