"""Beam searches on shared pages: forks, losers, slots, and what they find."""

from __future__ import annotations

import pytest

from jaxllm.engine.output.beam_search import Rules
from jaxllm.engine.scheduling.request import Status
from tests.engine.fake_device import EOS, search_alone
from tests.engine.fake_host import Optimist
from tests.engine.fake_loop import Loop, Setup

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def rules(width: int, max_tokens: int, **more: object) -> Rules:
    return Rules(width=width, max_tokens=max_tokens, stops=frozenset([EOS]), **more)  # type: ignore[arg-type]


def setup(**sizes: object) -> Setup:
    return Setup(
        **(
            {"page_size": 4, "num_pages": 200, "max_num_seqs": 8, "max_num_batched_tokens": 64}
            | sizes
        )
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("width", [1, 3, 6])
def test_a_search_finds_what_it_finds_alone_and_gives_everything_back(
    width: int, page_size: int, caching: bool
) -> None:
    loop = Loop(setup(page_size=page_size, caching=caching))
    beams = loop.search(PROMPT, rules(width, 12))
    assert beams is not None
    loop.add([5] * 9, 15)
    loop.drain()
    loop.check_ended()
    assert (
        beams.search.finished == search_alone(PROMPT, beams.search.rules)
        and len(beams.search.finished) == width
    )


def test_beams_share_the_prompt_and_every_token_before_they_part() -> None:
    loop = Loop(setup(caching=False))
    beams = loop.search(PROMPT * 4, rules(6, 20, early_stopping="never"))
    assert beams is not None
    copies = 0
    while loop.scheduler.has_work:
        copies += len(loop.step().copies)
        if len(beams.members) == 6 and loop.searches:
            held = loop.pool.num_pages - loop.pool.free
            assert held <= 10 + 6 * -(-20 // 4), "ten pages of the prompt, and those of each beam"
            assert all(m.pages[:10] == beams.members[0].pages[:10] for m in beams.members)
    assert copies


def test_a_beam_is_one_token_a_step_and_its_search_holds_its_slots_from_the_start() -> None:
    loop = Loop(setup(max_num_seqs=4))
    beams = loop.search(PROMPT, rules(3, 12))
    other, late = loop.add([5] * 4, 30), loop.add([6] * 4, 30)
    assert beams is not None and other is not None and late is not None
    plan = loop.step()
    assert [c.request.id for c in plan.chunks] == ["0", "1"] and late.status is Status.WAITING
    while loop.searches:
        plan = loop.step()
        assert all(c.length == 1 for c in plan.chunks)
        assert late.status is Status.WAITING or not loop.searches
    loop.drain()
    loop.check_ended()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_searches_that_need_all_slots_and_pages_end_one_after_the_other(
    delay: int, caching: bool
) -> None:
    loop = Loop(
        setup(num_pages=18, max_num_seqs=4, caching=caching, delay=delay, estimator=Optimist)
    )
    searches = [loop.search([first, *PROMPT], rules(4, 14)) for first in (1, 2, 3)]
    assert all(searches)
    for first in range(4):
        loop.add([first, 7], 20)
    loop.drain()
    loop.check_ended()
    assert len(loop.found) == 3


@pytest.mark.parametrize("steps", range(8))
def test_a_search_can_be_ended_at_any_time(steps: int) -> None:
    loop = Loop(setup())
    loop.search(PROMPT, rules(4, 12))
    loop.add([5] * 9, 15)
    for _ in range(steps):
        loop.step()
    loop.abort(loop.requests[0])
    assert not any(
        request.is_beam and request.status is not Status.FINISHED for request in loop.requests
    )
    loop.drain()
    loop.check_ended()


@pytest.mark.parametrize(("pages", "fits"), [(22, False), (26, False), (30, True)])
def test_beams_of_a_hybrid_model_have_room_though_a_window_keeps_a_preempted_one_from_sharing(
    pages: int, fits: bool
) -> None:
    setup = Setup(
        page_size=2,
        num_pages=pages,
        windows=(None, 2),
        max_num_batched_tokens=4,
        caching=False,
        estimator=Optimist,
    )
    preemptions = 0
    for token in range(2, 8):
        loop = Loop(setup)
        older = loop.add([1] * 12, 30)
        loop.step()
        search = loop.search(
            [token] * 21, Rules(width=2, max_tokens=8, min_tokens=7, stops=frozenset([EOS]))
        )
        assert (search is not None) == fits and older is not None
        for _ in range(100):  # until the older request has pushed a beam out, if it does
            if search is not None and {beam.status for beam in search.members} != {
                Status.WAITING,
                Status.RUNNING,
            }:
                loop.step()
        loop.abort(older)
        loop.drain()
        loop.check_ended()
        preemptions += loop.scheduler.preemptions
    assert preemptions > 0 or not fits
