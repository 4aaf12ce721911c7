"""Decides what each step runs: continuous batching over slots, pages and shapes. Imports no jax.

One total order rules everything: the rank that a request gets when it arrives (`policy`). Requests
run and are admitted in that order, and when pages run out the last running one goes back to the
queue. So the first running request always progresses, and a waiting one is next once those before
it have ended. Ranks never change and grow with time, so none waits for ever. First come, first
served, every running request is older than every waiting one. At most one prompt, the one admitted
last, is computed in part.

The engine plans step t+1 before it has read step t's tokens. So `plan` counts tokens from what was
planned, and reads token values only to hash full pages. Plans must be run, in order: later plans
count on the KV that earlier ones write.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxllm.cache.pool import PagePool
from jaxllm.engine.scheduling.admission import AdmissionEstimator, fits_fully
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.scheduling.cache_events import PrefixEvents
from jaxllm.engine.scheduling.chunk_planner import ChunkPlanner
from jaxllm.engine.scheduling.draft_planner import DraftPlanner
from jaxllm.engine.scheduling.kv_manager import AdmissionPages, KVCacheManager
from jaxllm.engine.scheduling.kv_offload import OffloadManager
from jaxllm.engine.scheduling.plan import Chunk, Decode, Limits, Plan
from jaxllm.engine.scheduling.policy import Policy, RequestQueue, fcfs
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.engine.scheduling.slots import Slots


class Selected(NamedTuple):
    """What a step is to run.

    Attributes:
        decodes: rows of requests that continue their output.
        drafts: that the decodes have, in all.
        chunks: parts of prompts.
        preempted: requests that went back to the queue for these.
    """

    decodes: list[Decode]
    drafts: int
    chunks: tuple[Chunk, ...]
    preempted: list[Request]


class Scheduler:
    """Owns the queue, the running set, slots and pages. Give it pools of its own, one per cache
    group; those without a prefix index share nothing.

    Operators may bring a subclass (`--scheduler-cls`): `rank` is the method to override for another
    order.
    """

    def __init__(
        self, limits: Limits, pools: Sequence[PagePool], buckets: Buckets, policy: Policy = fcfs
    ):
        self.limits = limits
        self.preemptions = 0
        self.kv_manager = KVCacheManager(pools)
        self.events = PrefixEvents(pools)
        self.pools = self.kv_manager.pools
        self.page_size = self.kv_manager.page_size
        self._step_cost = buckets.step_cost
        self._policy = policy
        self._arrivals = 0
        self._waiting = RequestQueue()
        self._running = RequestQueue()
        self._swapped = RequestQueue()  # they come back before new requests start
        queues = self._swapped, self._waiting
        self.chunk_planner = ChunkPlanner(limits, buckets, self.kv_manager, queues)
        self._swaps = False
        self._batch_invariant = False
        self._drafts: DraftPlanner | None = None
        self._had_chunks = [False] * limits.groups  # each one's last plan, when batch-invariant
        self.estimator = AdmissionEstimator()
        # Was not admitted by the estimator; not tried again until requests release pages
        self._refused: Request | None = None
        self._slots = Slots(limits.max_num_seqs, limits.groups)
        # Running requests take a page every page_size steps: without a few free ones a new prompt
        # would be preempted at once
        self._watermarks = [max(1, pool.num_pages // 100) for pool in pools]
        self._windowed = [pool for pool in pools if pool.lifetime.window is not None]

    def attach_offload(
        self, offload: OffloadManager, swap_preempted: bool, share_prefixes: bool
    ) -> None:
        """Save findable pages in host memory when they are handed out.

        With `swap_preempted`, pages of preempted requests stay there for them. Unless
        `share_prefixes`, a request finds only its own pages. Host memory knows prefixes from their
        first page on: raises ValueError when pages are released behind a window.
        """
        if len(self.pools) > 1 or self.pools[0].lifetime.window is not None:
            raise ValueError("host memory takes pages of one pool, whose layers have no window")
        self._swaps = swap_preempted
        self.kv_manager.offload = offload
        self.events.include(offload.host)
        self.kv_manager.prefixes.shared = share_prefixes
        self.pools[0].on_evict = offload.save_evicted

    def set_apart(self) -> None:
        """Have every request compute all its tokens itself, for layers that must see each of them.
        The pools must have no prefix index."""
        if self.kv_manager.prefixes.indexes:
            raise ValueError("requests that compute all their tokens find no prefixes")
        self.kv_manager.prefixes.lends = False

    def attach_drafts(self, wanted: Callable[[Request], int]) -> None:
        """Let decodes have drafts: as many as `wanted` says of a request, or as fit. Raises
        ValueError for a batch-invariant engine, whose decodes compute one token, and for layers
        that must see each token once: those that are rejected would have been seen."""
        if self._batch_invariant:
            raise ValueError("a batch-invariant engine computes one token of a request at a time")
        if not self.kv_manager.prefixes.lends:
            raise ValueError("layers that see each token once cannot forget rejected drafts")
        self._drafts = DraftPlanner(self.kv_manager, wanted)

    def set_batch_invariant(self) -> None:
        """Make the programs that compute a request's tokens independent of other requests. Raises
        ValueError where decodes have drafts.

        From now on a step has either chunks or decodes, in turns where both wait. Only pages
        computed as a prompt can be found. A request starts once there are pages for all tokens of
        everything that runs, so none is preempted.
        """
        if self._drafts is not None:
            raise ValueError("decodes have drafts, and take as many as fit beside other requests")
        self._batch_invariant = True
        self.kv_manager.index_outputs = False

    @property
    def offload(self) -> OffloadManager | None:
        """Moves pages between the pool and host memory, if there is a host tier."""
        return self.kv_manager.offload

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
        """Whether any request is unfinished. A plan may still be empty, while the last tokens are
        in flight."""
        return bool(self._waiting or self._running or self._swapped)

    def rank(self, request: Request) -> float:
        """The request's rank, computed once, when it arrives. Lower ranks go first, and arrival
        decides among equals. Ranks must grow with time without bound, or requests may starve; a
        constant is fine, since arrival decides then."""
        return self._policy(request)

    def fits(self, num_tokens: int) -> bool:
        """Whether a request whose KV grows to `num_tokens` tokens (prompt + max_tokens - 1) can
        ever run."""
        return num_tokens <= self.limits.max_model_len and all(
            pool.max_resident(num_tokens) <= pool.num_pages for pool in self.pools
        )

    def add(self, request: Request) -> None:
        """Queue a new request. Raises ValueError for one that can never run, which the engine
        should have refused."""
        own = len(request.prompt.tokens)
        new = request.max_tokens
        if not own or new < 1 or not self.fits(own + new - 1):
            raise ValueError(f"request {request.id} can never run: {own} prompt tokens, {new} new")
        if request.status is not Status.WAITING or request in self._waiting:
            raise ValueError(f"request {request.id} was added before")
        rank = self.rank(request)
        self._arrivals = self._arrivals + 1
        request.order = (rank, self._arrivals)
        self._waiting.insert(request)

    def fork(self, parent: Request) -> Request:
        """Another beam that continues from `parent` and shares all its pages. It needs a spare slot
        of its search."""
        self._arrivals += 1
        child = parent.forked(self._arrivals)
        if parent.status is Status.RUNNING:
            for pool, table in zip(self.pools, child.tables, strict=True):
                pool.share(table.resident)
            child.slot = self._slots.assign(child)
            self._running.insert(child)
        else:
            if self.offload is not None:
                self.offload.pin(child, parent.pinned)
            (self._swapped if parent in self._swapped else self._waiting).insert(child)
        return child

    def finish(self, request: Request) -> None:
        """Forget a request in any state and free its slot and pages at once. Nothing happens when
        it is unknown or finished.

        Legal while a step that contains it is in flight: another request that gets its pages
        writes them in a later step.
        """
        if request in self._running:
            self.estimator.record(request)
            self._vacate(request)
        for queue in (self._waiting, self._swapped):
            if request in queue:
                queue.remove(request)
        if self.offload is not None:
            self.offload.unpin(request)
        request.status = Status.FINISHED

    def invalidate(self, request: Request) -> None:
        """Make unfindable what the request has computed or found: its KV cannot be trusted."""
        self.kv_manager.prefixes.forget(request)
        if self.offload is not None:
            self._send_back(self.offload.forget(request.hashes))

    def drop_lost(self, host_pages: Sequence[int]) -> None:
        """Nothing has come to these host pages: requests that need them compute them."""
        if self.offload is not None and host_pages:
            self._send_back(self.offload.forget(self.offload.host.hashes_at(host_pages)))

    def forget_prefixes(self) -> None:
        """Forget every cached prefix, in host memory too. Running requests keep their pages."""
        self._send_back([r for r in self._running if r.pages_in_transit])
        if self.offload is not None:
            self.offload.host.clear()
        self.kv_manager.prefixes.clear()
        self.events.flush()

    def preempt_all(self) -> None:
        """Send every running request back to the queue, in order, to be computed again."""
        for request in list(self._running):
            self._preempt(request)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget every cached prefix; returns whether it did. While requests run it does so only
        with `reset_running_requests`, which computes them again."""
        if self.running:
            if not reset_running_requests:
                return False
            self.preempt_all()
        self.forget_prefixes()
        return True

    def reset(self) -> None:
        """Forget every request and prefix, whatever their state. All slots and pages are free
        afterwards."""
        for queue in (self._running, self._waiting, self._swapped):
            for request in queue.pop_all():
                request.status = Status.FINISHED
        self._refused = None
        self._slots = Slots(self.limits.max_num_seqs, self.limits.groups)
        for pool in self.pools:
            pool.reset()
        if self.offload is not None:
            self.offload.forget_all()
        self.kv_manager.pop_page_changes()
        self.events.flush()

    def uncached_tokens(self, request: Request) -> int:
        """Tokens of a waiting request that would be computed if it started now."""
        pages = self.kv_manager.lookup(request, None)
        return request.num_tokens - pages.kept - len(pages.host_pages) * self.page_size

    def commit_tokens(self, request: Request, new_tokens: int) -> None:
        """The engine has appended `new_tokens` tokens to `request.output`: index the pages that
        they completed.

        The newest token is left out: its KV is written by the step that takes it as input, if the
        request lives so long.
        """
        written = len(request.prompt.tokens) + len(request.output) - 1
        if written % self.page_size < new_tokens and request.status is Status.RUNNING:
            # Tokens that were not drawn are written later, as a chunk
            written = min(written, request.verified)
            self.kv_manager.register(request, max(0, written - new_tokens), written)

    def judge_drafts(
        self, plan: Plan, tokens: Sequence[Sequence[int]], unused: Container[Request]
    ) -> None:
        """A plan has run and has given each of its rows these tokens; those of `unused` requests
        are not used. Called before `commit_tokens`, and only needed for plans with drafts."""
        if self._drafts is not None:
            self._drafts.judge(plan.decodes, tokens, unused)

    def jump(self, request: Request) -> None:
        """The engine has appended tokens that need no draw to `request.output`, at most
        `jump_capacity`. A chunk computes their KV, and the next token is drawn after it. The
        request's draw in flight, the only one, is not used."""
        if self._drafts is not None:
            self._drafts.forget(request)
        request.prefill_end = request.num_tokens
        request.num_scheduled_outputs = len(request.output)

    def jump_capacity(self, request: Request) -> int:
        """Tokens that a decoding request may jump ahead: those that its pages can hold."""
        return max(0, request.capacity - request.verified)

    def plan(self) -> Plan:
        """The next step, which may be empty. Advances the requests as if it had run. Of several
        groups it is the turn of the next one that has something to run."""
        offload = self.offload
        if offload is not None:
            offload.put_fetched(waits=False)
        for _ in range(self.limits.groups):
            self._slots.next_turn()
            decodes, drafts, chunks, preempted = self._select_in_turn()
            self._had_chunks[self._slots.turn] = bool(chunks)
            if decodes or chunks or preempted:
                break
        moves = None
        if offload is not None:
            offload.fetch_pending()
            if not (decodes or chunks):  # nothing runs beside the fetches: do not wait for a step
                offload.put_fetched(waits=True)
                arrived = self._slots.arrived(self._running)
                chunks = self.chunk_planner.plan(arrived, 0, None)
                self._had_chunks[self._slots.turn] = bool(chunks)
            moves = offload.flush()
        copies, table_writes = self.kv_manager.pop_page_changes()
        return Plan(
            decodes=tuple(decodes),
            chunks=chunks,
            preempted=tuple(preempted),
            copies=copies,
            table_writes=table_writes,
            moves=moves,
            group=self._slots.turn,
            drafts=drafts,
        )

    def _select_in_turn(self) -> Selected:
        """As `_select`, for the group whose turn it is; in a batch-invariant engine prompts and
        decodes take turns, too."""
        if not self._batch_invariant:
            return self._select(True, True)
        had = self._had_chunks[self._slots.turn]
        found = self._select(had, not had)
        # Pages in transit delay no other request
        if any(found):
            return found
        return self._select(not had, had)

    def check(self) -> None:
        """Raise `PoolError` if pages or slots are leaked or shared wrongly."""
        self.kv_manager.check(list(self._running))
        if self.offload is not None:
            self.offload.check(r.pinned for r in (*self._swapped, *self._waiting))
        self._slots.check(self._running)

    def _select(self, decode: bool, prefill: bool) -> Selected:
        """What runs next: decodes, if wanted, and parts of prompts, if wanted."""
        decoding = list[Request]()
        positions = list[int]()
        prefilling = list[Request]()
        preempted = list[Request]()
        running = Status.RUNNING
        for request in self._slots.of_turn(self._running):
            # Preempted by an earlier one just now, or waiting for its pages
            if request.status is not running or request.pages_in_transit:
                continue
            position = request.computed
            if position < request.prefill_end:
                if prefill and (
                    request.capacity >= request.prefill_end
                    or self._append_pages(request, position + 1, preempted)
                ):
                    prefilling.append(request)
                continue
            scheduled = request.num_scheduled_outputs
            if not decode or scheduled >= request.max_tokens:
                continue  # its last token is in flight, or it is not the decodes' turn
            if position >= request.capacity:
                # Drafts in flight may be all that the request still wants
                end = min(position + 1, request.kv_end)
                if not self._append_pages(request, end, preempted):
                    continue
            decoding.append(request)
            positions.append(position - request.drafts)
            request.computed = position + 1
            request.num_scheduled_outputs = scheduled + 1
        # Made together: a step has hundreds of rows
        decodes = list(map(Decode, decoding, positions))
        drafts = 0
        if self._drafts is not None:
            undrafted = len(decodes)
            decodes = self._drafts.extend(decodes, self._spare_tokens(undrafted, prefilling))
            drafts = sum(decode.count for decode in decodes) - undrafted
        if not prefill:
            return Selected(decodes, drafts, (), preempted)
        admit = None if preempted else self._admissions
        chunks = self.chunk_planner.plan(prefilling, len(decodes), admit, drafts)
        return Selected(decodes, drafts, chunks, preempted)

    def _spare_tokens(self, num_decodes: int, prefilling: Sequence[Request]) -> int:
        """Tokens that drafts may take beside so many decodes: half of those that are left, where
        prompts want them too."""
        left = max(0, self.limits.max_num_batched_tokens - num_decodes)
        if prefilling or self.waiting:
            return left // 2
        return left

    # --- admission

    def _admissions(self, chunks: list[Chunk]) -> Iterator[Request]:
        """Admit waiting requests one by one, in order, while slots and pages last."""
        while self.waiting:
            request = self._slots.next_to_admit(self._swapped or self._waiting)
            if (
                request is None
                or not self._slots.available(request, self.waiting)
                or not self._admit(request, chunks[-1] if chunks else None)
            ):
                return
            if not request.pages_in_transit:
                yield request

    def _admit(self, request: Request, newest: Chunk | None) -> bool:
        """Give the request a slot and all pages of its known tokens, shared ones first; False when
        it must wait.

        Pages for the whole prompt are allocated now, so a prompt in progress never waits for pages
        and never takes them from others. A sliding window bounds them; then a prompt may have to
        take more only when it releases pages that others still hold.
        """
        if request is self._refused:
            return False
        pages = self.kv_manager.lookup(request, newest)
        # Other beams of its search may hold slots and pages until it has run
        urgent = request.sharing is not None and request.sharing.active > 0
        careful = bool(self._running) and not urgent
        for pool, taken, watermark in zip(self.pools, pages.taken, self._watermarks, strict=True):
            if pool.free < taken + pages.reserve + (watermark if careful else 0):
                return False
        if careful and not self._expected_to_stay(request, pages):
            self._refused = request
            return False
        (self._swapped if request in self._swapped else self._waiting).remove(request)
        self.kv_manager.allocate(request, pages)
        request.slot = self._slots.assign(request)
        request.status = Status.RUNNING
        self._running.insert(request)
        return True

    def _expected_to_stay(self, request: Request, pages: AdmissionPages) -> bool:
        """Whether the request will not be preempted soon, as far as one can tell."""
        if self._batch_invariant:
            return fits_fully(self.pools, self._running, request, pages)
        return self.estimator.fits(self.pools, self._running, request, pages, self._step_cost)

    # --- pages

    def _append_pages(self, request: Request, end: int, preempted: list[Request]) -> bool:
        """Give the request pages for its tokens up to `end`, and release those out of its window.
        Preempts the last running requests when none are free; False when the request itself is
        preempted."""
        before = [pool.free for pool in self._windowed]
        while not self.kv_manager.append(request, request.verified, end):
            last = self._running.last
            if self._swaps and self.offload is not None:  # it will find its pages in host memory
                self.offload.pin(last, last.hashes[: last.verified // self.page_size])
            self._preempt(last)
            preempted.append(last)
            if last is request:
                return False
        if any(pool.free > free for pool, free in zip(self._windowed, before, strict=True)):
            self._refused = None
        return True

    def _preempt(self, request: Request) -> None:
        """Put a request that has run back into the queue."""
        self._requeue(request)
        request.num_preemptions += 1
        self.preemptions += 1

    def _send_back(self, requests: Iterable[Request]) -> None:
        """Requeue those whose pages in transit do not come; who has never run starts anew."""
        for request in requests:
            (self._preempt if request.has_run else self._requeue)(request)

    def _requeue(self, request: Request) -> None:
        """Put the request back into the queue, without slot and pages."""
        self._vacate(request)
        request.status = Status.WAITING
        (self._swapped if self._swaps else self._waiting).insert(request)

    def _vacate(self, request: Request) -> None:
        """Take slot and pages from a running request."""
        self._running.remove(request)
        self._refused = None
        self.kv_manager.release(request)
        self._slots.unassign(request)
        request.slot = -1
