"""Choices of one prompt start from the pages of the one that has computed it, and copy a page
before they write it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxllm.cache.pool import PagePool
from jaxllm.cache.prefix import PrefixIndex
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.scheduling.plan import Plan
from jaxllm.engine.scheduling.request import PromptSharing, Request, Status
from jaxllm.engine.scheduling.scheduler import Limits, Scheduler
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.fake_device import EOS, generate
from tests.engine.fake_host import Optimist
from tests.engine.fake_loop import Loop, Setup

PAGE = 4


def setup(caching: bool, **sizes: int) -> Setup:
    return Setup(
        **(
            {"page_size": PAGE, "num_pages": 200, "max_num_seqs": 8, "max_num_batched_tokens": 64}
            | sizes
        ),
        caching=caching,
    )


def lasting(length: int, n: int, tokens: int) -> list[int]:
    """A prompt of `length` tokens whose n choices all output at least `tokens` tokens."""
    for first in range(1, 31):
        for second in range(1, 31):
            prompt = [first, second, *[5] * (length - 2)]
            if all(EOS not in generate(prompt, tokens, None, seed) for seed in range(n)):
                return prompt
    raise AssertionError("no such prompt")


def chunks(plan: Plan) -> list[tuple[str, int, int]]:
    return [(c.request.id, c.start, c.length) for c in plan.chunks]


def used(loop: Loop) -> int:
    return loop.pool.num_pages - loop.pool.free


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_a_prompt_is_computed_once_and_its_other_choices_begin_in_the_same_step(
    length: int, caching: bool
) -> None:
    loop = Loop(setup(caching))
    family = loop.add_choices(3, [7] * length, 6)
    plan = loop.step()
    assert chunks(plan) == [("0", 0, length), ("1", length - 1, 1), ("2", length - 1, 1)]
    assert not plan.copies and used(loop) == -(-length // PAGE)
    assert all(r.pages == family[0].pages for r in family)
    loop.drain()
    loop.check_ended()


@pytest.mark.parametrize("caching", [True, False])
def test_whoever_writes_a_page_that_others_hold_copies_it_and_the_last_holder_does_not(
    caching: bool,
) -> None:
    loop = Loop(setup(caching))
    family = loop.add_choices(4, lasting(6, 4, 8), 8)
    loop.step()
    first, shared = family[0].pages
    plan = loop.step()
    assert [source for source, _, _ in plan.copies] == [shared] * 3
    assert [r.pages for r in family] == [[first, target] for _, target, _ in plan.copies] + [
        [first, shared]
    ]
    assert not loop.step().copies
    loop.drain()
    loop.check_ended()


def test_a_prompt_of_whole_pages_needs_no_copies() -> None:
    loop = Loop(setup(True))
    loop.add_choices(4, lasting(8, 4, 8), 8)
    assert not any(loop.step().copies for _ in range(6))
    assert used(loop) == 2 + 4 * 2


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [2048, 2040])
def test_four_samples_of_a_long_prompt_hold_one_prompt_and_four_tails(
    length: int, caching: bool
) -> None:
    pool = PagePool(1000, 64, PrefixIndex(64, b"test") if caching else None)
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=4096, max_model_len=4096)
    scheduler = Scheduler(limits, [pool], Buckets.build(8, 4096, "gpu"))
    family: list[Request] = []
    shared = PromptSharing(family)
    for index in range(4):
        params = SamplingParams(max_tokens=300)
        family.append(
            Request(
                id="a",
                index=index,
                prompt=Prompt([5] * length),
                params=params,
                seed=index,
                arrival=0,
                max_tokens=300,
            )
        )
        family[-1].sharing = shared
        scheduler.add(family[-1])
    whole = length // 64
    for step in range(300):
        plan = scheduler.plan()
        assert len(plan.decodes) + len(plan.chunks) == 4
        for request in [*plan.decodes, *(chunk.request for chunk in plan.chunks)]:
            request.output.append(request.index)
            scheduler.commit_tokens(request, 1)
        tails = 4 * (-(-(length + step) // 64) - whole)
        assert pool.num_pages - pool.free <= 1.05 * (whole + tails)
    for request in family:
        scheduler.finish(request)
    scheduler.check()
    assert pool.free == pool.num_pages


def test_choices_that_wait_hold_neither_slots_nor_pages() -> None:
    loop = Loop(setup(False, max_num_seqs=2))
    family = loop.add_choices(4, lasting(6, 4, 8), 8)
    for _ in range(4):
        loop.step()
    assert [r.status for r in family] == [Status.RUNNING] * 2 + [Status.WAITING] * 2
    assert (
        not any(r.pages or r.slot >= 0 for r in family[2:])
        and used(loop) == sum(len(r.pages) for r in family) - 1
    )
    loop.drain()
    loop.check_ended()


def test_a_choice_that_comes_late_starts_from_a_page_that_the_first_has_written_on() -> None:
    loop = Loop(setup(True, max_num_seqs=2))
    one, _, late = loop.add_choices(3, lasting(5, 3, 9), 9, stop_at=None)
    loop.stop_at[loop.requests[1]] = 2  # its slot is for the late one
    while late.status is Status.WAITING:
        plan = loop.step()
    assert chunks(plan) == [("2", 4, 1)]
    assert late.pages == one.pages[:2] and one.computed > 5
    loop.drain()
    loop.check_ended()


def test_a_page_that_the_index_finds_is_copied_though_nobody_else_holds_it() -> None:
    loop = Loop(setup(True, max_num_seqs=2))
    one, two, late = loop.add_choices(3, lasting(5, 3, 9), 9)
    loop.stop_at[two] = 6
    while late.status is Status.WAITING:
        loop.step()
    shared = one.pages[1]
    loop.abort(one)
    assert shared in loop.prefix.pages and loop.pool.references(shared) == 1
    plan = loop.step()
    assert [source for source, _, _ in plan.copies] == [shared] and shared in loop.prefix.pages
    loop.drain()
    loop.check_ended()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_the_first_choice_may_end_before_the_others_begin(steps: int) -> None:
    loop = Loop(setup(False, max_num_batched_tokens=16, max_num_seqs=3))
    family = loop.add_choices(3, lasting(40, 3, 5), 5)
    for _ in range(steps):
        loop.step()
    loop.abort(family[0])
    loop.drain()
    loop.check_ended()
    assert [len(r.output) for r in family[1:]] == [5, 5]


def test_a_preempted_choice_computes_again_only_what_is_its_own() -> None:
    loop = Loop(replace(setup(False, num_pages=13), estimator=Optimist))
    _, second, third = loop.add_choices(3, lasting(26, 3, 24), 24)
    while not third.num_preemptions:
        loop.step()
    loop.abort(second)
    while third.status is Status.WAITING:
        plan = loop.step()
    assert chunks(plan) == [("2", 24, third.num_tokens - 24)]
    loop.drain()
    loop.check_ended()


def test_choices_are_not_begun_without_room_for_the_page_that_each_writes_next() -> None:
    loop = Loop(setup(False, num_pages=8, max_num_seqs=8))
    loop.add_choices(8, lasting(18, 8, 12), 12)  # 5 pages, so 3 are left, some of them in reserve
    loop.step()
    assert (loop.scheduler.running, loop.scheduler.waiting) == (2, 6)
    loop.drain()
    loop.check_ended()


def test_cached_tokens_are_those_that_the_prompt_found() -> None:
    loop = Loop(setup(True))
    loop.add([5] * 10, 1)
    loop.drain()
    family: list[Request] = loop.add_choices(3, [5] * 10 + [6, 7, 8], 4)
    loop.step()
    assert [r.num_cached_tokens for r in family] == [8, 8, 8]
    assert loop.prefix.queries == 10 + 13 and loop.prefix.hits == 8
    loop.drain()


@pytest.mark.parametrize("cached", [0, 8])
def test_what_a_family_has_computed_itself_is_no_hit_of_its_late_choices(cached: int) -> None:
    loop = Loop(setup(True, max_num_seqs=2))
    prompt = [5] * 10 + [6, 7, 8]
    if cached:
        loop.add(prompt[:10], 1)
        loop.drain()
    before = loop.prefix.queries
    family = loop.add_choices(7, prompt, 1)  # most of them start when the first ones have ended
    loop.drain()
    assert [r.num_cached_tokens for r in family] == [cached] * 7
    assert (loop.prefix.queries - before, loop.prefix.hits) == (13, cached)


def test_a_choice_that_comes_back_holds_the_pages_that_its_family_holds_and_not_their_equals() -> (
    None
):
    loop = Loop(setup(True, num_pages=40))
    family = loop.add_choices(2, lasting(8, 2, 30), 30)
    for _ in range(8):
        loop.step()
    one, two = family
    loop.scheduler._preempt(two)
    loop.reached.pop(two)
    # As if the index found another page with the contents of the first
    equal = loop.pool.allocate(1)[0]
    key = loop.prefix._hash_of.pop(one.pages[0])
    loop.prefix._page_of.pop(key)
    loop.prefix.register(key, equal)
    loop.pool.release([equal])
    while two.status is Status.WAITING:
        loop.step()
    assert two.pages[:2] == one.pages[:2]
    loop.drain()
    loop.check_ended()
