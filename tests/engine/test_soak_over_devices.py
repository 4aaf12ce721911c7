"""Two devices under `--soak-steps` steps of random traffic: requests come, are swapped out and
back, and leave. None hangs, and none gets another token than alone on one device."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from jaxllm.engine.engine import Engine
from jaxllm.messages import GenerateRequest
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import run
from tests.engine.fake_host import Optimist

PROMPTS, MOST_TOKENS = 24, 60
TIGHT = {"num_gpu_blocks_override": 16, "preemption_mode": "swap", "swap_space": 0.001}


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


class Traffic:
    """Random requests for an engine; `alone` has the tokens of each prompt by itself."""

    def __init__(self, engine: Engine, prompts: list[list[int]], alone: list[list[int]]):
        self.engine, self.prompts, self.alone = engine, prompts, alone
        self.draw = random.Random(1)
        self.got: dict[str, list[int]] = {}
        self.wanted: dict[str, list[int]] = {}
        self.ended = self.aborted = 0

    def act(self) -> None:
        """Perhaps add a request, perhaps abort one, and step."""
        draw = self.draw
        if len(self.got) < 8 and draw.random() < 0.2:
            number, tokens = draw.randrange(PROMPTS), draw.randrange(1, MOST_TOKENS)
            id = f"{number}-{draw.getrandbits(60)}"
            self.got[id], self.wanted[id] = [], self.alone[number][:tokens]
            given = GenerateRequest(
                id=id, prompt_token_ids=self.prompts[number], params=greedy(tokens)
            )
            self.engine.add(given)
        if self.got and draw.random() < 0.01:
            self.engine.abort(draw.choice(sorted(self.got)))
        self.step()

    def step(self) -> None:
        """Every token must be the one that the prompt gets alone."""
        for delta in self.engine.step():
            got, wanted = self.got[delta.id], self.wanted[delta.id]
            got += delta.token_ids
            assert got == wanted[: len(got)], delta.id
            if delta.finish_reason is not None:
                assert delta.finish_reason == "abort" or len(got) == len(wanted)
                self.aborted += delta.finish_reason == "abort"
                self.ended += 1
                del self.got[delta.id], self.wanted[delta.id]


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
    while engine._counters.steps < steps:
        traffic.act()
    while engine.has_work:
        traffic.step()
    assert not traffic.got
    assert traffic.ended > steps / 50 and traffic.aborted > steps / 1000
    offload = engine.scheduler.offload
    assert engine.scheduler.preemptions > steps / 100 and offload is not None
    offload.check([])
