"""Two devices under `--soak-steps` steps of random traffic: requests come, are swapped out and
back, and leave. None hangs, and none gets another token than alone on one device."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from benchmarks.soak import Traffic, greedy
from jaxllm.engine.engine import Engine
from tests.engine.conftest import run
from tests.engine.fake_host import Optimist

PROMPTS, MOST_TOKENS = 24, 60
TIGHT = {"num_gpu_blocks_override": 16, "preemption_mode": "swap", "swap_space": 0.001}


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_soak_over_two_devices_has_no_hang_and_no_wrong_token(
    make_engine: Callable[..., Engine], request: pytest.FixtureRequest
) -> None:
    draw, steps = random.Random(0), request.config.getoption("--soak-steps")
    prompts = [[draw.randrange(96) for _ in range(draw.randrange(1, 50))] for _ in range(PROMPTS)]
    one = make_engine(max_num_seqs=1, async_scheduling=False, enable_prefix_caching=False)
    alone = [run(one, [prompt], greedy(MOST_TOKENS))[0] for prompt in prompts]
    engine = make_engine(tensor_parallel_size=2, **TIGHT)
    engine.scheduler.estimator = Optimist()
    traffic = Traffic(engine, prompts, alone)
    traffic.run(steps)
    assert not traffic.wrong and not traffic.got
    assert traffic.ended > steps / 50 and traffic.aborted > steps / 1000
    offload = engine.scheduler.offload
    assert engine.scheduler.preemptions > steps / 100 and offload is not None
    offload.check([])
