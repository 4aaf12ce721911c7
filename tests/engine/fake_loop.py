"""The smallest engine loop, around a device without arithmetic."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jaxllm.cache.host import HostTier
from jaxllm.cache.pool import Lifetime, PagePool
from jaxllm.cache.prefix import PrefixIndex
from jaxllm.engine.intake.validation import max_pages
from jaxllm.engine.output.beam_requests import BeamRequests
from jaxllm.engine.output.beam_search import Rules
from jaxllm.engine.scheduling.admission import AdmissionEstimator
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.scheduling.kv_offload import OffloadManager
from jaxllm.engine.scheduling.plan import Limits, Moves, Plan
from jaxllm.engine.scheduling.policy import POLICIES
from jaxllm.engine.scheduling.request import PromptSharing, Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.fake_device import EOS, FakeDevice, digests, generate, likely
from tests.engine.fake_loop_checks import LoopChecks


@dataclass
class Setup:
    """Sizes of one engine."""

    page_size: int = 4
    num_pages: int = 16
    windows: tuple[int | None, ...] = (None,)  # of the kinds of layers
    window_pages: int | None = None  # of kinds with a window; None: as many as of the others
    tile: int = 1
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 32
    max_model_len: int = 1000
    platform: str = "cpu"
    caching: bool = True
    policy: str = "fcfs"
    host_pages: int = 0
    host_cached: int = 0
    max_fetches: int = 2  # pages that a plan fetches from host memory
    unsaved: int = 0  # every so-manieth page that is saved finds no memory there; 0: none
    # After how many more plans that move pages this shows; until then the device has them
    late: int = 0
    slow: int = 0  # how many questions in turn find that what was fetched is still on its way
    swaps: bool = False
    batch_invariant: bool = False
    estimator: type[AdmissionEstimator] = AdmissionEstimator
    drafts: int = 0  # of a decode at most; the device gets some of them wrong
    delay: int = 1  # steps between launch and commit; 0 is the engine without overlap
    groups: int = 1  # of slots, which run in turn

    @property
    def decoded(self) -> int:
        """Tokens of a request in the decodes of steps in flight and the next one."""
        return (1 + self.drafts) * (1 + self.delay)

    @property
    def step_seqs(self) -> int:
        """Requests of a step."""
        return -(-self.max_num_seqs // self.groups)


class Loop(LoopChecks):
    """The engine reduced to its order of events: plan and launch a step, then commit the one before
    it.

    Checks after every plan what must hold of any plan.
    """

    def __init__(self, setup: Setup):
        self.setup = setup
        build = Buckets.batch_invariant if setup.batch_invariant else Buckets.build
        self.buckets = build(setup.step_seqs, setup.max_num_batched_tokens, setup.platform)
        self.pools = [self._pool(window) for window in setup.windows]
        self.pool, self.prefix = self.pools[0], self.pools[0].index
        limits = Limits(
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=setup.max_model_len,
            groups=setup.groups,
        )
        self.scheduler = Scheduler(limits, self.pools, self.buckets, POLICIES[setup.policy])
        self.scheduler.estimator = setup.estimator()
        if setup.host_pages and self.prefix is not None:
            offload = OffloadManager(
                HostTier(setup.host_pages, min(setup.host_cached, setup.host_pages)),
                self.prefix,
                setup.max_fetches,
            )
            asked = itertools.count(1)
            offload.fetches_done = lambda: next(asked) % (setup.slow + 1) == 0
            self.scheduler.attach_offload(offload, setup.swaps, setup.caching)
        if setup.drafts:
            self.scheduler.attach_drafts(self._drafts_of)
        if setup.batch_invariant:
            self.scheduler.set_batch_invariant()
        # Findable pages that the plan took, kind and page: they may come to hold the same
        self._handed_out: set[tuple[int, int]] = set()
        for kind, pool in enumerate(self.pools):
            pool.on_evict = pool.on_evict or functools.partial(self._note, kind)
        lifetimes = [pool.lifetime for pool in self.pools]
        self.device = FakeDevice(setup.page_size, lifetimes, setup.drafts)
        self.requests: list[Request] = []  # in order of arrival
        self._numbers = itertools.count()
        # Whose pages were arriving when prefixes were forgotten, so that newer ones may be ahead
        self.sent_back: set[Request] = set()
        self.stop_at: dict[Request, int | None] = {}
        self.in_flight: deque[tuple[Plan, list[list[int]]]] = deque()
        self.aborted: set[Request] = set()
        self.jumped: set[Request] = set()  # of whom the step in flight draws what is not used
        # Tokens of prompts whose log-probabilities have been asked for
        self.scored: dict[Request, int] = {}
        self.searches: dict[str, BeamRequests] = {}  # that run
        # Those that have ended, with their prompts
        self.found: dict[str, tuple[BeamRequests, list[int]]] = {}
        # Arrival numbers, in the order in which first tokens were planned
        self.first_tokens: list[int] = []
        self.reached: dict[Request, int] = {}  # tokens computed in this life
        self.steps = self.saves = self.moves = 0
        # Pages that were promised: their prefix, their place, and what they hold
        self.coming: list[tuple[bytes, int, list[int]]] = []
        # By place in host memory: when it is found to have got nothing
        self.unsaved: dict[int, int] = {}

    def _note(self, kind: int, key: bytes, page: int) -> None:
        self._handed_out.add((kind, page))

    def _drafts_of(self, request: Request) -> int:
        """Some requests have fewer drafts, now and then none."""
        return max(0, self.setup.drafts - (len(request.output) + request.seed) % 3)

    def _pool(self, window: int | None) -> PagePool:
        setup = self.setup
        index = PrefixIndex(setup.page_size, b"test") if setup.caching or setup.host_pages else None
        lifetime = Lifetime(
            window,
            min(setup.max_num_batched_tokens, self.buckets.max_tokens),
            1 if window is None else setup.tile,
            setup.decoded,
        )
        fewer = window is not None and setup.window_pages is not None
        return PagePool(
            setup.window_pages if fewer else setup.num_pages, setup.page_size, index, lifetime
        )  # type: ignore[arg-type]

    def add(
        self, prompt: list[int], max_tokens: int, stop_at: int | None = None, priority: int = 0
    ) -> Request | None:
        """Queue a request; None when it can never run. It arrives a second after the one before."""
        return next(iter(self.add_choices(1, prompt, max_tokens, stop_at, priority)), None)

    def add_choices(
        self,
        n: int,
        prompt: list[int],
        max_tokens: int,
        stop_at: int | None = None,
        priority: int = 0,
        score: bool = False,
        comes: bool = False,
    ) -> list[Request]:
        """Queue the n choices of one prompt; none of them when they can never run. With `score` the
        prompt's log-probabilities are wanted. When it `comes`, what its pages hold is on its way to
        host memory."""
        if not self.scheduler.fits(len(prompt) + max_tokens - 1):
            return []
        family: list[Request] = []
        shared = PromptSharing(family)
        for seed in range(n):
            number, params = next(self._numbers), SamplingParams(priority=priority)
            request = Request(
                id=str(number),
                index=0,
                prompt=Prompt(prompt),
                params=params,
                seed=seed,
                arrival=float(number),
                max_tokens=max_tokens,
                stops=frozenset([EOS]),
            )
            request.score_end = len(prompt) - 1 if score and seed == 0 else 0
            family.append(request)
            if n > 1:
                request.sharing = shared
            self.requests.append(request)
            self.stop_at[request] = stop_at
            if comes and seed == 0:
                self._promise(request)
            elif comes:
                assert self.scheduler.offload is not None
                self.scheduler.offload.pin(request, family[0].pinned)
            self.scheduler.add(request)
        return family

    def _promise(self, request: Request) -> None:
        size = self.setup.page_size
        assert self.scheduler.offload is not None
        missing = self.scheduler.kv_manager.prefixes.missing(request)
        for key, place in self.scheduler.offload.promise(request, missing).items():
            self.unsaved.pop(place, None)
            self.device.host.pages.pop(place, None)
            end = (request.hashes.index(key) + 1) * size
            self.coming.append((key, place, [*digests(request.prompt.tokens[:end])[-size:]]))

    def arrive(self, number: int) -> None:
        """A page comes that was promised."""
        key, place, contents = self.coming.pop(number % len(self.coming))
        assert self.scheduler.offload is not None
        if self.scheduler.offload.host.arrive(key, place):
            self.device.host.pages[place] = contents

    def miss(self, number: int) -> None:
        """A page does not come that was promised; who waits for it starts again."""
        key, place, _ = self.coming.pop(number % len(self.coming))
        assert self.scheduler.offload is not None
        if self.scheduler.offload.host.is_promised(key, place):
            self._send_back(functools.partial(self.scheduler.drop_lost, [place]))
            self.scheduler.check()

    def search(self, prompt: list[int], rules: Rules, priority: int = 0) -> BeamRequests | None:
        """Queue a beam search; None when it can never run."""
        tokens = len(prompt) + rules.max_tokens - 1
        most = max_pages(self.pools, len(prompt), tokens, rules.width)
        fits = all(pages <= pool.num_pages for pages, pool in zip(most, self.pools, strict=True))
        if rules.width > self.setup.step_seqs or not fits:
            return None
        root = self.add(prompt, rules.max_tokens, priority=priority)
        if root is None:
            return None
        self.searches[root.id] = BeamRequests(rules, root, self.scheduler)
        return self.searches[root.id]

    def abort(self, request: Request) -> None:
        if request.id in self.searches:
            self.searches.pop(request.id).finish_all()
            return
        if request.status is not Status.FINISHED:
            self.aborted.add(request)
        self.scheduler.finish(request)

    def step(self) -> Plan:
        """One turn of the loop."""
        self.lose([place for place, when in self.unsaved.items() if when < self.moves])
        running = [r for r in self.requests if r.status is Status.RUNNING]
        before = self._readable()
        self._handed_out.clear()
        plan = self.scheduler.plan()
        before -= {
            (kind, page, key) for kind, page, key in before if (kind, page) in self._handed_out
        }
        self.check(plan, running)
        if plan.moves is not None:
            frozen = {page for _, page, _ in before & self._readable()}
            self.device.host.move(self.device.kv[0], self.setup.page_size, plan.moves, frozen)
            self._note_unsaved(plan.moves)
        assert not (plan.empty and plan.copies), "pages are copied by steps"
        if not plan.empty:
            self._check_scores(plan)
            self.in_flight.append(
                (
                    plan,
                    self.device.run(
                        plan, {(kind, page) for kind, page, _ in before & self._readable()}
                    ),
                )
            )
        while self.in_flight and (plan.empty or self._steps_of(plan.group) > self.setup.delay):
            self.commit(*self.in_flight.popleft())
        self.steps += 1
        return plan

    def _steps_of(self, group: int) -> int:
        """In flight."""
        return sum(plan.group == group for plan, _ in self.in_flight)

    def _readable(self) -> set[tuple[int, int, bytes]]:
        """Pages in use that hold a registered prefix, with their kind and its hash: nobody may
        write them while all stay."""
        pools = [
            (kind, pool, pool.index)
            for kind, pool in enumerate(self.pools)
            if pool.index is not None
        ]
        return {
            (kind, page, key)
            for kind, pool, index in pools
            for page, key in index.pages.items()
            if pool.references(page)
        }

    def forget_prefixes(self) -> None:
        """Requests to which pages were being brought start again."""
        self._send_back(self.scheduler.forget_prefixes)

    def preempt_all(self) -> None:
        """Every request that runs starts again."""
        running = [r for r in self.requests if r.status is Status.RUNNING]
        self.scheduler.preempt_all()
        for request in running:
            self.reached.pop(request, None)
        self.sent_back |= set(running)

    def invalidate(self, request: Request) -> None:
        """What it has computed is no number, and it ends."""
        self._send_back(functools.partial(self.scheduler.invalidate, request))
        self.abort(request)

    def jump(self, request: Request, count: int) -> None:
        """Somebody knows the next tokens of a request that is to draw one in the newest step, as a
        grammar may: so many are not drawn. Where there is no room for them, nothing happens."""
        while len(self.in_flight) > 1:
            self.commit(*self.in_flight.popleft())
        if (
            not self.in_flight
            or request not in self.in_flight[0][0].emitters
            or request in self.jumped
            or request.is_beam
        ):
            return
        room = (
            min(count, self.scheduler.jump_capacity(request))
            if request.status is Status.RUNNING
            else 0
        )
        known, said = (
            generate(
                request.prompt.tokens, request.max_tokens, self.stop_at[request], request.seed
            ),
            len(request.output),
        )
        forced = known[said : said + room]
        if forced:
            self._accept(request, forced)
        if forced and request.status is not Status.FINISHED:
            self.scheduler.jump(request)
            self.jumped.add(request)

    def lose(self, places: list[int]) -> None:
        """What was saved there is not; whom it was being brought to start again."""
        for place in places:
            del self.device.host.pages[place], self.unsaved[place]
        self._send_back(functools.partial(self.scheduler.drop_lost, places))
        self.scheduler.check()

    def _note_unsaved(self, moves: Moves) -> None:
        """What finds no memory; of a place, what was saved there last counts."""
        for _, place in moves.saves:
            self.saves += 1
            self.unsaved.pop(place, None)
            if self.setup.unsaved and self.saves % self.setup.unsaved == 0:
                self.unsaved[place] = self.moves + self.setup.late
        self.moves += 1

    def _send_back(self, action: Callable[[], None]) -> None:
        arriving = [r for r in self.requests if r.pages_in_transit]
        action()
        for request in arriving:
            if not request.pages_in_transit:
                self.reached.pop(request, None)
                self.sent_back.add(request)

    def drain(self) -> None:
        """Step until nothing is left, and all has come; fails when that takes longer than any fair
        schedule needs."""
        while self.coming:
            self.arrive(0)
        work = sum(len(r.prompt.tokens) + r.max_tokens for r in self.requests)
        limit = self.steps + 50 + 10 * work
        while self.scheduler.has_work or self.in_flight:
            self.step()
            assert self.steps < limit, "requests do not end"

    def commit(self, plan: Plan, rows: list[list[int]]) -> None:
        if plan.drafts:
            self.scheduler.judge_drafts(plan, rows, self.jumped)
            self._note_accepted(plan, rows)
        for request, tokens in zip(plan.emitters, rows, strict=True):
            if request is None or request.status is Status.FINISHED:
                continue
            if request in self.jumped:
                self.jumped.remove(request)
                continue
            assert tokens, "the device stopped a row that the host did not"
            if request.id in self.searches:
                self._feed(request)
                continue
            self._accept(request, tokens)
            self.scheduler.check()

    def _note_accepted(self, plan: Plan, rows: list[list[int]]) -> None:
        for decode, tokens in zip(plan.decodes, rows, strict=False):
            request = decode.request
            if request.status is Status.RUNNING and tokens and request not in self.jumped:
                self.reached[request] += len(tokens) - 1

    def _accept(self, request: Request, tokens: list[int]) -> None:
        """Up to the one with which the request ends."""
        wanted = min(request.max_tokens, self.stop_at[request] or request.max_tokens)
        tokens = tokens[: wanted - len(request.output)]
        if EOS in tokens:
            tokens = tokens[: tokens.index(EOS) + 1]
        request.output += tokens
        self.scheduler.commit_tokens(request, len(tokens))
        if tokens[-1] == EOS or len(request.output) == wanted:
            self.scheduler.finish(request)

    def _feed(self, request: Request) -> None:
        """The most likely tokens of a beam; forks begin where their parents are."""
        beams = self.searches[request.id]
        if beams.add_top_tokens(
            request, likely(request.prompt.tokens + request.output, beams.search.needed)
        ):
            self.found[request.id] = (self.searches.pop(request.id), request.prompt.tokens)
        for member in beams.members:
            if member not in self.requests:
                self.requests.append(member)
                if member.status is Status.RUNNING:
                    self.reached[member] = member.computed
        self.scheduler.check()
