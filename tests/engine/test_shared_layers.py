"""What an engine can do, it can do over several devices: the tokens are those of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxllm.engine.engine import Engine
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import outcomes
from tests.engine.fake_host import Optimist
from tests.engine.test_invariants import ASKING, PROMPTS, SEEDED

SMALL: dict[str, Any] = {"num_gpu_blocks_override": 16}
WAYS: dict[str, dict[str, Any]] = {
    "8-bit pages": {"kv_cache_dtype": "fp8"},
    "swapped": {"preemption_mode": "swap", "swap_space": 0.01, **SMALL},
    "pages on the host": {"kv_offloading_size": 0.01, **SMALL},
    "batch invariant": {"batch_invariant": True},
    "fp8 weights": {"quantization": "fp8_w8a16"},
    "int8 weights": {"quantization": "int8_w8a16"},
    "int4 weights": {"quantization": "int4"},
    "processed log-probabilities": {"logprobs_mode": "processed_logprobs"},
}
PARAMS = [SamplingParams(**SEEDED | options) for options in ASKING]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_over_several_devices_are_those_of_one(
    way: str, shards: int, make_engine: Callable[..., Engine]
) -> None:
    found = []
    for devices in (1, shards):
        engine = make_engine(tensor_parallel_size=devices, **WAYS[way])
        engine.scheduler.estimator = Optimist()
        # A second time prefixes are cached
        found.append(outcomes(engine, PROMPTS, PARAMS) + outcomes(engine, PROMPTS, PARAMS))
    for one, several in zip(*found, strict=True):
        several.assert_like(one)
