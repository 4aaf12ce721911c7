"""Thousands of requests that come, wait, are preempted, swapped and aborted on a tiny pool: each
gets its tokens, nothing stays behind."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from jaxllm.engine.scheduling.admission import HISTORY, AdmissionEstimator
from tests.engine.fake_device import VOCAB
from tests.engine.fake_host import Optimist
from tests.engine.fake_loop import Loop, Setup

TINY = Setup(
    page_size=4, num_pages=24, max_num_seqs=6, max_num_batched_tokens=32, estimator=Optimist
)
WAYS = {
    "recompute": TINY,
    "forecast": replace(TINY, estimator=AdmissionEstimator),
    "priority": replace(TINY, policy="priority", delay=2),
    "no prefixes": replace(TINY, caching=False),
    "swap": replace(TINY, host_pages=60, swaps=True),
    "swap, priority": replace(TINY, host_pages=60, swaps=True, policy="priority", delay=2),
    "swap into little memory, with a cache": replace(TINY, host_pages=9, host_cached=5, swaps=True),
    "host tier": replace(TINY, host_pages=30, host_cached=30, delay=0),
    "swap without prefixes": replace(TINY, host_pages=60, swaps=True, caching=False),
}


def soak(setup: Setup, requests: int, seed: int = 0) -> Loop:
    """Random traffic in bursts; a tenth of the requests leave before their end."""
    rng, loop = random.Random(seed), Loop(setup)
    openings = [[rng.randrange(1, VOCAB) for _ in range(30)] for _ in range(5)]
    added = 0
    while added < requests:
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 5))):
            opening = rng.choice(openings)[: rng.randrange(31)]
            own = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 12))]
            stop_at = rng.choice((None, None, rng.randrange(1, 20)))
            added += len(
                loop.add_choices(
                    rng.choice((1, 1, 1, 1, 2, 3)),
                    opening + own,
                    rng.randrange(1, 40),
                    stop_at,
                    rng.randrange(-3, 4),
                )
            )
        if loop.requests and rng.random() < 0.06:
            loop.abort(rng.choice(loop.requests))
        if rng.random() < 0.002:
            loop.forget_prefixes()
        for _ in range(rng.choice((1, 1, 3, 8))):
            loop.step()
        if len(loop.requests) > 100:
            loop.forget_ended()
    loop.drain()
    loop.check_ended()
    return loop


def assert_nothing_is_left(loop: Loop) -> None:
    scheduler, setup = loop.scheduler, loop.setup
    assert len(scheduler.pools[0].index or ()) <= setup.num_pages
    assert sorted(itertools.chain(*scheduler._slots._free)) == list(range(setup.max_num_seqs))
    assert len(scheduler.estimator._shares) == len(scheduler.estimator._recent) <= HISTORY
    if scheduler.offload is not None:
        scheduler.offload.check([])
        assert scheduler.offload.host.used <= min(setup.host_cached, setup.host_pages)
        assert not scheduler.offload._pending and not scheduler.offload._fetched


@pytest.mark.parametrize("way", WAYS)
def test_hundreds_of_requests_leave_nothing_behind(way: str) -> None:
    loop = soak(WAYS[way], 250)
    assert_nothing_is_left(loop)
    assert way == "forecast" or loop.scheduler.preemptions > 20
    assert loop.scheduler.offload is None or loop.device.host.traffic.loaded > 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
def test_ten_thousand_requests_leave_nothing_behind(way: str) -> None:
    loop = soak(WAYS[way], 10_000, seed=1)
    assert_nothing_is_left(loop)
