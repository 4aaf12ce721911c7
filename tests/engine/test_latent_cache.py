"""The engine over pages of latents: wherever pages go, golden checkpoints say what transformers
says, and a pool holds one entry a token."""

from __future__ import annotations

import jax
import pytest

from jaxllm.config import ConfigError
from tests.engine.fake_host import Optimist
from tests.goldens.cases import CASES
from tests.goldens.golden import load_golden
from tests.goldens.test_served import PAGE, SMALL, check_tokens, engine

NAME = "deepseek-v2-lite"
OTHERS = ("deepseek-v2-groups-fused", "deepseek-v3-groups", "deepseek-v3-halves", "kimi-k2")


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME, *OTHERS])
def test_pages_go_to_host_memory_and_come_back(name: str) -> None:
    golden = load_golden(name)
    core = engine(golden.directory, preemption_mode="swap", swap_space=0.01, **SMALL)
    core.scheduler.estimator = Optimist()
    check_tokens(core, golden.continuations[::-1])
    assert core.stats().pages_loaded > 0


def test_a_pool_has_one_entry_a_token_and_no_values() -> None:
    core, hf = engine(load_golden(NAME).directory), CASES[NAME]
    width = hf["kv_lora_rank"] + hf["qk_rope_head_dim"]
    (pool,) = jax.tree.leaves(core.runner.kv)
    assert pool.shape == (hf["num_hidden_layers"] * 96, 1, PAGE, width)


def test_latents_in_8_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"latents are kept in the type .*; give float32"):
        engine(load_golden(NAME).directory, kv_cache_dtype="fp8")
