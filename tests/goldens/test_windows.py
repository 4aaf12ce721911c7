"""Golden checkpoints with a sliding window, served from pools that are too small to keep what lies
behind it."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.engine.engine import Engine
from jaxllm.messages import GenerateRequest
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import Outcome, collect
from tests.engine.fake_host import Optimist
from tests.goldens.cases import CASES, NEW_TOKENS, PROMPT_LENGTHS
from tests.goldens.golden import Continuation, load_golden
from tests.goldens.test_served import BOUND, engine

PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
SLOW = (
    "qwen2-window-mha",  # a hybrid, of which tests/engine/scheduling has more
    "gemma2-window",
    "gemma3_text-older-keys",
    "mistral-window-yarn",
    "phi3-window",
    "qwen2-layer-types-linear",
    "qwen3-bias-window",
    "starcoder2-window",
)
NAMES = ("mistral-window", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))


def check(core: Engine, continuations: list[Continuation]) -> None:
    """Run the prompts at once: tokens of transformers, and their log-probabilities."""
    requests = [
        GenerateRequest(id=str(i), prompt=Prompt(one.prompt), params=PARAMS)
        for i, one in enumerate(continuations)
    ]
    deltas = collect(core, requests)
    for i, one in enumerate(continuations):
        found = Outcome.of(deltas, str(i))
        assert found.tokens == one.tokens
        expected = [row[token] for token, row in zip(one.tokens, one.logprobs, strict=True)]
        np.testing.assert_allclose(
            [entry.logprob for entry in found.logprobs], expected, atol=BOUND, rtol=0
        )
    core.scheduler.check()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_alone_preempted_and_cached_in_a_small_pool_it_says_what_transformers_says(
    name: str,
) -> None:
    golden, window = load_golden(name), CASES[name]["sliding_window"]
    held = -(-(window + 16 - 2) // 8) + 1
    longest = (
        1
        if name.startswith(("mistral", "phi3", "starcoder2"))
        else -(-(max(PROMPT_LENGTHS) + NEW_TOKENS) // 8)
    )
    pages = (held + 3) * longest // (held if longest > 1 else 1)
    core = engine(
        golden.directory, max_num_batched_tokens=16, max_num_seqs=8, num_gpu_blocks_override=pages
    )
    core.scheduler.estimator = Optimist()
    pool = core.scheduler.pools[-1]
    assert core.resolved.windows[-1] == window and held + 3 <= pool.num_pages
    assert pool.num_pages < -(-max(PROMPT_LENGTHS) // 8)
    for one in golden.continuations:
        check(core, [one])
        check(core, [one])
    check(core, list(golden.continuations))
    assert core.stats().prefix_hits > 0
    before = core.stats().preemptions
    check(core, too_many(core, golden.continuations[0]))
    assert core.stats().preemptions > before


def too_many(core: Engine, one: Continuation) -> list[Continuation]:
    """As many of these as begin together in the pool of layers with a window, and do not fit it any
    more when they have grown."""
    pool = core.scheduler.pools[-1]
    grown = min(
        pool.pages_for(len(one.prompt) + NEW_TOKENS - 1),
        pool.lifetime.decode_bound(pool.page_size) or pool.num_pages,
    )
    count = pool.num_pages // grown + 1
    assert (
        count <= core.resolved.max_num_seqs
        and count * pool.pages_for(len(one.prompt)) < pool.num_pages
    )
    return [one] * count
