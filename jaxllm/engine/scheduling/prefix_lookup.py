"""Finds pages that hold the start of a request: of other choices of its prompt, or in the prefix
indexes. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from jaxllm.cache.pool import PagePool
from jaxllm.engine.scheduling.plan import Chunk
from jaxllm.engine.scheduling.request import PageTable, Request, Status


@dataclass(frozen=True, slots=True)
class SharedPages:
    """The first `tokens` tokens of a request are in the pages of `lender`, of whose own tokens
    `verified` are verified."""

    lender: Request
    tokens: int
    verified: int


class PrefixLookup:
    """Finds pages in the indexes of a model's pools, one per cache group. Allocates nothing.

    Unless `shared`, a request finds in index and host memory only what choices of its own prompt
    have computed. Unless `lends`, it starts from nothing that another request has computed.
    """

    def __init__(self, pools: Sequence[PagePool]):
        self.pools = pools
        self.page_size = pools[0].page_size
        self.indexes = tuple(pool.index for pool in pools if pool.index is not None)
        if len(self.indexes) not in (0, len(pools)):
            raise ValueError("either every pool of a model has a prefix index or none")
        self.shared = True
        self.lends = True

    def hash_pages(self, request: Request, end: int) -> None:
        """Complete the request's hashes up to token `end`; each page is hashed once in its life."""
        start = len(request.hashes) * self.page_size
        if self.indexes and end - start >= self.page_size:
            owner = None if self.shared else request.siblings[0].id
            root = None
            if not request.hashes:
                root = self.indexes[0].root(request.cache_salt, request.adapter, owner)
            self.indexes[0].extend(request.hashes, request.keys(start, end), root)

    def forget(self, request: Request) -> None:
        """Make unfindable what the request has computed or found."""
        for index in self.indexes:
            index.forget(request.hashes)

    def clear(self) -> None:
        """Make every page unfindable; requests keep theirs."""
        for index in self.indexes:
            index.clear()

    def missing(self, request: Request) -> list[bytes]:
        """Hashes of a new request's pages that the first pool lacks; without the page of its last
        token, which is computed anyway."""
        self.hash_pages(request, request.num_tokens)
        keys = request.hashes[: (request.num_tokens - 1) // self.page_size]
        if self.indexes:
            return keys[len(self.indexes[0].match(keys, len(keys))) :]
        return keys

    def reusable(
        self, request: Request, newest: Chunk | None
    ) -> tuple[tuple[PageTable, ...], int, SharedPages | None]:
        """Pages that hold the start of the request's known tokens, the number of these tokens, and
        the member that shares them, if one does.

        A page that is held in part is shared for reading only. Where a token is still to be
        written, whole pages are shared. Pages of members come before those of the index, since
        they take nothing from the pool: beam searches count on holding their prompt once.
        """
        tokens = request.num_tokens
        # Tokens to be scored must be computed
        scored = request.scored >= request.score_end
        lent = self.lends and scored and request.sharing is not None
        shared = None
        if lent:
            shared = self._shared_pages(request, newest)
        if shared is None:
            count, hits = self._indexed_prefix(request, newest)
            return hits, count * self.page_size, None
        lender = shared.lender
        if len(request.hashes) < shared.tokens // self.page_size:
            request.hashes = lender.hashes[: shared.tokens // self.page_size]
        pages = self.pools[0].pages_for(shared.tokens)
        count, hits = self._indexed_prefix(request, newest) if shared.tokens < tokens else (0, ())
        if count <= pages:
            position = min(shared.tokens, tokens - 1)
            tables = tuple(
                PageTable(table.pages[:pages], pool.out_of_window(position))
                for table, pool in zip(lender.tables, self.pools, strict=True)
            )
            return tables, shared.tokens, shared
        for own, table in zip(hits, lender.tables, strict=True):
            own.pages[own.out_of_window : pages] = table.pages[own.out_of_window : pages]
        return hits, count * self.page_size, shared

    def _shared_pages(self, request: Request, newest: Chunk | None) -> SharedPages | None:
        """The choice of the same prompt that shares most with a waiting request.

        None when no running one has computed the whole prompt and still holds the pages that the
        request's next token sees. Where a token is still to be written, only whole pages are
        shared. A step writes the KV of all its tokens before it attends. So tokens of the plan in
        the making count, with its last chunk `newest`.
        """
        best = None
        for member in request.siblings:
            if member.status is not Status.RUNNING or member.pages_in_transit:
                continue
            verified = member.verified
            if newest is not None and newest.request is member:
                verified = newest.end
            prompt = len(request.prompt.tokens)
            if verified < prompt:
                continue
            tokens = prompt + _common_length(request.output, member.output, verified - prompt)
            if tokens < request.num_tokens:
                tokens -= tokens % self.page_size
            position = min(tokens, request.num_tokens - 1)
            if any(
                table.out_of_window > pool.out_of_window(position)
                for pool, table in zip(self.pools, member.tables, strict=True)
            ):
                continue  # its window has moved on, and it has given them back
            if best is None or tokens > best.tokens:
                best = SharedPages(member, tokens, verified)
            if tokens == request.num_tokens:
                break
        return best

    def _indexed_prefix(
        self, request: Request, newest: Chunk | None
    ) -> tuple[int, tuple[PageTable, ...]]:
        """The longest indexed prefix of the request's known tokens, in pages, and its pages.

        The last token is left out. Every group must have the pages that later tokens see. Pages
        that earlier chunks of this very step fill count too: a step writes the KV of all its
        tokens, layer by layer, before it attends. Pages of the newest chunk are not registered,
        since it may still be cut. It will not be once another request follows, so they are compared
        by hash here.
        """
        tables = tuple(PageTable() for _ in self.pools)
        if not self.indexes:
            return 0, tables
        self.hash_pages(request, request.num_tokens)
        if request.scored < request.score_end:
            return 0, tables  # tokens to be scored must be computed
        if newest is not None:
            self.hash_pages(newest.request, newest.end)
        count = (request.num_tokens - 1) // self.page_size
        for group, pool in enumerate(self.pools):
            if pool.lifetime.window is None:
                tables[group].pages = self._longest_prefix(group, request, newest, count)
                count = len(tables[group].pages)
        for table in tables:  # a later group may have fewer
            del table.pages[count:]
        if any(pool.lifetime.window is not None for pool in self.pools):
            count = self._prefix_within_windows(request, newest, count)
            for group, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
                start = table.out_of_window = pool.out_of_window(count * self.page_size)
                seen = (self._find_page(group, request, newest, i) for i in range(start, count))
                table.pages = [0] * start + [page for page in seen if page is not None]
        return count, tables

    def _longest_prefix(
        self, group: int, request: Request, newest: Chunk | None, limit: int
    ) -> list[int]:
        """Pages of the longest prefix of which every page is there, at most `limit`."""
        hits = self.indexes[group].match(request.hashes, limit)
        if newest is not None:
            for i in range(len(hits), min(limit, newest.end // self.page_size)):
                page = self._find_page(group, request, newest, i)
                if page is None:
                    break
                hits.append(page)
        return hits

    def _prefix_within_windows(self, request: Request, newest: Chunk | None, count: int) -> int:
        """The longest prefix, in pages and at most `count`, after which every group with a window
        has the pages that the next token sees."""
        windowed = [
            group for group, pool in enumerate(self.pools) if pool.lifetime.window is not None
        ]
        # how many groups in a row agree with `count`
        turn = 0
        settled = 0
        while settled < len(windowed):
            group = windowed[turn]
            first = self.pools[group].out_of_window(count * self.page_size)
            # The first page goes first: without it the others are useless, so a window that has
            # nothing costs one look-up
            for i in chain(range(first, count)[:1], range(count - 1, first, -1)):
                if self._find_page(group, request, newest, i) is None:
                    count = i
                    settled = 0
                    break
            else:
                settled = settled + 1
                turn = (turn + 1) % len(windowed)
        return count

    def _find_page(self, group: int, request: Request, newest: Chunk | None, i: int) -> int | None:
        """The page that holds page i of the request's tokens, or will after this step."""
        page = self.indexes[group].find(request.hashes[i])
        if page is None and newest is not None:
            owner = newest.request
            size = self.page_size
            written = range(newest.start // size, newest.end // size)
            if i in written and request.hashes[i] == owner.hashes[i]:
                return owner.tables[group].pages[i]
        return page


def _common_length(one: list[int], other: list[int], limit: int) -> int:
    """Length of the longest common prefix of two outputs, at most `limit`."""
    length = min(len(one), len(other), limit)
    if one[:length] == other[:length]:
        return length
    return next(i for i in range(length) if one[i] != other[i])
