"""The scheduler under random work: pages and order stay right, and every request ends."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxllm.engine.output.beam_search import Rules
from jaxllm.engine.scheduling.admission import AdmissionEstimator
from jaxllm.engine.scheduling.request import Request, Status
from tests.engine.fake_device import EOS, VOCAB
from tests.engine.fake_host import Optimist
from tests.engine.fake_loop import Loop, Setup


class Search(NamedTuple):
    """A beam search to queue."""

    prompt: list[int]
    rules: Rules
    priority: int


type Job = tuple[int, list[int], int, int | None, int, bool]

BASE = [(7 * i) % (VOCAB - 1) + 1 for i in range(200)]

SETTINGS = {
    "platform": st.sampled_from(["cpu", "gpu"]),
    "caching": st.booleans(),
    "policy": st.sampled_from(["fcfs", "priority"]),
    "estimator": st.sampled_from([Optimist, Optimist, AdmissionEstimator]),
    "host_pages": st.sampled_from([0, 0, 1, 3, 20]),
    "host_cached": st.sampled_from([0, 2, 20]),
    "max_fetches": st.integers(1, 4),
    "swaps": st.booleans(),
    "unsaved": st.sampled_from([0, 1, 2, 3]),
    "late": st.integers(0, 3),
    "slow": st.sampled_from([0, 0, 1, 3]),
    "delay": st.integers(0, 2),
    "drafts": st.sampled_from([0, 0, 1, 2, 3]),
    "batch_invariant": st.sampled_from([False, False, False, True]),
    "groups": st.sampled_from([1, 1, 1, 2, 3]),
}


def possible(setup: Setup) -> Setup:
    """Makes a setup legal: host memory needs layers without a window, a group a request, a step a
    token for each request, and a batch-invariant engine has no drafts."""
    groups = min(setup.groups, setup.max_num_seqs)
    tokens = max(setup.max_num_batched_tokens, setup.max_num_seqs if setup.batch_invariant else 1)
    return replace(
        setup,
        max_num_batched_tokens=tokens,
        host_pages=setup.host_pages if setup.windows == (None,) else 0,
        groups=groups,
        drafts=0 if setup.batch_invariant else setup.drafts,
    )


tiny = st.builds(
    Setup,
    page_size=st.integers(1, 5),
    num_pages=st.integers(2, 14),
    windows=st.sampled_from(
        [(None,), (None,), (1,), (3,), (9,), (None, 4), (6, None), (2, None, 7)]
    ),
    window_pages=st.none() | st.integers(2, 8),
    tile=st.sampled_from([1, 1, 3]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 40),
    **SETTINGS,
).map(possible)
roomy = st.builds(
    Setup,
    page_size=st.sampled_from([4, 16]),
    num_pages=st.integers(10, 60),
    windows=st.sampled_from([(None,), (None,), (5,), (40,), (None, 20), (16, None)]),
    window_pages=st.none() | st.integers(10, 40),
    tile=st.sampled_from([1, 1, 8]),
    max_num_seqs=st.integers(1, 20),
    max_num_batched_tokens=st.integers(16, 400),
    **SETTINGS,
).map(possible)

# The first choice has a draft in flight at the end of the page that the second one shares. So its
# next token, without a draft, needs a copy of this page and a new one.
DRAFTS_BEFORE_A_SHARED_PAGE = Setup(
    page_size=5,
    num_pages=3,
    max_num_seqs=2,
    max_num_batched_tokens=3,
    caching=False,
    estimator=Optimist,
    max_fetches=1,
    drafts=1,
)


@st.composite
def jobs(draw: st.DrawFn, longest: int) -> Job:
    """Jobs: choices, prompt, max_tokens, where the host stops them, priority, and whether the
    prompt is scored. Prompts share prefixes of every length."""
    shared = draw(st.integers(0, longest))
    own = draw(st.lists(st.integers(1, 3), min_size=0 if shared else 1, max_size=4))
    choices, priority = (
        draw(st.sampled_from([1, 1, 1, 2, 3, 5])),
        draw(st.sampled_from((0, 0, 1, -1, -300))),
    )
    stop_at, score = (
        draw(st.none() | st.integers(1, 12)),
        draw(st.sampled_from((False, False, False, True))),
    )
    return choices, BASE[:shared] + own, draw(st.integers(1, 20)), stop_at, priority, score


@st.composite
def searches(draw: st.DrawFn, longest: int) -> Search:
    """Beam searches whose prompts share prefixes with those of other requests."""
    rules = Rules(
        width=draw(st.integers(1, 5)),
        max_tokens=draw(st.integers(1, 12)),
        min_tokens=draw(st.integers(0, 3)),
        stops=frozenset([EOS, *draw(st.lists(st.integers(1, 5), max_size=2))]),
        length_penalty=draw(st.sampled_from([-1.0, 0.0, 1.0, 2.0])),
        early_stopping=draw(st.sampled_from([True, False, "never"])),
    )
    return Search(
        BASE[: draw(st.integers(1, longest))], rules, draw(st.sampled_from((0, 0, 1, -300)))
    )


def begin(loop: Loop, job: Job | Search) -> list[Request]:
    """Queues a job. Returns its first requests, none when it can never run."""
    if not isinstance(job, Search):
        return loop.add_choices(*job)
    beams = loop.search(*job)
    return [] if beams is None else beams.members[:1]


@st.composite
def schedules(draw: st.DrawFn, longest: int) -> list[tuple[int, Job | Search, int | None]]:
    """(steps before the arrival, job, steps from the arrival to an abort) of each request."""
    work = st.one_of(jobs(longest), jobs(longest), searches(longest))
    one = st.tuples(st.integers(0, 3), work, st.none() | st.integers(0, 15))
    return draw(st.lists(one, min_size=1, max_size=14))


def run(setup: Setup, schedule: list[tuple[int, Job | Search, int | None]]) -> Loop:
    loop = Loop(setup)
    aborts: list[tuple[int, int]] = []
    for gap, job, abort_after in schedule:
        for _ in range(gap):
            loop.step()
            for when, number in aborts:
                if loop.steps >= when:
                    loop.abort(loop.requests[number])
        family = begin(loop, job)
        if family and abort_after is not None:
            aborts.append((loop.steps + abort_after, int(family[abort_after % len(family)].id)))
    loop.drain()
    loop.check_ended()
    return loop


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tiny, schedules(12))
def test_everything_ends_with_the_tokens_it_gives_alone_in_tiny_pools(
    setup: Setup, schedule: list
) -> None:
    run(setup, schedule)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(roomy, schedules(150))
def test_everything_ends_with_the_tokens_it_gives_alone_when_chunks_are_cut_to_buckets(
    setup: Setup, schedule: list
) -> None:
    run(setup, schedule)


@settings(max_examples=60, deadline=None)
@given(tiny, st.lists(jobs(12), min_size=1, max_size=8))
@example(DRAFTS_BEFORE_A_SHARED_PAGE, [(2, [1, 8, 1], 4, None, 0, False)])
def test_running_twice_with_a_warm_index_gives_the_same_tokens(setup: Setup, work: list) -> None:
    loop = Loop(setup)
    for _ in range(2):
        for job in work:
            loop.add_choices(*job)
        loop.drain()
    loop.check_ended()


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, steps, tokens that need no draw, failures, aborts and resets."""

    @initialize(setup=tiny)
    def start(self, setup: Setup) -> None:
        self.loop = Loop(setup)

    @rule(job=jobs(12))
    def add(self, job: Job) -> None:
        self.loop.add_choices(*job)

    @precondition(lambda self: self.loop.scheduler.offload is not None)
    @rule(job=jobs(12))
    def add_what_comes(self, job: Job) -> None:
        self.loop.add_choices(*job, comes=True)

    @precondition(lambda self: self.loop.coming)
    @rule(number=st.integers(0, 9), count=st.integers(1, 4))
    def arrive(self, number: int, count: int) -> None:
        for _ in range(min(count, len(self.loop.coming))):
            self.loop.arrive(number)

    @precondition(lambda self: self.loop.coming)
    @rule(number=st.integers(0, 9))
    def miss(self, number: int) -> None:
        self.loop.miss(number)

    @rule(job=searches(12))
    def search(self, job: Search) -> None:
        begin(self.loop, job)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.loop.step()

    @precondition(lambda self: self.loop.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.loop.abort(data.draw(st.sampled_from(self.loop.requests)))

    @precondition(lambda self: self.loop.requests)
    @rule(data=st.data(), count=st.integers(1, 6))
    def jump(self, data: st.DataObject, count: int) -> None:
        self.loop.jump(data.draw(st.sampled_from(self.loop.requests)), count)

    @precondition(lambda self: self.loop.requests)
    @rule(data=st.data())
    def invalidate(self, data: st.DataObject) -> None:
        self.loop.invalidate(data.draw(st.sampled_from(self.loop.requests)))

    @rule()
    def start_again(self) -> None:
        self.loop.preempt_all()

    @precondition(lambda self: self.loop.prefix is not None)
    @rule()
    def forget_prefixes(self) -> None:
        self.loop.forget_prefixes()

    @invariant()
    def pages_and_slots_are_accounted_for(self) -> None:
        self.loop.scheduler.check()
        alive = sum(r.status is not Status.FINISHED for r in self.loop.requests)
        assert self.loop.scheduler.running + self.loop.scheduler.waiting == alive

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.drain()
            self.loop.check_ended()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
