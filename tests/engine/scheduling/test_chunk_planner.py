"""The budget of chunk tokens beside decodes: small for one short prompt, larger for several or long
ones."""

from __future__ import annotations

import pytest

from jaxllm.engine.scheduling.buckets import ExtendShape
from jaxllm.engine.scheduling.chunk_planner import PrefillBudget, Taper, prefill_budget
from tests.engine.fake_loop import Loop, Setup
from tests.engine.scheduling.test_scheduler import chunks, decodes, lasting, prompt, step_until


def test_with_a_pace_prompts_run_in_chunks_while_others_decode_and_larger_ones_the_more_wait() -> (
    None
):
    loop = Loop(Setup(page_size=4, num_pages=400, max_num_batched_tokens=256, max_num_seqs=4))
    loop.scheduler.chunk_planner.budget = PrefillBudget(((4, 16, 24, 32),))
    loop.add(prompt(200, 3), 1)
    assert chunks(loop.step()) == [("0", 0, 200, True)], "nobody waits for its next token"
    loop.add(lasting(20, 0), 60)
    step_until(loop, decodes)
    loop.add(prompt(200, 2), 1)
    lengths = [sum(length for _, _, length, _ in chunks(loop.step())) for _ in range(9)]
    assert lengths[:3] == [32, 32, 32] and sum(lengths) == 200
    assert all(16 <= length <= 32 for length in lengths[:-1] if length) and min(lengths[:6]) < 32


def test_with_a_pace_several_short_prompts_run_together_where_one_alone_would_wait_for_less() -> (
    None
):
    loop = Loop(Setup(page_size=4, num_pages=400, max_num_batched_tokens=256, max_num_seqs=8))
    loop.scheduler.chunk_planner.budget = PrefillBudget(((8, 16, 64, 64),))
    loop.add(lasting(20, 0), 60)
    step_until(loop, decodes)
    loop.add(prompt(32, 2), 1)
    assert [sum(length for _, _, length, _ in chunks(loop.step())) for _ in range(2)] == [16, 16]
    loop.add(prompt(32, 3), 1)
    loop.add(prompt(32, 4), 1)
    assert [sum(length for _, _, length, _ in chunks(loop.step())) for _ in range(2)] == [64, 0]


@pytest.mark.parametrize("paced", [True, False])
def test_a_step_of_several_prompts_is_cut_to_a_shape_that_they_fill(paced: bool) -> None:
    """The CPU's shapes end at 64, 256 and 1,024 tokens."""
    loop = Loop(Setup(page_size=4, num_pages=2000, max_num_batched_tokens=1024, max_num_seqs=16))
    if paced:
        loop.scheduler.chunk_planner.budget = PrefillBudget(((16, 64, 400, 1024),))
    loop.add(lasting(20, 0), 60)
    step_until(loop, decodes)
    for number in range(1, 9):
        loop.add(prompt(40, number), 9)
    lengths = [sum(length for _, _, length, _ in chunks(loop.step())) for _ in range(2)]
    assert lengths == [256, 64], "320 tokens in one step would be computed as 1,024"


def test_the_pace_follows_what_shapes_took() -> None:
    shape = ExtendShape
    beside = {
        shape(512, 32, 64): 0.013,
        shape(1088, 64, 64): 0.021,
        shape(1536, 64, 64): 0.081,
        shape(2048, 64, 256): 0.092,
    }
    seconds = beside | {shape(8192, 64, 0): 0.01, 64: 0.005}
    wide = (256, 2048, 2048, 2048)
    assert prefill_budget(seconds, 0.1) == PrefillBudget(((64, 512, 1088, 1536), wide)), (
        "the widest region has one shape, whatever it takes"
    )
    assert prefill_budget(seconds, 0.001) == PrefillBudget(((64, 512, 512, 512), wide)), (
        "the smallest shape there is"
    )
    assert prefill_budget(seconds | {shape(4096, 64, 64): 0.16}, 0.2) == PrefillBudget(
        ((64, 512, 1088, 4096), wide)
    ), "a longer bound changes nothing while few tokens wait"
    found = prefill_budget(seconds, 0.1)
    waiting = (900, False), (900, True), (5000, False), (4400, True)
    assert [found.tokens(*each, 10) for each in waiting] == [512, 1088, 1250, 1100]
    assert prefill_budget({}, 0.05) is None


@pytest.mark.parametrize(
    ("prompts", "steps"),
    [
        ([8192], [2048, 2048, 2048, 1024, 512, 512]),
        ([2048], [1024, 512, 512]),
        ([1900], [950, 512, 438]),  # of 1,024, 512 and 512, as many as one step would have
        ([1024], [512, 512]),
        ([512], [512]),
        ([100], [100]),
        ([2048, 2048], [2048, 1024, 512, 512]),  # the first need not shrink: the second follows
    ],
)
def test_with_a_taper_a_step_takes_half_of_what_is_left(
    prompts: list[int], steps: list[int]
) -> None:
    """What follows the last step is little then."""
    loop = Loop(
        Setup(
            page_size=64,
            num_pages=200,
            max_num_seqs=4,
            max_num_batched_tokens=2048,
            max_model_len=9000,
            platform="gpu",
        )
    )
    loop.scheduler.chunk_planner.taper = Taper(512)
    for number, tokens in enumerate(prompts):
        loop.add(prompt(tokens, number), 1)
    found = [sum(length for _, _, length, _ in chunks(loop.step())) for _ in steps]
    assert found == steps and not chunks(loop.step())


def test_a_taper_leaves_steps_beside_decodes_their_budget() -> None:
    loop = Loop(Setup(page_size=4, num_pages=400, max_num_batched_tokens=256, max_num_seqs=4))
    loop.scheduler.chunk_planner.budget = PrefillBudget(((4, 16, 24, 32),))
    loop.scheduler.chunk_planner.taper = Taper(64)
    loop.add(lasting(20, 0), 60)
    step_until(loop, decodes)
    loop.add(prompt(200, 2), 1)
    lengths = [sum(length for _, _, length, _ in chunks(loop.step())) for _ in range(3)]
    assert lengths == [32, 32, 32]
