"""The scheduler's decisions, one by one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from jaxllm.engine.scheduling.plan import Plan
from jaxllm.engine.scheduling.request import Status
from tests.engine.fake_device import generate
from tests.engine.fake_loop import Loop, Setup

ROOMY = Setup(page_size=4, num_pages=400, max_num_seqs=16, max_num_batched_tokens=512)


def chunks(plan: Plan) -> list[tuple[str, int, int, bool]]:
    return [(c.request.id, c.start, c.length, c.final) for c in plan.chunks]


def decodes(plan: Plan) -> list[tuple[str, int]]:
    return [(r.id, position) for r, position in zip(plan.decodes, plan.positions, strict=True)]


def prompt(n: int, first: int = 1) -> list[int]:
    """A prompt of n tokens; another `first` makes another prefix."""
    return [first, *([5] * (n - 1))]


def lasting(n: int, number: int, length: int = 3) -> list[int]:
    """A prompt of `length` tokens that outputs n tokens before it ends; `number` tells equal ones
    apart."""
    prompts = ([a, b] + [3] * (length - 2) for a in range(1, 50) for b in range(1, 50))
    return next(islice((p for p in prompts if len(generate(p, n, None)) == n), 30 * number, None))


def step_until(loop: Loop, condition: Callable[[Plan], object]) -> Plan:
    """The first plan that meets the condition."""
    for _ in range(100):
        plan = loop.step()
        if condition(plan):
            return plan
    raise AssertionError("did not happen in 100 steps")


def test_a_prompt_is_computed_and_then_decodes_one_token_a_step() -> None:
    loop = Loop(ROOMY)
    loop.add(prompt(6), 3)
    seen = [loop.step() for _ in range(4)]
    assert chunks(seen[0]) == [("0", 0, 6, True)] and not seen[0].decodes
    assert [decodes(p) for p in seen[1:3]] == [[("0", 6)], [("0", 7)]]
    assert seen[3].empty, "all three tokens are sampled or in flight"


def test_an_idle_scheduler_plans_nothing() -> None:
    loop = Loop(ROOMY)
    assert loop.scheduler.plan().empty and not loop.scheduler.has_work


def test_decodes_run_beside_a_new_prompt() -> None:
    loop = Loop(ROOMY)
    loop.add(prompt(6), 30)
    loop.step()
    loop.add(prompt(10, 2), 30)
    plan = loop.step()
    assert decodes(plan) == [("0", 6)] and chunks(plan) == [("1", 0, 10, True)]


def test_decodes_count_against_the_budget() -> None:
    loop = Loop(Setup(page_size=4, num_pages=100, max_num_batched_tokens=20, max_num_seqs=4))
    loop.add(prompt(6), 30)
    loop.step()
    loop.add(prompt(40, 2), 30)
    assert [chunks(loop.step()) for _ in range(3)] == [
        [("1", 0, 19, False)],
        [("1", 19, 19, False)],
        [("1", 38, 2, True)],
    ]


def test_a_begun_prompt_goes_before_newer_ones() -> None:
    loop = Loop(Setup(page_size=4, num_pages=100, max_num_batched_tokens=32))
    for first in (1, 2, 3):
        loop.add(prompt(20, first), 30)
    assert [c[:3] for c in chunks(loop.step())] == [("0", 0, 20), ("1", 0, 12)]
    assert [c[:3] for c in chunks(loop.step())] == [("1", 12, 8), ("2", 0, 20)]


def test_requests_wait_for_a_slot_in_order() -> None:
    loop = Loop(Setup(page_size=4, num_pages=100, max_num_seqs=2, max_num_batched_tokens=64))
    for first in (1, 2, 3, 4):
        loop.add(prompt(5, first), 2)
    assert [c[0] for c in chunks(loop.step())] == ["0", "1"]
    assert (loop.scheduler.running, loop.scheduler.waiting) == (2, 2)
    loop.drain()
    assert loop.first_tokens == [0, 1, 2, 3]


def test_a_large_head_of_the_queue_is_not_overtaken() -> None:
    loop = Loop(Setup(page_size=4, num_pages=10, max_num_seqs=4, max_num_batched_tokens=64))
    loop.add(prompt(20, 1), 4)
    loop.step()
    loop.add(prompt(30, 2), 2)  # 8 pages, 5 are left
    loop.add(prompt(2, 3), 2)
    assert not loop.step().chunks
    loop.drain()
    assert loop.first_tokens == [0, 1, 2]


def test_a_chunk_is_cut_at_a_shape_and_its_rest_comes_in_the_next_step() -> None:
    loop = Loop(
        Setup(
            page_size=16, num_pages=100, max_num_seqs=4, max_num_batched_tokens=2048, platform="gpu"
        )
    )
    loop.add(prompt(700), 4)
    assert chunks(loop.step()) == [("0", 0, 512, False)]
    loop.add(prompt(380, 2), 4)
    assert chunks(loop.step()) == [("0", 512, 188, True), ("1", 0, 324, False)], (
        "188 + 380 is cut as well, at its end"
    )
    assert chunks(loop.step()) == [("1", 324, 56, True)]


def test_a_cut_may_take_whole_prompts() -> None:
    loop = Loop(
        Setup(
            page_size=16, num_pages=100, max_num_seqs=4, max_num_batched_tokens=2048, platform="gpu"
        )
    )
    loop.add(prompt(508), 4)
    loop.add(prompt(4, 2), 4)
    loop.add(prompt(60, 3), 4)
    assert chunks(loop.step()) == [("0", 0, 508, True), ("1", 0, 4, True)]
    assert chunks(loop.step()) == [("2", 0, 60, True)]


def test_chunk_rows_are_limited_by_the_shapes() -> None:
    loop = Loop(
        Setup(
            page_size=4,
            num_pages=400,
            max_num_seqs=100,
            max_num_batched_tokens=1024,
            platform="gpu",
        )
    )
    for i in range(100):
        loop.add(prompt(4, i + 10), 4)
    assert len(loop.step().chunks) == 64
    assert len(loop.step().chunks) == 36


def test_a_page_is_allocated_when_a_decode_reaches_it() -> None:
    loop = Loop(ROOMY)
    request = loop.add(prompt(7), 10)
    held = []
    for _ in range(4):
        loop.step()
        held.append(len(request.pages))
    assert held == [2, 2, 3, 3], "prompt of 7; positions 7, 8, 9"


def test_shared_prefixes_are_computed_once() -> None:
    loop = Loop(ROOMY)
    loop.add(prompt(18), 1)
    loop.drain()
    second = loop.add(prompt(18), 1)
    assert chunks(loop.step()) == [("1", 16, 2, True)]
    assert second.num_cached_tokens == 16
    assert (loop.prefix.queries, loop.prefix.hits) == (36, 16)


def test_a_wholly_cached_prompt_still_computes_its_last_page() -> None:
    loop = Loop(ROOMY)
    for _ in range(2):
        loop.add(prompt(16), 1)
        plan = loop.step()
        loop.drain()
    assert chunks(plan) == [("1", 12, 4, True)]


def test_choices_that_arrive_together_share_their_prompt_within_one_step() -> None:
    loop = Loop(ROOMY)
    for _ in range(3):
        loop.add(prompt(18), 4)
    plan = loop.step()
    assert chunks(plan) == [("0", 0, 18, True), ("1", 16, 2, True), ("2", 16, 2, True)]
    pages = [c.request.pages for c in plan.chunks]
    assert pages[0][:4] == pages[1][:4] == pages[2][:4] and len({p[4] for p in pages}) == 3
    loop.drain()
    loop.check_ended()


def test_a_page_that_a_chunk_leaves_half_full_is_not_shared_in_that_step() -> None:
    loop = Loop(Setup(page_size=4, num_pages=100, max_num_batched_tokens=18))
    loop.add(prompt(30), 2)
    loop.add(prompt(30), 2)
    assert chunks(loop.step()) == [("0", 0, 18, False)]
    assert chunks(loop.step()) == [("0", 18, 12, True), ("1", 28, 2, True)]
    loop.drain()
    loop.check_ended()


def test_output_pages_are_findable_once_their_tokens_are_known_to_be_written() -> None:
    loop = Loop(ROOMY)
    first = loop.add(lasting(12, 0, length=6), 12)
    step_until(loop, lambda _: len(first.output) == 7)
    conversation = first.prompt.tokens + first.output
    assert len(conversation) == 13
    loop.scheduler.finish(first)
    loop.add([*conversation, 3, 3], 1)
    assert chunks(loop.step()) == [("1", 12, 3, True)]


def test_a_commit_of_several_tokens_registers_every_page_they_complete() -> None:
    loop = Loop(ROOMY)
    request = loop.add(prompt(6), 40)
    loop.scheduler.plan()
    for _ in range(12):
        loop.scheduler.plan()
    request.output += [3] * 12
    loop.scheduler.commit_tokens(request, 12)
    assert set(request.pages[:4]) == set(loop.prefix.pages), "17 of 18 tokens are written"


def test_without_an_index_nothing_is_shared() -> None:
    loop = Loop(Setup(page_size=4, num_pages=100, max_num_batched_tokens=64, caching=False))
    for _ in range(2):
        loop.add(prompt(18), 4)
    assert chunks(loop.step()) == [("0", 0, 18, True), ("1", 0, 18, True)]


def test_prompt_hashes_are_computed_once_and_kept() -> None:
    loop = Loop(Setup(page_size=4, num_pages=10, max_num_batched_tokens=64))
    loop.add(prompt(20, 1), 15)
    waiting = loop.add(prompt(24, 2), 2)
    loop.step()
    kept = list(waiting.hashes)
    calls = []
    extend = loop.prefix.extend
    loop.prefix.extend = lambda hashes, tokens: (calls.append(len(tokens)), extend(hashes, tokens))
    for _ in range(3):
        loop.step()
    assert waiting.hashes == kept and len(kept) == 6 and not calls


def test_the_newest_running_request_is_preempted_and_comes_back_first() -> None:
    loop = Loop(
        Setup(page_size=2, num_pages=6, max_num_seqs=3, max_num_batched_tokens=64, caching=False)
    )
    old, new = loop.add(lasting(9, 0), 9), loop.add(lasting(9, 1), 9)
    later = loop.add([5, 5, 5], 2)
    assert [c[0] for c in chunks(loop.step())] == ["0", "1"], "the third would take the reserve"
    plan = step_until(loop, lambda plan: plan.preempted)
    assert plan.preempted == (new,) and not plan.chunks
    assert (new.num_preemptions, loop.scheduler.preemptions) == (1, 1)
    assert (new.status, new.slot, new.pages, new.computed) == (Status.WAITING, -1, [], 0)
    assert list(loop.scheduler._waiting) == [new, later]
    assert old.num_preemptions == 0
    loop.drain()
    loop.check_ended()


def test_a_request_in_need_that_is_the_newest_preempts_itself() -> None:
    loop = Loop(
        Setup(page_size=2, num_pages=7, max_num_seqs=2, max_num_batched_tokens=64, caching=False)
    )
    old = loop.add(lasting(9, 0), 9)
    loop.step()
    new = loop.add(lasting(7, 1, length=4), 7)  # from now on both need a page in the same steps
    plan = step_until(loop, lambda plan: plan.preempted)
    assert plan.preempted == (new,) and plan.decodes == (old,)
    assert (len(old.pages), loop.pool.free) == (4, 3), (
        "the old one took the last page, the new one found none"
    )
    loop.drain()
    loop.check_ended()


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    loop = Loop(Setup(page_size=2, num_pages=8, max_num_seqs=2, max_num_batched_tokens=64))
    first, second = loop.add(lasting(9, 0), 9), loop.add(lasting(9, 1), 9)
    step_until(loop, lambda plan: plan.preempted)
    loop.abort(first)
    plan = step_until(loop, lambda plan: plan.chunks)
    assert plan.chunks[0].request is second and plan.chunks[0].start > 0
    assert second.num_cached_tokens == 0, "its own pages are no hit of the prompt"


def test_a_preempted_request_waits_for_its_token_in_flight() -> None:
    loop = Loop(Setup(page_size=2, num_pages=40, max_num_seqs=2, max_num_batched_tokens=64))
    request = loop.add([3, 3, 3], 8)
    loop.scheduler.plan()
    loop.scheduler._vacate(request)
    request.status = Status.WAITING
    loop.scheduler._waiting.insert(request)
    assert loop.scheduler.plan().empty
    request.output.append(7)
    loop.scheduler.commit_tokens(request, 1)
    assert chunks(loop.scheduler.plan()) == [("0", 2, 2, True)]
    assert request.num_scheduled_outputs == 2


def test_a_prompt_is_admitted_only_when_all_of_it_fits() -> None:
    loop = Loop(Setup(page_size=4, num_pages=10, max_num_seqs=4, max_num_batched_tokens=16))
    loop.add(prompt(16, 1), 4)
    loop.step()
    loop.add(prompt(24, 2), 2)  # 6 pages and one of reserve; 6 are free
    assert not loop.step().chunks


def test_the_last_pages_go_to_a_lone_request() -> None:
    loop = Loop(Setup(page_size=4, num_pages=6, max_num_seqs=4, max_num_batched_tokens=64))
    assert loop.scheduler.fits(24) and not loop.scheduler.fits(25)
    loop.add(prompt(23, 2), 2)
    assert loop.step().chunks[0].final
    loop.drain()
    loop.check_ended()
