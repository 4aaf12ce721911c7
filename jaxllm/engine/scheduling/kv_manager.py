"""Which pages requests hold and where they come from: the pool, the prefix index, a request's
family, host memory. Imports no jax."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from jaxllm.cache.pool import PagePool
from jaxllm.engine.scheduling.kv_offload import OffloadManager
from jaxllm.engine.scheduling.plan import Chunk, TableWrite
from jaxllm.engine.scheduling.prompt_sharing import SharedPages, about_to_grow, loan
from jaxllm.engine.scheduling.request import Request, Table


@dataclass(frozen=True, slots=True)
class Start:
    """What there is of a waiting request: tables with the pages that hold its first `kept` tokens,
    who lends them when the index does not, and where in host memory the pages lie that follow. Of
    each kind it needs `fresh` pages of its own; `taken` in all are no longer free then, and `spare`
    more must be free for what its family is about to write."""

    tables: tuple[Table, ...]
    kept: int
    loan: SharedPages | None
    places: list[int]
    fresh: list[int]
    taken: list[int]
    spare: int


def held_tokens(requests: Iterable[Request], page_size: int) -> tuple[int, int]:
    """Tokens that running requests have or are about to have in the pages that they hold, of the
    first kind, and the places those pages offer."""
    used = places = 0
    for request in requests:
        end, behind = len(request.pages) * page_size, request.tables[0].behind * page_size
        used += min(max(request.computed, request.prefill_end), end) - behind
        places += end - behind
    return used, places


class KVCacheManager:
    """Pages for a scheduler, from a pool for each kind of layers. Unless `shares`, a request finds
    in index and host memory only what its family has computed; unless `keeps_outputs`, pages with
    tokens that were drawn are not findable.

    Pages of layers with a window are given back (`slide`) when a plan is made, as soon as no token
    from `Request.computed` on sees them, and may go to another request of that very plan. The
    device's order makes that right, as for a request that has ended: steps in flight, which may
    still read them, run before the plan's moves and copies, and in the plan's own step the request
    computes no earlier token. `computed` never falls while a request runs.
    """

    def __init__(self, pools: Sequence[PagePool]):
        self.pools, self.page_size = tuple(pools), pools[0].page_size
        self.indexes = tuple(pool.index for pool in pools if pool.index is not None)
        if len(self.indexes) not in (0, len(self.pools)):
            raise ValueError("either every pool of a model has a prefix index or none")
        self.offload: OffloadManager | None = None
        self.shares = True
        self.keeps_outputs = True
        # Of the plan in the making
        self._copies: list[tuple[int, int, int]] = []
        self._table_writes: list[TableWrite] = []

    def find(self, request: Request, newest: Chunk | None) -> Start:
        """What the request could start from. `newest` is the plan's last chunk, which is not
        counted as computed yet."""
        tokens = request.num_tokens
        tables, kept, offer = self._beginning(request, newest)
        places: list[int] = []
        if self.offload is not None and request.scored >= request.score_end:
            limit = (tokens - 1) // self.page_size
            places = self.offload.offers(
                request.hashes[len(tables[0].pages) : limit], bool(request.stored)
            )
        fresh, taken = [], []
        for pool, table in zip(self.pools, tables, strict=True):
            fresh.append(
                min(pool.pages_for(tokens), table.behind + pool.most(tokens)) - len(table.pages)
            )
            taken.append(fresh[-1] + sum(pool.references(page) == 0 for page in table.held))
        spare = 1 + about_to_grow(request.family, tokens) if kept == tokens else 0
        return Start(tables, kept, offer, places, fresh, taken, spare)

    def uncached(self, request: Request) -> int:
        """How many tokens of a waiting request would be computed if it started now."""
        start = self.find(request, None)
        return request.num_tokens - start.kept - len(start.places) * self.page_size

    def take(self, request: Request, start: Start) -> None:
        """Give the request the pages of its known tokens, all or as many as it holds at once, the
        first of the fresh ones to be filled from host memory."""
        tokens, found = request.num_tokens, len(start.tables[0].pages)
        keys = request.hashes[found : found + len(start.places)] if start.places else []
        if self.offload is not None:
            # Before pages are handed out, whose contents may need room in host memory
            self.offload.host.keep(keys)
        self.let_go(request)
        for pool, table, fresh in zip(self.pools, start.tables, start.fresh, strict=True):
            pool.share(table.held)
            table.found = len(table.pages)
            table.pages += pool.allocate(fresh)
        request.tables = start.tables
        if self.offload is not None and start.places:
            self.offload.load(request, keys, start.places, request.pages[found : found + len(keys)])
        request.kept, request.prefill_end = start.kept + len(start.places) * self.page_size, tokens
        request.computed = min(request.kept, tokens - 1)
        request.room = tokens if request.kept == tokens else self._places(request)
        if start.loan is not None:
            start.loan.lender.room = min(start.loan.lender.room, start.loan.computed)
        if request.num_preemptions == 0:
            self._note_cached(request)

    def slide(self, request: Request) -> None:
        """Give back the pages that none of the tokens still to be computed sees."""
        for pool, table in zip(self.pools, request.tables, strict=True):
            behind = pool.behind(request.computed)
            if behind > table.behind:
                # Pages that were looked for once may be again
                found = max(table.behind, min(table.found, behind))
                pool.release(table.pages[table.behind : found])
                pool.release_behind(table.pages[found:behind])
                table.behind = behind

    def wanted(self, request: Request) -> list[int]:
        """Of each kind, how many pages the request must get before its next tokens are computed:
        one for the next token, or in the midst of a prompt as many as it holds at once; and one
        more for a copy where others may read the page of the next token."""
        index, found = request.computed // self.page_size, []
        for pool, table in zip(self.pools, request.tables, strict=True):
            prompt = min(
                pool.pages_for(request.prefill_end), table.behind + pool.most(request.prefill_end)
            )
            shared = index < len(table.pages) and not pool.writable(table.pages[index])
            found.append(
                max(index + 1, prompt) - min(len(table.pages), max(index + 1, prompt)) + shared
            )
        return found

    def open(self, request: Request, wanted: Sequence[int]) -> None:
        """Give the request so many pages of each kind, as `wanted` told: a copy of the page that
        others may read, and new ones. Raises OutOfPages."""
        index, decodes = request.computed // self.page_size, request.computed >= request.prefill_end
        for group, (pool, table, count) in enumerate(
            zip(self.pools, request.tables, wanted, strict=True)
        ):
            fresh, held = pool.allocate(count), len(table.pages)
            written: Sequence[int] = range(held, held + count)
            if fresh and index < held and not pool.writable(table.pages[index]):
                self._copies.append((table.pages[index], fresh[0], group))
                pool.release(table.pages[index : index + 1])
                table.pages[index] = fresh.pop(0)
                written = [index, *written[:-1]]
            table.pages += fresh
            if decodes:  # a chunk carries its request's whole table
                self._table_writes += [
                    TableWrite(request.slot, i, table.pages[i], group) for i in written
                ]
        request.room = self._places(request)

    def planned(self) -> tuple[tuple[tuple[int, int, int], ...], tuple[TableWrite, ...]]:
        """Page copies and table writes since the last call."""
        copies, writes = tuple(self._copies), tuple(self._table_writes)
        self._copies, self._table_writes = [], []
        return copies, writes

    def give_back(self, request: Request) -> None:
        """Release the request's pages; its hashes stay, so it may find them again."""
        if self.offload is not None:
            self.offload.cancel(request)
        if request.tables:  # a request that waits has none
            for pool, table in zip(self.pools, request.tables, strict=True):
                pool.release(reversed(table.held))
            request.tables = ()
        request.computed = request.prefill_end = request.kept = request.room = 0

    def share(self, request: Request) -> None:
        """The request is a fork of one that runs: it holds the same pages."""
        for pool, table in zip(self.pools, request.tables, strict=True):
            pool.share(table.held)

    def store(self, request: Request) -> None:
        """Keep in host memory what the request has computed, from when its pages are handed out
        until `let_go`."""
        if self.offload is not None:
            request.stored = request.hashes[: request.computed // self.page_size]
            self.offload.host.keep(request.stored)

    def store_too(self, request: Request) -> None:
        """The request is a fork of one that waits: host memory keeps for it what it keeps for that
        one."""
        if self.offload is not None:
            request.stored = list(request.stored)
            self.offload.host.keep(request.stored)

    def let_go(self, request: Request) -> None:
        """The request no longer needs what host memory keeps for it."""
        if request.stored and self.offload is not None:
            self.offload.host.let_go(request.stored)
            request.stored = []

    def invalidated(self, request: Request) -> set[Request]:
        """Make unfindable whatever the request has computed or found. Returns those to whom some of
        it is being brought."""
        for index in self.indexes:
            index.forget(request.hashes)
        return self._unfetchable(request.hashes)

    def lost(self, places: Collection[int]) -> set[Request]:
        """Forget what was to be saved to these places in host memory. Returns those to whom some of
        it is being brought."""
        return (
            self._unfetchable(self.offload.host.at(places))
            if self.offload is not None and places
            else set()
        )

    def _unfetchable(self, hashes: Sequence[bytes]) -> set[Request]:
        if self.offload is None:
            return set()
        others = self.offload.awaiting(hashes)
        for other in others:
            self.offload.cancel(other)
        self.offload.host.forget(hashes)
        return others

    def forget_prefixes(self) -> None:
        """Nothing that is not held by a request is found any more. Nothing may be arriving."""
        for index in self.indexes:
            index.clear()
        if self.offload is not None:
            self.offload.host.clear()

    def reset(self) -> None:
        """Take every page back, whatever was true of it."""
        self._copies, self._table_writes = [], []
        for pool in self.pools:
            pool.reset()
        if self.offload is not None:
            self.offload.reset()

    def register(self, request: Request, start: int, end: int) -> None:
        """Make findable the pages that tokens [start, end) of the sequence complete, as far as the
        request still holds them."""
        if not self.keeps_outputs:
            end = min(end, len(request.prompt))
        first, last = start // self.page_size, end // self.page_size
        if first >= last or not self.indexes:
            return
        self._hash(request, end)
        for index, table in zip(self.indexes, request.tables, strict=True):
            for i in range(max(first, table.behind), last):
                index.register(request.hashes[i], table.pages[i])

    def _places(self, request: Request) -> int:
        """Tokens that the request's pages have room for, from the first of the sequence on."""
        return min(len(table.pages) for table in request.tables) * self.page_size

    def _beginning(
        self, request: Request, newest: Chunk | None
    ) -> tuple[tuple[Table, ...], int, SharedPages | None]:
        """Pages that hold the start of the request's known tokens, how many tokens, and who lends
        them when it is not the index.

        A page that is held in part is lent only for reading: where a token is still to be written,
        whole pages are. What is lent goes before what the index finds, since it takes nothing from
        the pool: so a family holds its prompt once, which searches count on.
        """
        tokens = request.num_tokens
        # What is to be scored must be computed
        offer = loan(request, newest, self.pools) if request.scored >= request.score_end else None
        if offer is None:
            count, hits = self._hits(request, newest)
            return hits, count * self.page_size, None
        lender, lent = offer.lender, offer.tokens
        if len(request.hashes) < lent // self.page_size:
            request.hashes = lender.hashes[: lent // self.page_size]
        pages = self.pools[0].pages_for(lent)
        count, hits = self._hits(request, newest) if lent < tokens else (0, ())
        if count <= pages:
            behind = [pool.behind(min(lent, tokens - 1)) for pool in self.pools]
            return (
                tuple(
                    Table(table.pages[:pages], at)
                    for table, at in zip(lender.tables, behind, strict=True)
                ),
                lent,
                offer,
            )
        for own, table in zip(hits, lender.tables, strict=True):
            own.pages[own.behind : pages] = table.pages[own.behind : pages]
        return hits, count * self.page_size, offer

    def _hits(self, request: Request, newest: Chunk | None) -> tuple[int, tuple[Table, ...]]:
        """How many pages of the request's known tokens, the last token left out, there are in every
        kind as far as the tokens after them see, and these pages.

        Pages that earlier chunks of this very step fill count too: a step writes the KV of all its
        tokens, layer by layer, before it attends. Those of the newest chunk are not registered yet,
        since it may still be cut; it will not be once another request follows, so they are compared
        by hash here.
        """
        tables = tuple(Table() for _ in self.pools)
        if not self.indexes:
            return 0, tables
        self._hash(request, request.num_tokens)
        if request.scored < request.score_end:
            return 0, tables  # what is to be scored must be computed
        if newest is not None:
            self._hash(newest.request, newest.start + newest.length)
        count = (request.num_tokens - 1) // self.page_size
        for kind, pool in enumerate(self.pools):
            if pool.kind.window is None:
                tables[kind].pages = self._chain(kind, request, newest, count)
                count = len(tables[kind].pages)
        if any(pool.kind.window is not None for pool in self.pools):
            count = self._within_windows(request, newest, count)
            for kind, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
                table.behind = pool.behind(count * self.page_size)
                seen = (self._page(kind, request, newest, i) for i in range(table.behind, count))
                table.pages = [0] * table.behind + [page for page in seen if page is not None]
        return count, tables

    def _chain(self, kind: int, request: Request, newest: Chunk | None, limit: int) -> list[int]:
        """Pages of the longest prefix of which every page is there, at most `limit`."""
        hits = self.indexes[kind].match(request.hashes, limit)
        if newest is not None and len(hits) >= newest.start // self.page_size:
            for i in range(len(hits), min(limit, (newest.start + newest.length) // self.page_size)):
                page = self._page(kind, request, newest, i)
                if page is None:
                    break
                hits.append(page)
        return hits

    def _within_windows(self, request: Request, newest: Chunk | None, count: int) -> int:
        """The longest prefix in pages, at most `count`, of which there is in each kind with a
        window what the next token sees."""
        size, hashes = self.page_size, request.hashes
        arriving = (
            range(newest.start // size, (newest.start + newest.length) // size)
            if newest is not None
            else range(0)
        )
        windowed = [kind for kind, pool in enumerate(self.pools) if pool.kind.window is not None]
        turn, settled = 0, 0  # so many kinds in turn agree with `count`
        while settled < len(windowed):
            kind = windowed[turn]
            first, find = self.pools[kind].behind(count * size), self.indexes[kind].find
            # Without the first page none of the others is of use, so where there is nothing a
            # look-up for a window is enough.
            for i in chain(range(first, count)[:1], range(count - 1, first, -1)):
                if find(hashes[i]) is None and not (
                    i in arriving and self._page(kind, request, newest, i) is not None
                ):
                    count, settled = i, 0
                    break
            else:
                settled, turn = settled + 1, (turn + 1) % len(windowed)
        return count

    def _page(self, kind: int, request: Request, newest: Chunk | None, i: int) -> int | None:
        """Which page holds page i of the request's tokens, or will after this step."""
        page = self.indexes[kind].find(request.hashes[i])
        if page is None and newest is not None:
            owner, size = newest.request, self.page_size
            if (
                newest.start // size <= i < (newest.start + newest.length) // size
                and request.hashes[i] == owner.hashes[i]
            ):
                return owner.tables[kind].pages[i]
        return page

    def _note_cached(self, request: Request) -> None:
        """Count what was looked up and found. Of a family only the first one's counts: what the
        others find, it may have computed."""
        family, looked = (
            request.family,
            bool(self.indexes) and self.shares and request.scored >= request.score_end,
        )
        if family is not None and family.found is not None:
            request.num_cached_tokens = family.found
            return
        if looked:
            request.num_cached_tokens = request.computed
            self.indexes[0].count(request.num_tokens, request.computed)
        if family is not None:
            family.found = request.num_cached_tokens

    def _hash(self, request: Request, end: int) -> None:
        """Complete the kept hashes up to token `end`; each page is hashed once in a request's
        life."""
        start = len(request.hashes) * self.page_size
        if self.indexes and end - start >= self.page_size:
            members = [request] if request.family is None else request.family.members
            owner = None if self.shares else members[0].id
            root = (
                None
                if request.hashes
                else self.indexes[0].root(request.cache_salt, request.adapter, owner)
            )
            self.indexes[0].extend(request.hashes, request.tokens(start, end), root)
