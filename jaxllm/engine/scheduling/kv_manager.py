"""Which pages requests hold and where they come from: the pools, the prefix indexes, other choices
of the prompt, host memory. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.cache.pool import PagePool, PoolError
from jaxllm.engine.scheduling.cache_events import tell_stored
from jaxllm.engine.scheduling.kv_offload import OffloadManager
from jaxllm.engine.scheduling.plan import Chunk, PageCopy, TableWrite
from jaxllm.engine.scheduling.prefix_lookup import PrefixLookup, SharedPages
from jaxllm.engine.scheduling.prefix_misses import PrefixCounts
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

    `Request.verified` never falls while a request runs: plans raise it, and a step that turns out
    to have accepted drafts raises it further. `Request.computed` may fall, to `verified` at the
    least, when drafts turn out to be rejected. So whatever cannot be undone goes by `verified`:

    - Pages behind a sliding window are released when a plan is made, as soon as no token from
      `verified` on sees them. Another request of that very plan may get them. The device's order
      makes that right. Steps in flight, which may still read them, run before the plan's moves and
      copies. The plan's own step computes no token before `verified`.
    - Pages become findable when their last token is before `verified`: those of prompts when they
      are planned, those of outputs when their tokens are committed. So no page that can be found
      is written again.

    Pages are held for `computed` tokens, because the device may have accepted all drafts. `check`
    holds all of that.
    """

    def __init__(self, pools: Sequence[PagePool]):
        self.pools = tuple(pools)
        self.page_size = pools[0].page_size
        self.prefixes = PrefixLookup(self.pools)
        self.counts = PrefixCounts(self.prefixes)
        self.offload: OffloadManager | None = None
        self.index_outputs = True
        # Of the plan in the making
        self._copies: list[PageCopy] = []
        self._table_writes: list[TableWrite] = []

    def lookup(self, request: Request, newest: Chunk | None) -> AdmissionPages:
        """The pages that a waiting request could start with. `newest` is the plan's last chunk,
        which is not counted as computed yet. Completes the request's hashes, and changes nothing
        else."""
        tokens = request.num_tokens
        tables, kept, shared = self.prefixes.reusable(request, newest)
        host_pages = list[int]()
        joined = list[int]()
        if self.offload is not None and request.scored >= request.score_end:
            keys = request.hashes[len(tables[0].pages) : (tokens - 1) // self.page_size]
            host_pages = self.offload.lookup(keys, bool(request.pinned))
            joined = self.offload.in_transit(keys[: len(host_pages)])
            tables[0].pages += joined
            kept = kept + len(joined) * self.page_size
            host_pages = host_pages[len(joined) :]
        fresh = []
        taken = []
        for pool, table in zip(self.pools, tables, strict=True):
            end = min(pool.pages_for(tokens), table.out_of_window + pool.max_resident(tokens))
            fresh.append(end - len(table.pages))
            taken.append(fresh[-1] + sum(pool.references(page) == 0 for page in table.resident))
        # Its next token copies a shared page; running siblings on that page may take one, too
        reserve = 0
        if kept == tokens:
            reserve = 1 + sum(
                r.status is Status.RUNNING and r.capacity <= tokens for r in request.siblings
            )
        return AdmissionPages(tables, kept, len(joined), shared, host_pages, fresh, taken, reserve)

    def allocate(self, request: Request, pages: AdmissionPages) -> None:
        """Give a waiting request the pages of its known tokens, or as many as it may hold at once.
        The first fresh ones are filled from host memory.

        `pages` is what `lookup` has just found, and `taken` of them are free in each pool: raises
        OutOfPages otherwise. Sets where the request stands (`tables`, `kept`, `computed`,
        `prefill_end`, `capacity`), ends what host memory keeps for it, and makes a lender copy its
        last page before it writes on.
        """
        tokens = request.num_tokens
        found = len(pages.tables[0].pages)
        if pages.host_pages:
            keys = request.hashes[found : found + len(pages.host_pages)]
        else:
            keys = []
        if self.offload is not None:
            # Before pages are handed out, whose contents may need space in host memory
            self.offload.host.pin(keys)
            self.offload.unpin(request)
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
        if request.kept == tokens:
            request.capacity = tokens
        else:
            request.capacity = self._capacity(request)
        if pages.shared is not None:
            lender = pages.shared.lender
            lender.capacity = min(lender.capacity, pages.shared.verified)
        self.counts.note_found(request)

    def append(self, request: Request, first: int, end: int) -> bool:
        """Give a running request the pages that it lacks to compute its tokens up to `end`: new
        ones, within a prompt as many as it may hold; and a copy of the page of token `first`, when
        others may read that. The plan in the making computes none before `first`.

        Releases the pages behind its windows before. Returns False and gives it nothing when too
        few pages are free; the caller may preempt a request and call again. Afterwards `capacity`
        is at least `end`, and the plan has the copies, and the table entries of a decode. These are
        of pages with tokens in [first, end), and `pages_of_decode` at most in each cache group.
        """
        self._release_out_of_window(request, first)
        needed = self._pages_needed(request, first, end)
        if any(pool.free < count for pool, count in zip(self.pools, needed, strict=True)):
            return False
        index = first // self.page_size
        decodes = request.computed >= request.prefill_end
        for group, (pool, table, count) in enumerate(
            zip(self.pools, request.tables, needed, strict=True)
        ):
            fresh = pool.allocate(count)
            held = len(table.pages)
            written: Sequence[int] = range(held, held + count)
            if fresh and index < held and not pool.writable(table.pages[index]):
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
        return True

    def pop_page_changes(self) -> tuple[tuple[PageCopy, ...], tuple[TableWrite, ...]]:
        """Page copies and table writes since the last call."""
        copies = tuple(self._copies)
        writes = tuple(self._table_writes)
        self._copies = []
        self._table_writes = []
        return copies, writes

    def release(self, request: Request) -> None:
        """Take all pages from a request, which then stands at its beginning. Brings it no more from
        host memory. Its hashes stay, so it may find its pages again. Nothing happens to a request
        that has none. Legal while steps in flight write its pages: who gets one writes later."""
        if self.offload is not None:
            self.offload.cancel(request)
        if request.tables:  # a waiting request has none
            for pool, table in zip(self.pools, request.tables, strict=True):
                pool.release(reversed(table.resident))
            request.tables = ()
        request.computed = request.drafts = 0
        request.prefill_end = request.kept = request.capacity = 0

    def register(self, request: Request, start: int, end: int) -> None:
        """Make findable the pages that tokens [start, end) of the sequence complete, as far as the
        request still holds them. All of these are before `verified`, and the host knows them. Tells
        listeners. Raises ValueError for a page that holds another prefix."""
        if not self.index_outputs:
            end = min(end, len(request.prompt.tokens))
        first = start // self.page_size
        last = end // self.page_size
        if first >= last or not self.prefixes.indexes:
            return
        self.prefixes.hash_pages(request, end)
        if first == 0:
            self.counts.misses.note_start(request)
        for index, table in zip(self.prefixes.indexes, request.tables, strict=True):
            pages = range(max(first, table.out_of_window), last)
            new = [index.register(request.hashes[i], table.pages[i]) for i in pages]
            if index.events is not None:
                tell_stored(index, request, pages.start, new)

    def check(self, running: Sequence[Request]) -> None:
        """Raise `PoolError` unless the pools' references equal the page tables of the `running`
        requests, and each of these still holds what the tokens from `verified` on see, has pages
        for what steps in flight write, and shares no page that it may write up to `capacity`.
        Changes nothing."""
        for group, pool in enumerate(self.pools):
            pool.check(request.tables[group].resident for request in running)
            for request in running:
                self._check_table(request, pool, request.tables[group])

    def _check_table(self, request: Request, pool: PagePool, table: PageTable) -> None:
        """As of `check`, for one cache group."""
        verified = request.verified
        if not 0 <= verified <= request.computed:
            raise PoolError(
                f"of {request.computed} tokens of request {request.id}, {request.drafts} are drafts"
            )
        if table.out_of_window > pool.out_of_window(verified):
            raise PoolError(
                f"request {request.id} has released {table.out_of_window} pages that its token"
                f" {verified} sees"
            )
        if len(table.pages) * self.page_size < min(request.computed, request.kv_end):
            raise PoolError(
                f"request {request.id} has {len(table.pages)} pages for {request.computed} tokens"
            )
        start = max(verified, request.kept)
        if start < request.capacity:
            written = slice(start // self.page_size, pool.pages_for(request.capacity))
            shared = [page for page in table.pages[written] if not pool.writable(page)]
            if shared:
                raise PoolError(f"request {request.id} may write pages that others read: {shared}")

    def _release_out_of_window(self, request: Request, first: int) -> None:
        """Release the pages that no token from `first` on sees."""
        for pool, table in zip(self.pools, request.tables, strict=True):
            end = pool.out_of_window(first)
            if end > table.out_of_window:
                # Pages that were found once may be found again
                found = max(table.out_of_window, min(table.found, end))
                pool.release(table.pages[table.out_of_window : found])
                pool.release_out_of_window(table.pages[found:end])
                table.out_of_window = end

    def _pages_needed(self, request: Request, first: int, end: int) -> list[int]:
        """Pages that `append` gives the request in each cache group."""
        index = first // self.page_size
        prompt_end = request.prefill_end
        needed = []
        for pool, table in zip(self.pools, request.tables, strict=True):
            wanted = pool.pages_for(end)
            held = len(table.pages)
            if request.computed < prompt_end:
                most = table.out_of_window + pool.max_resident(prompt_end)
                wanted = max(wanted, min(pool.pages_for(prompt_end), most))
            shared = index < held and not pool.writable(table.pages[index])
            needed.append(max(0, wanted - held) + shared)
        return needed

    def _capacity(self, request: Request) -> int:
        """Tokens that the request's pages can hold, from the first of the sequence on."""
        return min(len(table.pages) for table in request.tables) * self.page_size
