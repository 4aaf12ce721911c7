"""Pages move to host memory and back: when, and for which requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from jaxllm.engine.scheduling.buckets import ExtendShape
from jaxllm.engine.scheduling.chunk_planner import seconds_per_token
from jaxllm.engine.scheduling.kv_offload import Link
from jaxllm.engine.scheduling.plan import Plan
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.sampling.options import SamplingParams
from tests.engine.fake_host import Optimist
from tests.engine.fake_loop import Loop, Setup
from tests.engine.scheduling.test_scheduler import lasting

SMALL = Setup(
    page_size=2,
    num_pages=8,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    estimator=Optimist,
    host_pages=16,
    swaps=True,
    caching=False,
)


def until(loop: Loop, condition: Callable[[Plan], Any]) -> Plan:
    for _ in range(200):
        plan = loop.step()
        if condition(plan):
            return plan
    raise AssertionError("did not happen in 200 steps")


def two_that_do_not_fit(setup: Setup = SMALL) -> tuple[Loop, Request, Request]:
    loop = Loop(setup)
    first, second = loop.add(lasting(12, 0, length=4), 12), loop.add(lasting(12, 1, length=4), 12)
    assert first is not None and second is not None
    return loop, first, second


def saved(loop: Loop) -> int:
    return loop.device.host.traffic.saved


def test_a_page_leaves_in_the_plan_that_hands_it_out_and_only_then() -> None:
    loop, first, second = two_that_do_not_fit()
    left = 0
    while first.status is not Status.FINISHED:
        before = set(first.pages)
        moves = loop.step().moves
        if moves is not None and second.status is Status.WAITING:
            assert {page for page, _ in moves.saves} <= set(first.pages) - before
            left += len(moves.saves)
    assert second.num_preemptions == 1 and left >= 3
    assert 0 < len(second.pinned) <= 7
    loop.drain()
    loop.check_ended()


def test_with_prefix_caching_off_nobody_finds_what_another_has_computed() -> None:
    loop = Loop(SMALL)
    for _ in range(2):
        loop.add([5, 6, 7, 8, 9], 2)
        (chunk,) = loop.step().chunks
        assert (chunk.start, chunk.length) == (0, 5)
        loop.drain()


def test_pages_are_fetched_beside_a_step_and_put_by_the_next_plan() -> None:
    loop = Loop(replace(SMALL, num_pages=12, max_num_seqs=3))
    # When the second has ended the third comes back beside the first
    for seed, tokens in enumerate((22, 8, 12)):
        loop.add(lasting(tokens, seed, length=2), tokens)
    beside = 0
    while loop.scheduler.has_work or loop.in_flight:
        plan = loop.step()
        while plan.moves is not None and plan.moves.fetches and plan.decodes:
            places = plan.moves.fetches
            assert not {place for place, _ in plan.moves.puts} & set(places), (
                "the step would wait for the copy"
            )
            plan = loop.step()
            assert plan.moves is not None and [place for place, _ in plan.moves.puts] == list(
                places
            )
            beside += 1
    assert beside > 0
    loop.check_ended()


def test_nothing_waits_for_a_step_when_nothing_else_runs() -> None:
    loop, first, second = two_that_do_not_fit()
    until(loop, lambda _: saved(loop) >= 3)
    loop.abort(first)
    plan = until(loop, lambda plan: plan.moves is not None and plan.moves.fetches)
    assert plan.moves is not None and [place for place, _ in plan.moves.puts] == list(
        plan.moves.fetches
    )
    assert second.status is Status.RUNNING
    loop.drain()
    loop.check_ended()


def test_a_plan_fetches_no_more_than_it_may() -> None:
    loop = Loop(
        Setup(
            page_size=2,
            num_pages=24,
            max_num_seqs=2,
            max_num_batched_tokens=64,
            estimator=Optimist,
            host_pages=40,
            swaps=True,
            max_fetches=3,
        )
    )
    first, second = loop.add(lasting(24, 0, length=20), 24), loop.add(lasting(24, 1, length=20), 24)
    assert first is not None and second is not None
    until(loop, lambda plan: plan.preempted)
    fetched = []
    while loop.scheduler.has_work or loop.in_flight:
        moves = loop.step().moves
        fetched.append(len(moves.fetches) if moves is not None else 0)
    assert max(fetched) == 3 and sum(fetched) > 3
    loop.check_ended()


@pytest.mark.parametrize("swaps", [True, False])
def test_swapped_requests_come_back_before_new_ones_start_though_those_are_more_urgent(
    swaps: bool,
) -> None:
    loop, _, second = two_that_do_not_fit(
        replace(SMALL, max_num_seqs=3, swaps=swaps, policy="priority")
    )
    until(loop, lambda plan: plan.preempted)
    urgent = loop.add([9, 9], 2, priority=-1000)
    assert urgent is not None
    until(
        loop, lambda _: urgent.status is not Status.WAITING or second.status is not Status.WAITING
    )
    assert (second.status is Status.RUNNING) == swaps, (
        "who is computed again waits with the new ones"
    )
    loop.drain()
    loop.check_ended()


def test_a_swapped_request_that_leaves_takes_its_pages_along() -> None:
    loop, _, second = two_that_do_not_fit()
    until(loop, lambda plan: plan.preempted)
    offload = loop.scheduler.offload
    assert offload is not None
    loop.step()
    loop.abort(second)
    assert offload.host.used == 0
    loop.drain()
    loop.check_ended()


def test_a_request_that_leaves_while_its_pages_arrive_leaves_nothing_behind() -> None:
    loop, first, second = two_that_do_not_fit(Setup(**{**vars(SMALL), "max_fetches": 1}))
    until(loop, lambda _: saved(loop) >= 3)
    loop.abort(first)
    until(loop, lambda _: second.pages_in_transit)
    loop.abort(second)
    loop.scheduler.check()
    loop.drain()
    loop.check_ended()


def test_evicted_prefixes_come_back_from_host_memory_when_that_is_worth_it() -> None:
    setup = Setup(
        page_size=2,
        num_pages=8,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        host_pages=8,
        host_cached=8,
    )
    for link, compute, worth in (  # two pages are in host memory, and one still in the pool
        (Link(), float("inf"), True),
        (Link(4, 1.0, 0.0), 0.1, False),
        (Link(4, 1.0, 0.0), 0.6, True),
        (Link(4, 0.1, 0.3), 0.34, False),
        (Link(4, 0.1, 0.3), 0.36, True),
        (Link(1, 0.1, 0.3), 0.36, False),  # a program for each
        (Link(32, 0.5, 0.14), 1.28, True),  # a program could take many more
    ):
        loop = Loop(setup)
        offload = loop.scheduler.offload
        assert offload is not None
        offload.link, offload.compute_seconds = link, compute
        for prompt in (
            [1, 2, 3, 4, 5, 6, 7],
            [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21],
            [1, 2, 3, 4, 5, 6, 7],
        ):
            loop.add(prompt, 4)
            loop.drain()
        assert (loop.device.host.traffic.loaded > 0) == worth, (link, compute)
        assert (loop.requests[-1].num_cached_tokens == 6) == worth
        loop.check_ended()


def test_the_price_of_fetching_is_that_of_the_pages_that_travel() -> None:
    link = Link.measured(32, one=0.64, full=4.98)
    assert [link.seconds(pages) for pages in (0, 1, 5, 32, 33)] == pytest.approx(
        [0, 0.64, 1.2, 4.98, 5.62]
    )
    assert Link.measured(32, one=5.0, full=4.0).seconds(1) == 4.0, (
        "a measurement that something disturbed"
    )
    assert Link.measured(32, one=0.01, full=4.0).seconds(32) >= 4.0
    assert Link.measured(1, one=0.3, full=0.4).seconds(3) == pytest.approx(1.2)


def test_a_spoiled_prefix_is_not_brought_to_anybody() -> None:
    loop, first, second = two_that_do_not_fit(
        Setup(**{**vars(SMALL), "caching": True, "host_cached": 16, "max_fetches": 1})
    )
    until(loop, lambda _: saved(loop) >= 3)
    loop.abort(first)
    until(loop, lambda _: second.pages_in_transit)
    invalidated = Request(
        id="x",
        index=0,
        prompt=second.prompt,
        params=SamplingParams(),
        seed=0,
        arrival=0.0,
        max_tokens=1,
        hashes=list(second.hashes),
    )
    loop.scheduler.invalidate(invalidated)
    assert (second.status, second.pages_in_transit, second.pages) == (Status.WAITING, 0, [])
    loop.reached.pop(second, None)
    loop.scheduler.check()
    loop.drain()
    loop.check_ended()


def test_the_price_of_a_token_is_that_of_the_best_shape() -> None:
    assert seconds_per_token(
        {ExtendShape(64, 4, 0): 0.64, ExtendShape(512, 4, 0): 0.512, 4: 0.1}
    ) == pytest.approx(0.001)
    assert seconds_per_token({}) == float("inf")


def test_no_step_waits_for_pages_that_are_on_their_way_to_the_device() -> None:
    loop = Loop(Setup(num_pages=30, host_pages=8, host_cached=8, slow=10**9))
    first = loop.add([1, 2, 3], 12)
    loop.add_choices(1, [*range(1, 10)], 2, comes=True)
    second = loop.requests[1]
    while loop.coming:
        loop.arrive(0)
    beside = 0
    while first is not None and first.num_scheduled_outputs < first.max_tokens:
        plan = loop.step()
        beside += bool(plan.decodes)
        assert second.pages_in_transit == 2 and (plan.moves is None or not plan.moves.puts)
        if first.status is Status.FINISHED:
            break
    assert beside > 3
    loop.drain()  # nothing else runs: the device waits for them
    loop.check_ended()
    assert second.num_cached_tokens == 8


def test_a_prompt_is_counted_as_looked_up_when_it_first_runs_and_never_again() -> None:
    loop = Loop(Setup(num_pages=30, host_pages=8, host_cached=8))
    loop.add([1, 2, 3], 12)
    loop.add_choices(2, [*range(1, 10)], 2, comes=True)
    first, *_ = choices = loop.requests[1:]
    until(loop, lambda _: first.pages_in_transit)
    assert first.status is Status.RUNNING and loop.prefix.queries == 3
    loop.miss(1)  # its second page
    assert first.status is Status.WAITING and not first.has_run
    while loop.coming:
        loop.arrive(0)
    until(loop, lambda _: all(choice.has_run for choice in choices))
    assert (loop.prefix.queries, loop.prefix.hits) == (3 + 9, 4)
    assert [choice.num_cached_tokens for choice in choices] == [4, 4]
    loop.preempt_all()
    loop.drain()
    loop.check_ended()
    assert (loop.prefix.queries, loop.prefix.hits) == (3 + 9, 4)


def test_choices_wait_for_one_copy_of_the_pages_that_come() -> None:
    loop = Loop(Setup(num_pages=30, max_num_seqs=4, host_pages=8, host_cached=8))
    choices = loop.add_choices(3, [*range(1, 10)], 2, comes=True)
    loop.step()
    first, second, third = choices
    assert [choice.pages_in_transit for choice in choices] == [2, 2, 2]
    assert first.pages[:2] == second.pages[:2] == third.pages[:2]
    loop.abort(first)  # the others go on to wait
    while loop.coming:
        loop.arrive(0)
    fetched = list[int]()
    while not (second.has_run and third.has_run):
        moves = loop.step().moves
        fetched += [] if moves is None else moves.fetches
    assert len(fetched) == 2
    assert [choice.num_cached_tokens for choice in (second, third)] == [8, 8]
    loop.drain()
    loop.check_ended()


def test_a_page_that_does_not_come_sends_all_back_who_wait_for_it() -> None:
    loop = Loop(Setup(num_pages=30, max_num_seqs=4, host_pages=8, host_cached=8))
    choices = loop.add_choices(3, [*range(1, 10)], 2, comes=True)
    loop.step()
    loop.miss(1)
    assert [(c.status, c.pages_in_transit, c.pages) for c in choices] == [
        (Status.WAITING, 0, [])
    ] * 3
    loop.arrive(0)
    loop.drain()
    loop.check_ended()
    assert [choice.num_cached_tokens for choice in choices] == [4, 4, 4]


def test_requests_of_one_prefix_in_host_memory_bring_it_once() -> None:
    loop = Loop(Setup(page_size=2, num_pages=12, max_num_seqs=4, host_pages=16, host_cached=16))
    assert loop.scheduler.offload is not None
    prefix = [7, 8, 9, 7, 8, 9, 7, 8]
    loop.add([*prefix, 1], 1)
    loop.drain()
    loop.add(lasting(20, 0, length=4), 20)  # takes its pages
    loop.drain()
    assert loop.prefix.match(loop.requests[0].hashes, 4) == [] and saved(loop) >= 4
    loop.scheduler.offload.compute_seconds = 1.0
    one, other = loop.add([*prefix, 2], 1), loop.add([*prefix, 3], 1)
    assert one is not None and other is not None
    plan = until(loop, lambda _: one.pages_in_transit)
    assert other.pages_in_transit == one.pages_in_transit and other.pages[:4] == one.pages[:4]
    fetched = list(plan.moves.fetches) if plan.moves else []
    while loop.scheduler.has_work:
        moves = loop.step().moves
        fetched += [] if moves is None else moves.fetches
    assert len(fetched) == len(set(fetched)) == 4
    assert loop.scheduler.offload.in_transit(one.hashes) == []
    loop.drain()
    loop.check_ended()
