"""Decides what each step runs: token-level continuous batching over slots, pages and compiled
shapes. Imports no jax.

One total order rules everything: the rank that a request gets when it arrives (`policy`). Requests
run in that order, waiting ones are admitted in that order, and when pages run out the last of those
that run goes back to the queue. So the first that runs always progresses, and whoever waits is next
once those before it have ended: nobody can get in front of it for ever, since ranks never change
and only grow with time. First come, first served, every running request is older than every waiting
one. At most one prompt, the one admitted last, is computed in part.

The engine plans step t+1 before it has read step t's tokens. So `plan` counts tokens from what was
planned, and looks at token values only to hash full pages. A plan that was made must be run, in
order: later plans count on the KV it writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from jaxllm.cache.pool import PagePool
from jaxllm.engine.scheduling.admission import AdmissionEstimator, Share, bounded, most, peak
from jaxllm.engine.scheduling.batch_invariant import covered
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.scheduling.kv_manager import KVCacheManager, Start, held_tokens
from jaxllm.engine.scheduling.kv_offload import OffloadManager
from jaxllm.engine.scheduling.limits import Limits, PrefillBudget
from jaxllm.engine.scheduling.plan import Chunk, Plan
from jaxllm.engine.scheduling.policy import Policy, RequestQueue, fcfs
from jaxllm.engine.scheduling.prompt_sharing import awaited, forked, whose_turn
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.engine.scheduling.slots import Slots


class Scheduler:
    """Owns the queue, the running set, slots and pages. Give it pools of its own, one for each kind
    of layers; those without a prefix index share nothing.

    Operators may bring a subclass (`--scheduler-cls`): `rank` is the method to override for another
    order.
    """

    def __init__(
        self, limits: Limits, pools: Sequence[PagePool], buckets: Buckets, policy: Policy = fcfs
    ):
        self.limits = limits
        self.pace: PrefillBudget | None = None
        self.preemptions = 0
        self.holdings = KVCacheManager(pools)
        self.pools, self.page_size = self.holdings.pools, self.holdings.page_size
        self._buckets, self._policy = buckets, policy
        self._arrivals = 0
        self._waiting, self._running = RequestQueue(), RequestQueue()
        self._swapped = RequestQueue()  # they come back before new ones start
        self._swaps = False
        self._uniform = False
        self._turn = False  # the last plan of a uniform scheduler had chunks
        self.forecast = AdmissionEstimator()
        # Whom the forecast refused, until requests give pages back
        self._refused: Request | None = None
        self._slots = Slots(limits.max_num_seqs)
        # Running requests grow a page every page_size steps: a little room keeps a new prompt from
        # being preempted at once.
        self._watermarks = [max(1, pool.num_pages // 100) for pool in pools]

    def use_host(self, offload: OffloadManager, swaps: bool, shares: bool) -> None:
        """Save findable pages that are handed out in host memory. With `swaps` those of preempted
        requests stay there for them; unless it `shares`, a request finds its own pages alone. Host
        memory knows chains from the first page on: raises ValueError when pages are given back
        behind a window."""
        if len(self.pools) > 1 or self.pools[0].kind.window is not None:
            raise ValueError("host memory takes pages of one pool, whose layers have no window")
        self._swaps = swaps
        self.holdings.offload, self.holdings.shares, self.pools[0].evicted = (
            offload,
            shares,
            offload.evicted,
        )

    def stay_uniform(self) -> None:
        """From now on steps have either chunks or decodes, by turns where both wait; what was not
        computed as a prompt is found by nobody; and a request starts once there are pages for all
        the tokens of those that run, which are so never preempted. So the programs that compute a
        request's tokens do not depend on other requests."""
        self._uniform = True
        self.holdings.keeps_outputs = False

    @property
    def offload(self) -> OffloadManager | None:
        """What moves pages between the pool and host memory."""
        return self.holdings.offload

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting) + len(self._swapped)

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished; a plan may still be empty while the last tokens are in
        flight.
        """
        return bool(self._waiting or self._running or self._swapped)

    def rank(self, request: Request) -> float:
        """What decides the request's place, once, when it arrives: lower goes first, and among
        equals who came first. Ranks must grow with time without bound, or requests may starve; a
        constant does, too, since arrival decides then."""
        return self._policy(request)

    def fits(self, num_tokens: int) -> bool:
        """Whether a request whose KV grows to `num_tokens` tokens (prompt + max_tokens - 1) can
        ever run.
        """
        return num_tokens <= self.limits.max_model_len and all(
            pool.most(num_tokens) <= pool.num_pages for pool in self.pools
        )

    def add(self, request: Request) -> None:
        """Queue a new request. Raises `ValueError` for one that could never run, which the engine
        should have refused."""
        need = len(request.prompt) + request.max_tokens - 1
        if not request.prompt or request.max_tokens < 1 or not self.fits(need):
            raise ValueError(
                f"request {request.id} can never run: {len(request.prompt)} prompt tokens and {request.max_tokens} new ones; "
                f"the limits are max_model_len {self.limits.max_model_len} "
                f"and {' and '.join(str(pool.num_pages) for pool in self.pools)} KV pages of {self.page_size} tokens"
            )
        if request.status is not Status.WAITING or request in self._waiting:
            raise ValueError(f"request {request.id} was added before")
        self._arrivals += 1
        request.place = (self.rank(request), self._arrivals)
        self._waiting.add(request)

    def fork(self, parent: Request) -> Request:
        """Another beam that goes on from where `parent` is, sharing all its pages; it needs a seat
        of its search that is free."""
        self._arrivals += 1
        child = forked(parent, self._arrivals)
        if parent.status is Status.RUNNING:
            self.holdings.share(child)
            child.slot = self._slots.take(child)
            self._running.add(child)
        else:
            self.holdings.store_too(child)
            (self._swapped if parent in self._swapped else self._waiting).add(child)
        return child

    def finish(self, request: Request) -> None:
        """Forget a request in any state and free its slot and pages at once; again or for a
        stranger: nothing happens.

        Legal while a step that contains it is in flight: whoever gets its pages writes them in a
        later step.
        """
        if request in self._running:
            self.forecast.ended(request)
            self._vacate(request)
        for line in (self._waiting, self._swapped):
            if request in line:
                line.remove(request)
        self.holdings.let_go(request)
        request.status = Status.FINISHED

    def invalidate(self, request: Request) -> None:
        """Make unfindable whatever the request has computed: its KV is not to be trusted. Pages
        that it found cached go too."""
        self._start_again(self.holdings.invalidated(request))

    def lose(self, places: Sequence[int]) -> None:
        """Host memory got none of what was to be saved to these places: whoever stands on that
        computes it again."""
        self._start_again(self.holdings.lost(places))

    def forget_prefixes(self) -> None:
        """Forget every cached prefix, in host memory too. Running requests go on with the pages
        that they have."""
        self._start_again([r for r in self._running if r.arriving])
        self.holdings.forget_prefixes()

    def preempt_all(self) -> None:
        """Send every running request back to the queue, in order, to be computed anew."""
        self._start_again(list(self._running))

    def reset(self) -> None:
        """Forget every request and prefix, whatever is true of them; all slots and pages are free
        afterwards."""
        for line in (self._running, self._waiting, self._swapped):
            for request in line:
                request.status = Status.FINISHED
            line.clear()
        self._refused = None
        self._slots = Slots(self.limits.max_num_seqs)
        self.holdings.reset()

    def committed(self, request: Request, new_tokens: int) -> None:
        """The engine has appended `new_tokens` tokens to `request.output`: make the pages they
        completed findable.

        The newest token is left out: its KV is written by the step that takes it as input, if the
        request lives so long.
        """
        written = len(request.prompt) + len(request.output) - 1
        if written > request.computed:
            written = request.computed  # tokens that were not drawn are written later, as a chunk
        if written % self.page_size < new_tokens and request.status is Status.RUNNING:
            self.holdings.register(request, written - new_tokens, written)

    def jump(self, request: Request) -> None:
        """The engine has appended tokens that need no draw to `request.output`, at most
        `ahead(request)`: their KV is computed as a chunk, after which the next token is drawn. What
        the step in flight draws for the request is not used."""
        request.prefill_end = request.num_tokens
        request.num_scheduled_outputs = len(request.output)

    def ahead(self, request: Request) -> int:
        """Tokens that a request which decodes may jump ahead: what its pages have room for."""
        return max(0, request.room - request.computed)

    def plan(self) -> Plan:
        """What the next step runs, possibly nothing; advances the requests as if it had run."""
        if self.offload is not None:
            self.offload.land()
        decode, prefill = (self._turn, not self._turn) if self._uniform else (True, True)
        decodes, positions, chunks, preempted = self._rows(decode, prefill)
        # Pages that are on their way hold nobody up
        if self._uniform and not (decodes or chunks or preempted):
            decodes, positions, chunks, preempted = self._rows(not decode, not prefill)
        moves = None
        if self.offload is not None:
            self.offload.board()
            if not decodes and not chunks:  # nothing runs beside the copies: do not wait for a step
                self.offload.land()
                arrived = [
                    r for r in self._running if not r.arriving and r.computed < r.prefill_end
                ]
                chunks = self._plan_chunks(arrived, 0, admit=False)
            moves = self.offload.depart()
        self._turn = bool(chunks)
        copies, writes = self.holdings.planned()
        return Plan(
            tuple(decodes), tuple(positions), chunks, tuple(preempted), copies, writes, moves
        )

    def _rows(
        self, decode: bool, prefill: bool
    ) -> tuple[list[Request], list[int], tuple[Chunk, ...], list[Request]]:
        """Decodes, chunks or both: who decodes, where each writes, the chunks, and who was
        preempted for them."""
        decodes: list[Request] = []
        positions: list[int] = []
        prefilling: list[Request] = []
        preempted: list[Request] = []
        running = Status.RUNNING
        for request in list(self._running):
            # Preempted by one before it just now, or waiting for its pages
            if request.status is not running or request.arriving:
                continue
            position = request.computed
            if position < request.prefill_end:
                if prefill and (
                    request.room >= request.prefill_end or self._open(request, preempted)
                ):
                    prefilling.append(request)
                continue
            if not decode or request.num_scheduled_outputs >= request.max_tokens:
                continue  # its last token is in flight, or it is not decodes' turn
            if position == request.room and not self._open(request, preempted):
                continue
            decodes.append(request)
            positions.append(position)
            request.computed = position + 1
            request.num_scheduled_outputs += 1
        chunks = self._plan_chunks(prefilling, len(decodes), admit=not preempted) if prefill else ()
        return decodes, positions, chunks, preempted

    def held_tokens(self) -> tuple[int, int]:
        """`holdings.held_tokens` of the running requests."""
        return held_tokens(self._running, self.page_size)

    def check(self) -> None:
        """Raise `PoolError` if pages or slots are leaked or shared wrongly. For tests and for an
        idle engine."""
        for kind, pool in enumerate(self.pools):
            pool.check(request.tables[kind].held for request in self._running)
        if self.offload is not None:
            self.offload.check(request.stored for request in self._swapped)
        self._slots.check(self._running)

    # --- chunks of prompts

    def _plan_chunks(
        self, prefilling: list[Request], num_decodes: int, admit: bool
    ) -> tuple[Chunk, ...]:
        """Chunks for requests in mid-prefill, then (if `admit`) for waiting ones, as far as tokens,
        rows, slots and pages go."""
        if not prefilling and not (admit and self.waiting):
            return ()
        room = min(self.limits.max_num_batched_tokens - num_decodes, self._buckets.max_tokens)
        if num_decodes and self.pace is not None:
            waiting = self._prompt_tokens(prefilling, 4 * self.pace.most)
            room = min(
                room, self.pace.tokens(waiting, len(prefilling) + self.waiting > 1, num_decodes)
            )
        if room < 1:
            return ()
        chunks: list[Chunk] = []
        total = 0
        for request in chain(prefilling, self._admissions(chunks) if admit else ()):
            if chunks:
                self._advance(chunks[-1])
            length = min(
                request.prefill_end - request.computed,
                request.room - request.computed,
                room - total,
            )
            chunks.append(
                Chunk(
                    request,
                    request.computed,
                    length,
                    request.computed + length == request.prefill_end,
                )
            )
            total += length
            if total == room or len(chunks) == self._buckets.max_chunks:
                break
        if chunks:
            chunks[-1] = self._cut(chunks, total, num_decodes)
            self._advance(chunks[-1])
        return tuple(chunks)

    def _prompt_tokens(self, prefilling: list[Request], enough: int) -> int:
        """Prompt tokens yet to be computed, counted up to `enough`."""
        total = sum(request.prefill_end - request.computed for request in prefilling)
        for request in chain(self._swapped, self._waiting):
            if total >= enough:
                break
            total += request.num_tokens
        return total

    def _cut(self, chunks: list[Chunk], total: int, num_decodes: int) -> Chunk:
        """The last chunk, shortened where a smaller shape is worth it. It keeps a token at least,
        and comes first next time."""
        last = chunks[-1]
        length = last.length - (total - self._buckets.trim(total, len(chunks), num_decodes))
        return Chunk(last.request, last.start, length, False) if 0 < length < last.length else last

    def _admissions(self, chunks: list[Chunk]) -> Iterator[Request]:
        """Admit waiting requests one by one, in order, while slots and pages last."""
        while self.waiting:
            request = whose_turn(self._swapped or self._waiting, self._slots.searching)
            if (
                request is None
                or not self._slots.has(request)
                or not self._admit(request, chunks[-1] if chunks else None)
            ):
                return
            if not request.arriving:
                yield request

    def _advance(self, chunk: Chunk) -> None:
        """Count the chunk as computed and make the pages it fills findable."""
        end = chunk.start + chunk.length
        chunk.request.computed = end
        if chunk.final:
            chunk.request.num_scheduled_outputs += 1
        self.holdings.register(chunk.request, chunk.start, end)

    def _admit(self, request: Request, newest: Chunk | None) -> bool:
        """Give the request a slot and all pages of its known tokens, shared ones first; False when
        it must wait.

        Pages for the whole prompt are taken now, so that a prompt once begun never waits for pages
        and never takes them from others. Where a window bounds what it holds at once, so much is
        taken, and goes on with it; then only a prompt that gives back pages which others still hold
        may have to take more.
        """
        if request is self._refused:
            return False
        start, careful = (
            self.holdings.find(request, newest),
            bool(self._running) and not awaited(request),
        )
        for pool, taken, watermark in zip(self.pools, start.taken, self._watermarks, strict=True):
            if pool.free < taken + start.spare + (watermark if careful else 0):
                return False
        if careful and not self._stays(request, start):
            self._refused = request
            return False
        (self._swapped if request in self._swapped else self._waiting).remove(request)
        self.holdings.take(request, start)
        request.slot = self._slots.take(request)
        request.status = Status.RUNNING
        self._running.add(request)
        return True

    def _stays(self, request: Request, start: Start) -> bool:
        """Whether the request is expected to keep its pages as long as it is worth."""
        if self._uniform:
            return covered(self.pools, self._running, request, start)
        size, rows = self.page_size, len(self._running) + 1
        worth = self.forecast.patience(request.num_tokens, rows, self._buckets.step_cost)
        for kind, pool in enumerate(self.pools):
            used = pool.num_pages - pool.free + start.taken[kind]
            tight = most(used, rows, size, worth) > pool.num_pages
            if (
                tight
                and peak(used, self._shares(kind, request, start), size, worth) > pool.num_pages
            ):
                return False
        return True

    def _shares(self, kind: int, request: Request, start: Start) -> Iterator[Share]:
        """What the running requests and this one do to the pool of a kind of layers."""
        size, limit = self.page_size, self.pools[kind].kind.steady(self.page_size)
        for r in self._running:
            table = r.tables[kind]
            own, places = (
                len(table.pages) - max(table.found, table.behind),
                len(table.pages) * size - max(r.computed, r.prefill_end),
            )
            yield from bounded(
                Share(self.forecast.to_come(r), own, places),
                len(table.pages) - table.behind,
                limit,
                size,
            )
        table, fresh = start.tables[kind], start.fresh[kind]
        share = Share(
            self.forecast.to_come(request),
            fresh,
            (len(table.pages) + fresh) * size - request.num_tokens,
        )
        yield from bounded(share, len(table.pages) - table.behind + fresh, limit, size)

    # --- pages

    def _open(self, request: Request, preempted: list[Request]) -> bool:
        """Give the request pages that it may write its next tokens to, instead of those that it has
        done with. False when it was preempted for want of them."""
        before = [pool.free for pool in self.pools]
        self.holdings.slide(request)
        wanted = self.holdings.wanted(request)
        while any(pool.free < count for pool, count in zip(self.pools, wanted, strict=True)):
            last = self._running.last
            self._preempt(last)
            preempted.append(last)
            if last is request:
                return False
            wanted = self.holdings.wanted(request)
        self.holdings.open(request, wanted)
        if any(pool.free > free for pool, free in zip(self.pools, before, strict=True)):
            self._refused = None
        return True

    def _preempt(self, request: Request, store: bool = True) -> None:
        """Back to its place in the queue, without slot and pages. When it swaps, and unless told
        otherwise, it will find them again."""
        if self._swaps and store:
            self.holdings.store(request)
        self._vacate(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.preemptions += 1
        (self._swapped if self._swaps else self._waiting).add(request)

    def _start_again(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._preempt(request, store=False)

    def _vacate(self, request: Request) -> None:
        """Take slot and pages from a running request."""
        self._running.remove(request)
        self._refused = None
        self.holdings.give_back(request)
        self._slots.give(request)
        request.slot = -1
