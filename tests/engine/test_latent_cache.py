"""The engine over pages of latents: whatever becomes of pages, golden checkpoints say what
transformers says, and a pool holds one entry a token."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.engine.engine import Engine
from jaxllm.messages import GenerateRequest
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import Outcome, collect
from tests.engine.fake_host import Optimist
from tests.goldens.cases import CASES, NEW_TOKENS, PROMPT_LENGTHS
from tests.goldens.golden import Continuation, load_golden
from tests.goldens.test_served import BOUND, engine

NAME = "deepseek-v2-lite"
OTHERS = ("deepseek-v2-groups-fused", "deepseek-v3-groups", "deepseek-v3-halves", "kimi-k2")
NAMES = (NAME, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS))
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
PAGE = 8
SMALL = {"num_gpu_blocks_override": -(-(max(PROMPT_LENGTHS) + NEW_TOKENS) // PAGE) + 3}


def check(core: Engine, continuations: tuple[Continuation, ...]) -> None:
    """Run the prompts at once: tokens of transformers, and their log-probabilities."""
    requests = [
        GenerateRequest(id=str(i), prompt_token_ids=one.prompt, params=PARAMS)
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
def test_chunked_preempted_and_cached_it_says_what_transformers_says(name: str) -> None:
    golden = load_golden(name)
    core = engine(golden.directory, max_num_batched_tokens=16, **SMALL)
    core.scheduler.estimator = Optimist()
    check(core, golden.continuations[::-1])  # the longest and the next do not fit when grown
    assert core.stats().preemptions > 0
    last, hits = golden.continuations[-1:], core.stats().prefix_hits
    check(core, last)
    check(core, last)
    assert core.stats().prefix_hits - hits >= (len(last[0].prompt) - 1) // PAGE * PAGE


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME, *OTHERS])
def test_pages_go_to_host_memory_and_come_back(name: str) -> None:
    golden = load_golden(name)
    core = engine(golden.directory, preemption_mode="swap", swap_space=0.01, **SMALL)
    core.scheduler.estimator = Optimist()
    check(core, golden.continuations[::-1])
    assert core.stats().pages_loaded > 0


def test_a_pool_has_one_entry_a_token_and_no_values() -> None:
    core, hf = engine(load_golden(NAME).directory), CASES[NAME]
    width = hf["kv_lora_rank"] + hf["qk_rope_head_dim"]
    (pool,) = jax.tree.leaves(core.runner.kv)
    assert pool.shape == (hf["num_hidden_layers"] * 96, 1, PAGE, width)


def test_latents_in_8_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"latents are kept in the type .*; give float32"):
        engine(load_golden(NAME).directory, kv_cache_dtype="fp8")
