"""Which pages requests hold and where they come from: the pool, the prefix index, a request's family, host memory. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.cache.pool import PagePool
from jaxllm.cache.prefix import PrefixIndex
from jaxllm.engine.family import Loan, about_to_grow, loan
from jaxllm.engine.ferry import Ferry
from jaxllm.engine.plan import Chunk
from jaxllm.engine.request import Request


@dataclass(frozen=True, slots=True)
class Start:
    """What there is of a waiting request: pages that hold its first `kept` tokens, who lends them when the index does not, and where in
    host memory the pages lie that follow. It needs `fresh` pages of its own; `taken` in all are no longer free then, and `spare` more must
    be free for what its family is about to write."""

    pages: list[int]
    kept: int
    loan: Loan | None
    places: list[int]
    fresh: int
    taken: int
    spare: int


class Holdings:
    """Pages for a scheduler. Unless `shares`, a request finds in index and host memory only what its family has computed."""

    def __init__(self, pool: PagePool, prefix: PrefixIndex | None):
        if prefix is not None:
            pool.attach(prefix)
        self.pool, self.prefix = pool, prefix
        self.ferry: Ferry | None = None
        self.shares = True
        self.copies: list[tuple[int, int]] = []  # of the plan in the making

    def find(self, request: Request, newest: Chunk | None) -> Start:
        """What the request could start from. `newest` is the plan's last chunk, which is not counted as computed yet."""
        pool, tokens = self.pool, request.num_tokens
        pages, kept, offer = self._beginning(request, newest)
        places: list[int] = []
        if self.ferry is not None and request.scored >= request.score_end:
            limit = (tokens - 1) // pool.page_size
            places = self.ferry.offers(request.hashes[len(pages) : limit], bool(request.stored))
        fresh = pool.pages_for(tokens) - len(pages)
        taken = fresh + sum(pool.references(page) == 0 for page in pages)
        spare = 1 + about_to_grow(request.family, tokens) if kept == tokens else 0
        return Start(pages, kept, offer, places, fresh, taken, spare)

    def take(self, request: Request, start: Start) -> None:
        """Give the request all pages of its known tokens, the first of the fresh ones to be filled from host memory."""
        pool, tokens = self.pool, request.num_tokens
        first, last = len(start.pages), len(start.pages) + len(start.places)
        keys = request.hashes[first:last] if start.places else []
        if self.ferry is not None:
            self.ferry.host.keep(keys)  # before pages are handed out, whose contents may need room in host memory
        self.let_go(request)
        pool.share(start.pages)
        request.found = first
        request.pages = start.pages + pool.allocate(start.fresh)
        if self.ferry is not None and start.places:
            self.ferry.load(request, keys, start.places, request.pages[first:last])
        request.kept, request.prefill_end = start.kept + len(start.places) * pool.page_size, tokens
        request.computed = min(request.kept, tokens - 1)
        request.room = tokens if request.kept == tokens else len(request.pages) * pool.page_size
        if start.loan is not None:
            start.loan.lender.room = min(start.loan.lender.room, start.loan.computed)
        if request.num_preemptions == 0:
            self._note_cached(request, start.loan)

    def open(self, request: Request) -> None:
        """Give the request a page of its own for its next token: a new one, or a copy of one that others may read. Raises OutOfPages."""
        pool, pages, index = self.pool, request.pages, request.computed // self.pool.page_size
        held = index < len(pages)
        (fresh,) = pool.allocate(1)
        if held:
            self.copies.append((pages[index], fresh))
            pool.release(pages[index : index + 1])
        pages[index : index + 1] = [fresh]

    def must_open(self, request: Request) -> bool:
        """Whether the request has no page for its next token that it may write."""
        index = request.computed // self.pool.page_size
        return index >= len(request.pages) or not self.pool.writable(request.pages[index])

    def give_back(self, request: Request) -> None:
        """Release the request's pages; its hashes stay, so it may find them again."""
        if self.ferry is not None:
            self.ferry.cancel(request)
        self.pool.release(reversed(request.pages))
        request.pages = []
        request.computed = request.prefill_end = request.kept = request.room = 0

    def store(self, request: Request) -> None:
        """Keep in host memory what the request has computed, from when its pages are handed out until `let_go`."""
        if self.ferry is not None:
            request.stored = request.hashes[: request.computed // self.pool.page_size]
            self.ferry.host.keep(request.stored)

    def store_too(self, request: Request) -> None:
        """The request is a fork of one that waits: host memory keeps for it what it keeps for that one."""
        if self.ferry is not None:
            request.stored = list(request.stored)
            self.ferry.host.keep(request.stored)

    def let_go(self, request: Request) -> None:
        """The request no longer needs what host memory keeps for it."""
        if request.stored and self.ferry is not None:
            self.ferry.host.let_go(request.stored)
            request.stored = []

    def spoiled(self, request: Request) -> set[Request]:
        """Make unfindable whatever the request has computed or found. Returns those to whom some of it is being brought."""
        others: set[Request] = set()
        if self.prefix is not None:
            self.prefix.forget(request.hashes)
        if self.ferry is not None:
            others = self.ferry.awaiting(request.hashes)
            for other in others:
                self.ferry.cancel(other)
            self.ferry.host.forget(request.hashes)
        return others

    def forget_prefixes(self) -> None:
        """Nothing that is not held by a request is found any more. Nothing may be arriving."""
        if self.prefix is not None:
            self.prefix.clear()
        if self.ferry is not None:
            self.ferry.host.clear()

    def reset(self) -> None:
        """Take every page back, whatever was true of it."""
        self.copies = []
        self.pool.reset()
        if self.ferry is not None:
            self.ferry.reset()

    def register(self, request: Request, start: int, end: int) -> None:
        """Make findable the pages that tokens [start, end) of the sequence complete."""
        if self.prefix is None:
            return
        page_size = self.pool.page_size
        first, last = start // page_size, end // page_size
        if first < last:
            self._hash(request, end)
            for i in range(first, last):
                self.prefix.register(request.hashes[i], request.pages[i])

    def _beginning(self, request: Request, newest: Chunk | None) -> tuple[list[int], int, Loan | None]:
        """Pages that hold the start of the request's known tokens, how many tokens, and who lends them when it is not the index.

        A page that is held in part is lent only for reading: where a token is still to be written, whole pages are. What is lent goes
        before what the index finds, since it takes nothing from the pool: so a family holds its prompt once, which searches count on.
        """
        page_size, tokens = self.pool.page_size, request.num_tokens
        offer = loan(request, newest) if request.scored >= request.score_end else None  # what is to be scored must be computed
        if offer is None:
            hits = self._hits(request, newest)
            return hits, len(hits) * page_size, None
        lent = offer.tokens if offer.tokens == tokens else offer.tokens // page_size * page_size
        pages = offer.lender.pages[: self.pool.pages_for(lent)]
        if len(request.hashes) < lent // page_size:
            request.hashes = offer.lender.hashes[: lent // page_size]
        own = self._hits(request, newest)[len(pages) :] if lent < tokens else []
        return pages + own, lent + len(own) * page_size, offer

    def _hits(self, request: Request, newest: Chunk | None) -> list[int]:
        """Pages that hold the start of the request's known tokens, the last token left out.

        Pages that earlier chunks of this very step fill count too: a step writes the KV of all its tokens, layer by layer,
        before it attends. Those of the newest chunk are not registered yet, since it may still be cut; it will not be once
        another request follows, so they are compared by hash here.
        """
        if self.prefix is None:
            return []
        self._hash(request, request.num_tokens)
        if request.scored < request.score_end:
            return []  # what is to be scored must be computed
        page_size = self.pool.page_size
        limit = (request.num_tokens - 1) // page_size
        hits = self.prefix.match(request.hashes, limit)
        if newest is not None and len(hits) >= newest.start // page_size:
            owner, filled = newest.request, (newest.start + newest.length) // page_size
            self._hash(owner, filled * page_size)
            for i in range(len(hits), min(limit, filled)):
                if request.hashes[i] != owner.hashes[i]:
                    break
                hits.append(owner.pages[i])
        return hits

    def _note_cached(self, request: Request, offer: Loan | None) -> None:
        """Count what the index found; a request that starts from its family's pages found what they did."""
        if offer is not None:
            request.num_cached_tokens = offer.lender.num_cached_tokens
        elif self.prefix is not None and self.shares:
            request.num_cached_tokens = request.computed
            self.prefix.count(request.num_tokens, request.computed)

    def _hash(self, request: Request, end: int) -> None:
        """Complete the kept hashes up to token `end`; each page is hashed once in a request's life."""
        start = len(request.hashes) * self.pool.page_size
        if self.prefix is not None and end - start >= self.pool.page_size:
            members = [request] if request.family is None else request.family.members
            owner = None if self.shares else members[0].id
            root = None if request.hashes else self.prefix.root(request.cache_salt, request.adapter, owner)
            self.prefix.extend(request.hashes, request.tokens(start, end), root)
