"""How requests leave a scheduler, and which requests it refuses."""

from __future__ import annotations

import pytest

from jaxllm.cache.pool import PagePool
from jaxllm.cache.prefix import PrefixIndex
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.scheduling.plan import Limits
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.fake_loop import Loop, Setup
from tests.engine.scheduling.test_scheduler import ROOMY, prompt


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_finishing_frees_everything_at_once_in_any_state(steps: int) -> None:
    loop = Loop(Setup(page_size=4, num_pages=20, max_num_seqs=2, max_num_batched_tokens=16))
    requests = [loop.add(prompt(20, i + 1), 8) for i in range(3)]
    for _ in range(steps):
        loop.step()
    for request in requests:
        loop.scheduler.finish(request)
        assert request.status is Status.FINISHED and request.pages == [] and request.slot == -1
        loop.scheduler.finish(request)
        loop.scheduler.check()
    assert loop.pool.free == 20 and not loop.scheduler.has_work


def test_a_commit_after_the_end_is_ignored() -> None:
    loop = Loop(ROOMY)
    request = loop.add(prompt(7), 4)
    loop.scheduler.plan()
    loop.scheduler.finish(request)
    request.output.append(3)
    loop.scheduler.commit_tokens(request, 1)
    loop.scheduler.check()


def test_a_freed_slot_is_handed_out_again() -> None:
    loop = Loop(Setup(page_size=4, num_pages=20, max_num_seqs=2, max_num_batched_tokens=32))
    first, second = loop.add(prompt(4, 1), 8), loop.add(prompt(4, 2), 8)
    loop.step()
    assert (first.slot, second.slot) == (0, 1)
    loop.abort(first)
    third = loop.add(prompt(4, 3), 8)
    loop.step()
    assert third.slot == 0


def test_a_request_that_can_never_run_is_refused() -> None:
    loop = Loop(Setup(page_size=4, num_pages=4, max_num_seqs=2, max_model_len=12))
    assert not loop.scheduler.fits(13) and loop.scheduler.fits(12)
    for tokens, most in (([1] * 12, 2), ([], 3), ([1], 0)):
        request = Request(
            id="x",
            index=0,
            prompt=Prompt(tokens),
            params=SamplingParams(),
            seed=0,
            arrival=0.0,
            max_tokens=most,
        )
        with pytest.raises(ValueError, match="request x can never run"):
            loop.scheduler.add(request)
    assert not loop.scheduler.has_work


def test_a_request_cannot_be_added_twice() -> None:
    loop = Loop(ROOMY)
    request = loop.add(prompt(4), 2)
    with pytest.raises(ValueError, match="added before"):
        loop.scheduler.add(request)
    loop.step()
    with pytest.raises(ValueError, match="added before"):
        loop.scheduler.add(request)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens must be at least 1, got 0"):
        Limits(max_num_seqs=1, max_num_batched_tokens=0, max_model_len=1)


def test_the_check_finds_a_leaked_slot() -> None:
    scheduler = Scheduler(
        Limits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=8),
        [PagePool(4, 4, PrefixIndex(4, b""))],
        Buckets.build(2, 8, "cpu"),
    )
    scheduler._slots._free.pop()
    with pytest.raises(RuntimeError, match="slots are leaked"):
        scheduler.check()
