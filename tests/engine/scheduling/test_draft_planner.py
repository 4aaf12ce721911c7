"""Decodes with drafts: what they may take, and what is known of them before they are judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxllm.cache.pool import PoolError
from jaxllm.engine.scheduling.plan import Plan, pages_of_decode
from jaxllm.engine.scheduling.request import Request
from tests.engine.fake_host import Optimist
from tests.engine.fake_loop import Loop, Setup
from tests.engine.scheduling.test_scheduler import ROOMY, lasting, step_until

DRAFTING = replace(ROOMY, drafts=3)


def three(loop: Loop) -> None:
    """Every decode wants three drafts."""
    loop.scheduler.attach_drafts(lambda _: 3)


def added(loop: Loop, prompt: list[int], max_tokens: int) -> Request:
    request = loop.add(prompt, max_tokens)
    assert request is not None
    return request


def counts(plan: Plan) -> list[int]:
    return [decode.count for decode in plan.decodes]


def test_drafts_are_computed_tokens_but_verified_ones_only_once_they_are_accepted() -> None:
    loop = Loop(replace(DRAFTING, delay=0))
    three(loop)
    request = added(loop, lasting(30, 0, length=6), 30)
    loop.step()
    before = len(request.output)
    plan = loop.scheduler.plan()
    assert counts(plan) == [4] and plan.tokens == 4 and plan.drafts
    assert (request.computed, request.drafts, request.verified) == (10, 3, 7)
    rows = loop.device.run(plan, set())
    loop.commit(plan, rows)
    new = len(request.output) - before
    assert new == len(rows[0]) and (request.computed, request.drafts) == (6 + new, 0)


def test_a_plan_before_the_drafts_are_judged_begins_where_it_may_and_has_pages_for_all() -> None:
    loop = Loop(DRAFTING)
    three(loop)
    request = added(loop, lasting(30, 0, length=6), 30)
    loop.step()
    first, second = loop.scheduler.plan(), loop.scheduler.plan()
    assert [(plan.decodes[0].first, plan.decodes[0].count) for plan in (first, second)] == [
        (6, 4),
        (7, 4),
    ]
    assert request.computed == 6 + 4 + 4 and len(request.pages) == 4


def test_no_more_drafts_than_tokens_that_the_request_may_still_get() -> None:
    loop = Loop(replace(DRAFTING, delay=0))
    three(loop)
    added(loop, lasting(4, 0, length=6), 4)
    loop.step()
    assert counts(loop.scheduler.plan()) == [3], "one token is drawn, three may follow"


def test_nobody_is_preempted_for_drafts() -> None:
    loop = Loop(
        Setup(page_size=4, num_pages=5, drafts=3, max_num_seqs=2, estimator=Optimist, delay=0)
    )
    three(loop)
    for number in range(2):
        added(loop, lasting(5, number, length=6), 5)
    plan = step_until(loop, lambda plan: plan.drafts)
    assert counts(plan) == [4, 2], "one page is left, and two tokens go into the page before it"
    assert not plan.preempted
    loop.drain()
    loop.check_ended()


def test_drafts_leave_half_of_a_step_to_prompts() -> None:
    loop = Loop(Setup(page_size=4, num_pages=40, drafts=3, max_num_batched_tokens=7, delay=0))
    three(loop)
    added(loop, lasting(20, 0, length=6), 20)
    loop.step()
    added(loop, [9] * 12, 2)
    plan = loop.step()
    assert counts(plan) == [4] and sum(chunk.length for chunk in plan.chunks) == 3
    loop.drain()
    loop.check_ended()


def test_pages_of_accepted_drafts_can_be_found_once_their_tokens_are_committed() -> None:
    found = []
    for drafts in (0, 3):
        loop = Loop(replace(DRAFTING, drafts=drafts))
        if drafts:
            three(loop)
        request = added(loop, lasting(40, 0, length=6), 40)
        loop.drain()
        assert loop.prefix is not None
        found.append(set(loop.prefix.pages.values()))
        again = added(loop, request.prompt.tokens + request.output, 1)
        loop.drain()
        assert again.num_cached_tokens == 44, "all pages but that of the last token"
    assert found[0] == found[1] and len(found[0]) == 11


def test_a_jump_forgets_the_drafts_of_the_draw_that_is_not_used() -> None:
    loop = Loop(DRAFTING)
    three(loop)
    request = added(loop, lasting(30, 0, length=6), 30)
    step_until(loop, lambda plan: plan.drafts)
    loop.jump(request, 1)
    assert request in loop.jumped and request.drafts == 0
    assert request.computed == request.prefill_end - 1
    loop.drain()
    loop.check_ended()


def test_batch_invariant_engines_have_no_drafts() -> None:
    loop = Loop(replace(ROOMY, batch_invariant=True))
    with pytest.raises(ValueError, match="one token"):
        three(loop)
    with pytest.raises(ValueError, match="drafts"):
        Loop(DRAFTING).scheduler.set_batch_invariant()


def test_without_drafts_a_decode_takes_one_page_at_most() -> None:
    assert [pages_of_decode(inputs, 4) for inputs in (1, 2, 4, 5)] == [1, 2, 2, 3]


def test_with_a_draft_in_flight_one_token_may_take_a_copied_page_and_a_new_one() -> None:
    loop = Loop(Setup(page_size=5, max_num_seqs=2, max_num_batched_tokens=3, drafts=1))
    loop.scheduler.attach_drafts(lambda request: int(len(request.output) == 0))
    request, _ = loop.add_choices(2, lasting(4, 0, length=3), 4)
    first, second = (step_until(loop, lambda plan: plan.decodes) for _ in range(2))
    assert [(plan.decodes[0].first, plan.decodes[0].count) for plan in (first, second)] == [
        (3, 2),  # its draft is the last token of the first page
        (4, 1),
    ]
    assert [write.column for write in second.table_writes if write.slot == request.slot] == [0, 1]
    assert len(second.copies) == 1
    loop.drain()
    loop.check_ended()


@pytest.mark.parametrize("windows", [(5,), (5, None)])
def test_the_check_finds_a_request_that_has_released_what_it_still_sees(
    windows: tuple[int | None, ...],
) -> None:
    loop = Loop(replace(ROOMY, windows=windows))
    request = added(loop, lasting(30, 0, length=6), 30)
    step_until(loop, lambda _: request.tables[0].out_of_window == 3)
    loop.scheduler.check()
    request.computed -= 4
    with pytest.raises(PoolError, match="has released 3 pages that its token"):
        loop.scheduler.check()


def test_the_check_finds_pages_that_would_be_written_though_others_read_them() -> None:
    loop = Loop(ROOMY)
    request = added(loop, lasting(30, 0, length=6), 30)
    step_until(loop, lambda _: len(request.output) == 12)
    request.computed -= 6
    with pytest.raises(PoolError, match="may write pages that others read"):
        loop.scheduler.check()


def test_the_check_finds_missing_pages_and_wrong_drafts() -> None:
    loop = Loop(ROOMY)
    request = added(loop, lasting(30, 0, length=6), 30)
    step_until(loop, lambda _: len(request.output) == 3)
    request.computed += 8
    with pytest.raises(PoolError, match="pages for"):
        loop.scheduler.check()
    request.computed -= 8
    request.drafts = -1
    with pytest.raises(PoolError, match="are drafts"):
        loop.scheduler.check()
