"""Conversations whose pages do not fit the pool: what host memory gives back of them, in how many
steps."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from jaxllm.cache.host import HostTier
from jaxllm.cache.pool import PagePool
from jaxllm.cache.prefix import PrefixIndex
from jaxllm.engine.engine import Engine
from jaxllm.engine.runtime import page_swapper
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.scheduling.kv_offload import Link, OffloadManager
from jaxllm.engine.scheduling.plan import Limits, Moves, Plan, Traffic
from jaxllm.engine.scheduling.request import PageTable, Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.startup.host_memory import LEAVING, PLAN_LOADS
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams

MakeEngine = Callable[..., Engine]
PAGE, USERS, FIRST, NEW, OUTPUT = 64, 64, 2048, 128, 64  # tokens, but for the users


@dataclass
class Turn:
    """What the scheduler did for one turn of all users."""

    steps: int = 0
    extends: int = 0
    computed: int = 0  # prompt tokens
    found: int = 0  # likewise
    saved: int = 0
    loaded: int = 0
    most_fetched: int = 0  # by one plan

    def count(self, plan: Plan) -> None:
        self.steps += not plan.empty
        self.extends += bool(plan.chunks)
        self.computed += sum(chunk.length for chunk in plan.chunks)
        if plan.moves is not None:
            self.saved += len(plan.moves.saves)
            self.loaded += len(plan.moves.puts)
            self.most_fetched = max(self.most_fetched, len(plan.moves.fetches))


class Conversations:
    """A scheduler of the sizes of a 7B on one device, with a pool for a third of the users, and
    whoever talks to it. What a page and a fetch take was measured there."""

    def __init__(self, host_pages: int, moved: int = 8):
        index = PrefixIndex(PAGE, b"test")
        limits = Limits(max_num_seqs=64, max_num_batched_tokens=8192, max_model_len=4096)
        self.scheduler = Scheduler(
            limits, [PagePool(1000, PAGE, index)], Buckets.build(64, 8192, "gpu")
        )
        offload = OffloadManager(HostTier(host_pages, host_pages), index, PLAN_LOADS * moved)
        offload.link, offload.compute_seconds = Link(moved, 0.0005, 0.0001), 0.00146
        self.scheduler.attach_offload(offload, swap_preempted=False, share_prefixes=True)
        self._rng, self._numbers = random.Random(7), itertools.count()
        self._prompts = [self._tokens(FIRST - NEW) for _ in range(USERS)]
        self._flight: deque[Plan] = deque()

    def turn(self) -> Turn:
        """Everybody says something new and hears an answer."""
        done = Turn()
        requests = [self._ask(user) for user in range(USERS)]
        while self.scheduler.has_work or self._flight:
            plan = self.scheduler.plan()
            done.count(plan)
            if not plan.empty:
                self._flight.append(plan)
            while len(self._flight) > (not plan.empty):
                self._commit(self._flight.popleft())
        self.scheduler.check()
        done.found = sum(request.num_cached_tokens for request in requests)
        return done

    def _ask(self, user: int) -> Request:
        self._prompts[user] = self._prompts[user] + self._tokens(NEW)
        number = next(self._numbers)
        request = Request(
            id=str(number),
            index=0,
            prompt=Prompt(self._prompts[user]),
            params=SamplingParams(),
            seed=0,
            arrival=float(number),
            max_tokens=OUTPUT,
        )
        self.scheduler.add(request)
        return request

    def _commit(self, plan: Plan) -> None:
        for request in plan.emitters:
            if request is not None and request.status is Status.RUNNING:
                request.output.append(self._rng.randrange(30_000))
                self.scheduler.commit_tokens(request, 1)
                if len(request.output) == OUTPUT:
                    self.scheduler.finish(request)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(30_000) for _ in range(count)]


def test_no_prefix_is_computed_twice_while_host_memory_has_room_and_few_steps_admit_prompts() -> (
    None
):
    users = Conversations(host_pages=4681)
    first, *turns = [users.turn() for _ in range(4)]
    assert (first.computed, first.found) == (USERS * FIRST, 0)
    for number, turn in enumerate(turns, 1):
        known = USERS * (FIRST + (number - 1) * NEW)
        assert (turn.found, turn.computed) == (known, USERS * NEW), (
            "all that was computed before is found"
        )
        assert turn.loaded <= known // PAGE
        assert turn.most_fetched == PLAN_LOADS * 8
        # Three groups of users fit the pool one after another, 64 steps each; a step with a prompt
        # takes half as long again.
        assert turn.steps <= 230 and turn.extends <= 95
    assert sum(turn.saved for turn in (first, *turns)) <= USERS * (FIRST + 3 * NEW) // PAGE, (
        "no page leaves twice"
    )


def test_what_was_brought_back_is_forgotten_from_the_end_of_the_chain() -> None:
    tier, index = HostTier(3, 3), PrefixIndex(2, b"test")
    offload = OffloadManager(tier, index, max_fetches=4)
    keys = [b"a", b"b", b"c"]
    for page, key in enumerate(keys):
        offload.save_evicted(key, page)
    request = Request(
        id="",
        index=0,
        prompt=Prompt([1]),
        params=SamplingParams(),
        seed=0,
        arrival=0.0,
        max_tokens=1,
    )
    request.hashes, request.tables = keys, (PageTable([3, 4, 5]),)
    tier.pin(keys)
    offload.enqueue(request, 0, tier.find(keys))
    offload.fetch_pending()
    offload.put_fetched(waits=False)
    moves = offload.flush()
    assert moves is not None and len(moves.puts) == 3 and request.pages_in_transit == 0
    offload.save_evicted(b"d", 6)
    assert len(tier.find(keys)) == 2


# --- the device's side


@pytest.fixture(scope="module")
def swapping(make_engine: MakeEngine) -> Engine:
    return make_engine(num_gpu_blocks_override=20, preemption_mode="swap", swap_space=0.01)


def test_no_plan_waits_for_what_it_has_launched_itself(
    swapping: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That runs behind the step in flight: the next one would be launched late."""
    runner = swapping.runner
    swapper, width = page_swapper.PageSwapper(runner.programs, Traffic()), runner.shapes.moved_pages
    saves = [
        tuple((page % 20, program * width + page) for page in range(width))
        for program in range(LEAVING)
    ]
    loads = [(place, place % 20) for place in range(LEAVING * width)]
    runner.kv = swapper.run(runner.kv, Moves(tuple(itertools.chain(*saves)), (), ()))
    waited: list[Any] = []
    arrive = swapper._arrive

    def noted(line: deque[Any]) -> None:
        waited.append(line[0])
        arrive(line)

    monkeypatch.setattr(swapper, "_arrive", noted)
    for _ in range(3):
        before = [*swapper._out, *swapper._in]
        waited.clear()
        puts = tuple(loads[i % len(loads)] for i in range(PLAN_LOADS * width))
        runner.kv = swapper.run(
            runner.kv,
            Moves(tuple(itertools.chain(*saves)), tuple({place for place, _ in puts}), puts),
        )
        assert all(any(trip is other for other in before) for trip in waited)
        assert len(swapper._out) + len(swapper._in) == LEAVING + PLAN_LOADS, (
            "all of it may be under way"
        )
