"""Which pages requests hold and where they come from: the pools, the prefix indexes, other choices
of the prompt, host memory. Imports no jax."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from jaxllm.cache.events import KVEventBatch, KVEvents
from jaxllm.cache.pool import PagePool
from jaxllm.engine.scheduling.cache_events import tell_stored
from jaxllm.engine.scheduling.kv_offload import OffloadManager
from jaxllm.engine.scheduling.plan import Chunk, PageCopy, TableWrite
from jaxllm.engine.scheduling.prefix_lookup import PrefixLookup, SharedPages
from jaxllm.engine.scheduling.prefix_misses import PrefixMisses
from jaxllm.engine.scheduling.request import PageTable, Request, Status


@dataclass(frozen=True, slots=True)
class AdmissionPages:
    """The pages that a waiting request would start with. Lists have an entry per cache group.

    Attributes:
        tables: Tables with the pages that hold its first `kept` tokens.
        kept: Tokens whose KV exists, or is on its way.
        in_transit: Last pages of the first table that are on their way for other requests.
        shared: The member that shares pages beyond those of the index, if one does.
        host_pages: Pages in host memory that hold the tokens after these.
        fresh: New pages that it needs.
        taken: Pages that are no longer free then.
        reserve: Further pages that must be free, for what members are about to write.
    """

    tables: tuple[PageTable, ...]
    kept: int
    in_transit: int
    shared: SharedPages | None
    host_pages: list[int]
    fresh: list[int]
    taken: list[int]
    reserve: int


class KVCacheManager:
    """Allocates pages for a scheduler, from one pool per cache group.

    Unless `index_outputs`, pages with generated tokens cannot be found.

    Pages behind a sliding window are released (`release_out_of_window`) when a plan is made, as
    soon as no token from `Request.computed` on sees them. Another request of that very plan may get
    them. The device's order makes that right. Steps in flight, which may still read them, run
    before the plan's moves and copies. The plan's own step computes no earlier token of the
    request. `computed` never falls while a request runs.
    """

    def __init__(self, pools: Sequence[PagePool]):
        self.pools, self.page_size = tuple(pools), pools[0].page_size
        self.prefixes = PrefixLookup(self.pools)
        self._misses = PrefixMisses(self.prefixes.indexes)
        self.offload: OffloadManager | None = None
        self.events: KVEvents | None = None
        self.index_outputs = True
        # Of the plan in the making
        self._copies: list[PageCopy] = []
        self._table_writes: list[TableWrite] = []

    def listen(self, listener: Callable[[KVEventBatch], None]) -> None:
        """Call `listener` after each step from now on with what became findable and what no longer
        is: pages of the layers that see furthest, and those in host memory. An exception that it
        raises fails the step. Raises ValueError without a prefix index."""
        if self.events is None:
            windows = [pool.lifetime.window for pool in self.pools]
            index = self.pools[windows.index(None) if None in windows else 0].index
            if index is None:
                raise ValueError("nothing can be found without prefix caching; enable it")
            self.events = index.events = KVEvents(self.page_size)
            if self.offload is not None:
                self.offload.host.events = self.events
        self.events.listeners.append(listener)

    @property
    def hash_start(self) -> bytes:
        """Where the hashes that events tell begin (`PageHasher`)."""
        return self.prefixes.indexes[0].start

    def flush_events(self) -> None:
        """Give what happened since the last call to the listeners, if there are any."""
        if self.events is not None:
            self.events.flush()

    def lookup(self, request: Request, newest: Chunk | None) -> AdmissionPages:
        """The pages that the request could start with. `newest` is the plan's last chunk, which is
        not counted as computed yet."""
        tokens = request.num_tokens
        tables, kept, shared = self.prefixes.reusable(request, newest)
        host_pages, joined = list[int](), list[int]()
        if self.offload is not None and request.scored >= request.score_end:
            keys = request.hashes[len(tables[0].pages) : (tokens - 1) // self.page_size]
            host_pages = self.offload.lookup(keys, bool(request.pinned))
            joined = self.offload.in_transit(keys[: len(host_pages)])
            tables[0].pages += joined
            kept, host_pages = kept + len(joined) * self.page_size, host_pages[len(joined) :]
        fresh, taken = [], []
        for pool, table in zip(self.pools, tables, strict=True):
            end = min(pool.pages_for(tokens), table.out_of_window + pool.max_resident(tokens))
            fresh.append(end - len(table.pages))
            taken.append(fresh[-1] + sum(pool.references(page) == 0 for page in table.resident))
        # Its next token copies a shared page; running siblings on that page may take one, too
        reserve = (
            1 + sum(r.status is Status.RUNNING and r.capacity <= tokens for r in request.siblings)
            if kept == tokens
            else 0
        )
        return AdmissionPages(tables, kept, len(joined), shared, host_pages, fresh, taken, reserve)

    def promise(self, request: Request) -> dict[bytes, int]:
        """Pin what host memory has, or gets from elsewhere, of a new request's pages that the pool
        lacks; not the page of its last token, which is computed anyway. Returns the host pages of
        those that must come, by hash."""
        offload, (pool, *_) = self.offload, self.pools
        if offload is None:
            return {}
        self.prefixes.hash_pages(request, request.num_tokens)
        keys = request.hashes[: (request.num_tokens - 1) // self.page_size]
        found = len(pool.index.match(keys, len(keys))) if pool.index is not None else 0
        promised, pins = offload.host.promise(keys[found:])
        request.pinned = keys[found : found + pins]
        return promised

    def uncached_tokens(self, request: Request) -> int:
        """Tokens of a waiting request that would be computed if it started now."""
        pages = self.lookup(request, None)
        return request.num_tokens - pages.kept - len(pages.host_pages) * self.page_size

    def allocate(self, request: Request, pages: AdmissionPages) -> None:
        """Give the request the pages of its known tokens, or as many as it may hold at once. The
        first fresh ones are filled from host memory."""
        tokens, found = request.num_tokens, len(pages.tables[0].pages)
        keys = request.hashes[found : found + len(pages.host_pages)] if pages.host_pages else []
        if self.offload is not None:
            # Before pages are handed out, whose contents may need space in host memory
            self.offload.host.pin(keys)
        self.unpin(request)
        for pool, table, fresh in zip(self.pools, pages.tables, pages.fresh, strict=True):
            pool.share(table.resident)
            table.found = len(table.pages)
            table.pages += pool.allocate(fresh)
        request.tables = pages.tables
        if self.offload is not None:
            self.offload.join(request, request.hashes[found - pages.in_transit : found])
            self.offload.enqueue(request, found, pages.host_pages)
        request.kept = pages.kept + len(pages.host_pages) * self.page_size
        request.prefill_end = tokens
        request.computed = min(request.kept, tokens - 1)
        request.capacity = tokens if request.kept == tokens else self._capacity(request)
        if pages.shared is not None:
            lender = pages.shared.lender
            lender.capacity = min(lender.capacity, pages.shared.computed)
        if not request.has_run and self._is_looked_up(request):
            request.prefix_miss = self._misses.explain(request, request.kept // self.page_size)

    def release_out_of_window(self, request: Request) -> None:
        """Release the pages that no token still to be computed sees."""
        for pool, table in zip(self.pools, request.tables, strict=True):
            end = pool.out_of_window(request.computed)
            if end > table.out_of_window:
                # Pages that were found once may be found again
                found = max(table.out_of_window, min(table.found, end))
                pool.release(table.pages[table.out_of_window : found])
                pool.release_out_of_window(table.pages[found:end])
                table.out_of_window = end

    def pages_needed(self, request: Request) -> list[int]:
        """Pages that the request must get in each cache group before its next tokens are computed.

        That is one for the next token, or within a prompt as many as the request may hold; and one
        more for a copy when others may read the page of the next token.
        """
        index, end, needed = request.computed // self.page_size, request.prefill_end, []
        for pool, table in zip(self.pools, request.tables, strict=True):
            wanted, held = index + 1, len(table.pages)
            if request.computed < end:
                prompt = min(pool.pages_for(end), table.out_of_window + pool.max_resident(end))
                wanted = max(wanted, prompt)
            shared = index < held and not pool.writable(table.pages[index])
            needed.append(max(0, wanted - held) + shared)
        return needed

    def append_pages(self, request: Request, needed: Sequence[int]) -> None:
        """Give the request the pages that `pages_needed` named: a copy of a page that others may
        read, and new ones. Raises OutOfPages."""
        index, decodes = request.computed // self.page_size, request.computed >= request.prefill_end
        for group, (pool, table, count) in enumerate(
            zip(self.pools, request.tables, needed, strict=True)
        ):
            fresh, old = pool.allocate(count), len(table.pages)
            written: Sequence[int] = range(old, old + count)
            if fresh and index < old and not pool.writable(table.pages[index]):
                self._copies.append(PageCopy(table.pages[index], fresh[0], group))
                pool.release(table.pages[index : index + 1])
                table.pages[index] = fresh.pop(0)
                written = [index, *written[:-1]]
            table.pages += fresh
            if decodes:  # a chunk carries its request's whole table
                self._table_writes += [
                    TableWrite(request.slot, i, table.pages[i], group) for i in written
                ]
        request.capacity = self._capacity(request)

    def pop_page_changes(self) -> tuple[tuple[PageCopy, ...], tuple[TableWrite, ...]]:
        """Page copies and table writes since the last call."""
        copies, writes = tuple(self._copies), tuple(self._table_writes)
        self._copies, self._table_writes = [], []
        return copies, writes

    def release(self, request: Request) -> None:
        """Release the request's pages. Its hashes stay, so it may find them again."""
        if self.offload is not None:
            self.offload.cancel(request)
        if request.tables:  # a waiting request has none
            for pool, table in zip(self.pools, request.tables, strict=True):
                pool.release(reversed(table.resident))
            request.tables = ()
        request.computed = request.prefill_end = request.kept = request.capacity = 0

    def share_with_fork(self, request: Request) -> None:
        """Count the pages of a request that was forked from a running one."""
        for pool, table in zip(self.pools, request.tables, strict=True):
            pool.share(table.resident)

    def pin(self, request: Request, hashes: Sequence[bytes]) -> None:
        """Keep these prefixes in host memory for a waiting request until `unpin`, if they are there
        or come there."""
        if self.offload is not None:
            request.pinned = list(hashes)
            self.offload.host.pin(hashes)

    def unpin(self, request: Request) -> None:
        """Undo `pin`."""
        if request.pinned and self.offload is not None:
            self.offload.host.unpin(request.pinned)
            request.pinned = []

    def invalidate(self, request: Request) -> set[Request]:
        """Drop what the request has computed or found from the indexes and host memory. Returns
        the requests to which some of it was in transit."""
        for index in self.prefixes.indexes:
            index.forget(request.hashes)
        return set() if self.offload is None else self.offload.forget(request.hashes)

    def drop_lost(self, host_pages: Collection[int]) -> set[Request]:
        """Forget what was to be saved to these host pages. Returns the requests to which some of it
        was in transit."""
        if self.offload is None or not host_pages:
            return set()
        return self.offload.forget(self.offload.host.hashes_at(host_pages))

    def forget_prefixes(self) -> None:
        """Empty the indexes and host memory; requests keep their pages. Nothing may be in
        transit."""
        if self.offload is not None:
            self.offload.host.clear()
        for index in self.prefixes.indexes:
            index.clear()
        self.flush_events()

    def release_all(self) -> None:
        """Take every page back, whatever its state."""
        self._copies, self._table_writes = [], []
        for pool in self.pools:
            pool.reset()
        if self.offload is not None:
            self.offload.forget_all()
        self.flush_events()

    def register(self, request: Request, start: int, end: int) -> None:
        """Index the pages that tokens [start, end) of the sequence complete, as far as the request
        still holds them."""
        if not self.index_outputs:
            end = min(end, len(request.prompt.tokens))
        first, last = start // self.page_size, end // self.page_size
        if first >= last or not self.prefixes.indexes:
            return
        self.prefixes.hash_pages(request, end)
        if first == 0:
            self._misses.note_start(request)
        for index, table in zip(self.prefixes.indexes, request.tables, strict=True):
            pages = range(max(first, table.out_of_window), last)
            new = [index.register(request.hashes[i], table.pages[i]) for i in pages]
            if index.events is not None:
                tell_stored(index, request, pages.start, new)

    def count_first_run(self, request: Request) -> None:
        """Count tokens looked up and found when a request first runs, and never before: pages that
        it waits for may not come. Of choices only the first counts, since the others may find its
        pages."""
        request.has_run, sharing = True, request.sharing
        if sharing is not None and sharing.cached_tokens is not None:
            request.num_cached_tokens, request.prefix_miss = sharing.cached_tokens, None
            return
        if self._is_looked_up(request):
            request.num_cached_tokens = request.computed
            self.prefixes.indexes[0].count(request.num_tokens, request.computed)
        if sharing is not None:
            sharing.cached_tokens = request.num_cached_tokens

    def _capacity(self, request: Request) -> int:
        """Tokens that the request's pages can hold, from the first of the sequence on."""
        return min(len(table.pages) for table in request.tables) * self.page_size

    def _is_looked_up(self, request: Request) -> bool:
        """Whether the prompt counts as looked up: prompts that must be computed, to be scored, do
        not, nor those of which a request finds its own pages alone."""
        scored = request.scored >= request.score_end
        return bool(self.prefixes.indexes) and self.prefixes.shared and scored
