"""--batch-invariant: a request's tokens are computed by the same programs, whatever other requests
run.

The effect shows on accelerators, whose programs round differently for different numbers of rows.
Here the programs themselves are compared.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from jaxllm.engine.engine import Engine
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.scheduling.plan import Plan
from jaxllm.messages import GenerateRequest
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import collect, run, tokens_of
from tests.engine.fake_host import Optimist
from tests.engine.fake_loop import Loop, Setup

MakeEngine = Callable[..., Engine]
PROMPTS = [[5, 6, 7] * 10, list(range(3, 60)), [9] * 3, [40, 41] * 20, [11, 12, 13]]
LONG = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(make_engine: MakeEngine) -> list[list[int]]:
    engine = make_engine(max_num_seqs=1, enable_prefix_caching=False)
    return [run(engine, [prompt], LONG)[0] for prompt in PROMPTS]


def watched(engine: Engine) -> list[Plan]:
    """Records every plan that the engine makes from now on."""
    plans: list[Plan] = []
    plan = engine.scheduler.plan

    def watch() -> Plan:
        plans.append(plan())
        return plans[-1]

    engine.scheduler.plan = watch  # type: ignore[method-assign]
    return plans


def test_decodes_and_prompts_run_apart_and_by_turns(
    make_engine: MakeEngine, alone: list[list[int]]
) -> None:
    engine = make_engine(batch_invariant=True, max_num_batched_tokens=16)
    plans = watched(engine)
    assert run(engine, PROMPTS, LONG) == alone
    ran = [plan for plan in plans if plan.decodes or plan.chunks]
    assert not any(plan.decodes and plan.chunks for plan in ran)
    kinds = "".join("c" if plan.chunks else "d" for plan in ran)
    both = kinds[kinds.index("d") : kinds.rindex("c") + 1]
    assert "cdcdc" in both and "cc" not in both, "nobody waits for more than a step of the others"
    engine.scheduler.check()


@pytest.mark.slow
def test_a_small_pool_makes_requests_wait_and_preempts_none(
    make_engine: MakeEngine, alone: list[list[int]]
) -> None:
    usual = make_engine(num_gpu_blocks_override=16)
    usual.scheduler.estimator = Optimist()
    assert run(usual, PROMPTS, LONG) == alone and usual.stats().preemptions > 0
    engine = make_engine(batch_invariant=True, num_gpu_blocks_override=16)
    engine.scheduler.estimator = Optimist()
    assert run(engine, PROMPTS, LONG) == alone
    assert engine.stats().preemptions == 0 and engine.stats().free_pages == 16


def test_who_decodes_goes_on_while_pages_of_another_are_fetched() -> None:
    loop = Loop(
        Setup(
            batch_invariant=True,
            host_pages=20,
            host_cached=20,
            max_fetches=1,
            num_pages=14,
            max_num_batched_tokens=40,
        )
    )
    # The second evicts the first one's pages to host memory
    for prompt in (list(range(1, 25)), [2] * 50):
        loop.add(prompt, 1)
        loop.drain()
    first = loop.add([3, 4], 20)
    loop.step()
    second = loop.add(list(range(1, 25)), 1)
    assert first is not None and second is not None
    plans = [loop.step(), loop.step()]
    while second.pages_in_transit:
        plans.append(loop.step())
    assert len(plans) > 4 and all(plan.decodes == (first,) for plan in plans[:-1])
    loop.drain()
    loop.check_ended()


def test_others_find_pages_of_prompts_and_not_of_outputs(make_engine: MakeEngine) -> None:
    engine = make_engine(batch_invariant=True)
    prompt = list(range(3, 60))
    said = run(engine, [prompt], LONG)[0]
    deltas = collect(
        engine, [GenerateRequest(id="more", prompt=Prompt(prompt + said), params=LONG)]
    )
    page = engine.resolved.page_size
    assert {delta.num_cached_tokens for delta in deltas} == {len(prompt) // page * page}
    usual = make_engine()
    assert run(usual, [prompt], LONG)[0] == said
    deltas = collect(usual, [GenerateRequest(id="more", prompt=Prompt(prompt + said), params=LONG)])
    assert deltas[0].num_cached_tokens > len(prompt)


def test_choices_of_one_prompt_still_share_it(make_engine: MakeEngine) -> None:
    drawn = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=12, ignore_eos=True)
    request = [GenerateRequest(id="n", prompt=Prompt(PROMPTS[1]), params=drawn)]
    found, wanted = (
        collect(make_engine(**options), request) for options in ({"batch_invariant": True}, {})
    )
    assert [tokens_of(found, "n", i) for i in range(3)] == [
        tokens_of(wanted, "n", i) for i in range(3)
    ]


def test_a_search_without_anything_to_decode_beside_it_keeps_what_its_beams_share(
    make_engine: MakeEngine,
) -> None:
    search = SamplingParams(use_beam_search=True, n=3, temperature=0, max_tokens=8, ignore_eos=True)
    # A token short of two pages
    request = [GenerateRequest(id="s", prompt=Prompt(list(range(3, 18))), params=search)]
    found, wanted = (
        collect(make_engine(async_scheduling=False, batch_invariant=uniform), request)
        for uniform in (True, False)
    )
    assert [delta.token_ids for delta in found] == [delta.token_ids for delta in wanted]
    sums = [[delta.cumulative_logprob for delta in deltas] for deltas in (found, wanted)]
    np.testing.assert_allclose(sums[0], sums[1], atol=1e-4)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_there_is_one_program_for_decodes_and_one_for_prompts(platform: str) -> None:
    buckets = Buckets.batch_invariant(100, 512, platform)
    assert buckets.decode == ({"cpu": 100, "gpu": 112}[platform],)
    assert [(shape.tokens, shape.decodes) for shape in buckets.extend] == [(512, 0)]
    assert (
        buckets.logit_rows(100) >= 100
        and buckets.logit_rows(buckets.extend[0]) >= buckets.extend[0].chunks
    )
