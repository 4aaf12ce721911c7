"""Conversations whose pages do not fit the pool: what host memory gives back of them, in how many steps."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import pytest

from jaxllm.cache.host import HostTier
from jaxllm.cache.pool import PagePool
from jaxllm.cache.prefix import PrefixIndex
from jaxllm.engine import swap
from jaxllm.engine.buckets import Buckets
from jaxllm.engine.engine import Engine
from jaxllm.engine.ferry import Ferry, Link
from jaxllm.engine.host_memory import LEAVING, PLAN_LOADS
from jaxllm.engine.limits import Limits
from jaxllm.engine.plan import Moves, Plan, Traffic
from jaxllm.engine.request import Request, Status
from jaxllm.engine.scheduler import Scheduler
from jaxllm.sampling.options import SamplingParams
from tests.engine.test_unsaved import Unmade

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
    """A scheduler of the sizes of a 7B on one device, with a pool for a third of the users, and whoever talks to it. What a page and a
    fetch take was measured there."""

    def __init__(self, host_pages: int, moved: int = 8):
        index = PrefixIndex(PAGE, b"test")
        limits = Limits(max_num_seqs=64, max_num_batched_tokens=8192, max_model_len=4096)
        self.scheduler = Scheduler(limits, [PagePool(1000, PAGE, index)], Buckets.build(64, 8192, "gpu"))
        ferry = Ferry(HostTier(host_pages, host_pages), index, PLAN_LOADS * moved)
        ferry.link, ferry.compute_seconds = Link(moved, 0.0005, 0.0001), 0.00146
        self.scheduler.use_host(ferry, swaps=False, shares=True)
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
            id=str(number), index=0, prompt=self._prompts[user], params=SamplingParams(), seed=0, arrival=float(number), max_tokens=OUTPUT
        )
        self.scheduler.add(request)
        return request

    def _commit(self, plan: Plan) -> None:
        for request in plan.emitters:
            if request is not None and request.status is Status.RUNNING:
                request.output.append(self._rng.randrange(30_000))
                self.scheduler.committed(request, 1)
                if len(request.output) == OUTPUT:
                    self.scheduler.finish(request)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(30_000) for _ in range(count)]


def test_no_prefix_is_computed_twice_while_host_memory_has_room_and_few_steps_are_for_those_who_arrive() -> None:
    users = Conversations(host_pages=4681)
    first, *turns = [users.turn() for _ in range(4)]
    assert (first.computed, first.found) == (USERS * FIRST, 0)
    for number, turn in enumerate(turns, 1):
        known = USERS * (FIRST + (number - 1) * NEW)
        assert (turn.found, turn.computed) == (known, USERS * NEW), "all that was computed before is found"
        assert turn.loaded <= known // PAGE
        assert turn.most_fetched == PLAN_LOADS * 8
        # Three groups of users fit the pool one after another, 64 steps each; a step with a prompt takes half as long again.
        assert turn.steps <= 230 and turn.extends <= 95
    assert sum(turn.saved for turn in (first, *turns)) <= USERS * (FIRST + 3 * NEW) // PAGE, "no page leaves twice"


def test_what_was_brought_back_is_forgotten_from_the_end_of_the_chain() -> None:
    tier, index = HostTier(3, 3), PrefixIndex(2, b"test")
    ferry = Ferry(tier, index, seats=4)
    keys = [b"a", b"b", b"c"]
    for page, key in enumerate(keys):
        ferry.evicted(key, page)
    request = Request(id="", index=0, prompt=[1], params=SamplingParams(), seed=0, arrival=0.0, max_tokens=1)
    tier.keep(keys)
    ferry.load(request, keys, tier.find(keys), [3, 4, 5])
    ferry.board()
    ferry.land()
    moves = ferry.depart()
    assert moves is not None and len(moves.puts) == 3 and request.arriving == 0
    ferry.evicted(b"d", 6)
    assert len(tier.find(keys)) == 2


# --- the device's side


@pytest.fixture(scope="module")
def swapping(make_engine: MakeEngine) -> Engine:
    return make_engine(num_gpu_blocks_override=20, preemption_mode="swap", swap_space=0.01)


def test_no_plan_waits_for_what_it_has_launched_itself(swapping: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """That runs behind the step in flight: the next one would be launched late."""
    runner = swapping.runner
    swapper, width = swap.Swapper(runner.programs, Traffic()), runner.programs.moved
    saves = [tuple((page % 20, program * width + page) for page in range(width)) for program in range(LEAVING)]
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
        runner.kv = swapper.run(runner.kv, Moves(tuple(itertools.chain(*saves)), tuple({place for place, _ in puts}), puts))
        assert all(any(trip is other for other in before) for trip in waited)
        assert len(swapper._out) + len(swapper._in) == LEAVING + PLAN_LOADS, "all of it may be under way"


@pytest.mark.parametrize("room", [None, 2])
def test_memory_is_pinned_at_start_as_far_as_there_is_some(
    swapping: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int | None
) -> None:
    runner = swapping.runner
    plain = swap.Swapper(runner.programs, Traffic())
    monkeypatch.setattr(plain, "_to_host", lambda pages: pytest.fail("on CPU nothing is pinned"))
    runner.kv = plain.reserve(runner.kv, 100)
    monkeypatch.setattr(swap, "far_memory", lambda platform: swap.PINNED)
    swapper, width, asked = swap.Swapper(runner.programs, Traffic()), runner.programs.moved, list[int]()
    to_host = swapper._to_host

    def counted(pages: tuple[Any, ...]) -> Any:
        asked.append(len(pages))
        assert not jax.tree.leaves(swapper._kept) or jax.tree.leaves(swapper._kept)[0].sharding.memory_kind == swap.PINNED
        return to_host(pages) if room is None or len(asked) <= room else ((Unmade(),),) * len(pages)

    monkeypatch.setattr(swapper, "_to_host", counted)
    monkeypatch.setattr(swap, "pinned_whole", lambda pages, size: pages - 3)
    runner.kv = swapper.reserve(runner.kv, 6 * width + 4)
    assert asked == [width] * 6 + [1] if room is None else room < len(asked) <= room + LEAVING + 1
    assert (swap.NO_ROOM in caplog.text) == (room is not None)
    assert not (swapper._kept or swapper._leaving or swapper._out) and swapper.lost() == [] and swapper.traffic.saved == 0


def test_no_more_is_pinned_at_start_than_pages_take() -> None:
    """The client pins pieces of 2, 4, 8, ... MiB, each when those before have no room for another page."""
    for size, wished in itertools.product((2**19, 3_670_016, 7_340_032, 9_999_360), (2**20, 2**30, 5 * 2**30, 16 * 2**30, 40 * 2**30)):
        pages = wished // size
        count = swap.pinned_whole(pages, size)
        pieces = list(itertools.accumulate((2**n for n in range(21, 37)), lambda total, piece: total + piece))
        room = list(itertools.accumulate(2**n // size for n in range(21, 37)))
        pinned = next((total for total, fitting in zip(pieces, room, strict=True) if fitting >= count), 0) if count > 0 else 0
        assert 0 <= count <= pages and pinned <= wished * 1.04 and (wished < 2**30 or count * size > 0.48 * wished)
    assert swap.pinned_whole(4681, 3_670_016) > 4640, "nearly all of 16 GiB"
    assert swap.pinned_whole(0, 1) == 0
