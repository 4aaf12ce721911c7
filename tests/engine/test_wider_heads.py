"""Heads that kernels want wider than they are: the engine gives the same answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from jaxllm.engine.engine import Engine
from jaxllm.sampling.options import SamplingParams
from pallas_kernels.paged_decode import reference as paged_decode
from pallas_kernels.paged_extend import reference as paged_extend
from tests.engine.conftest import LOGPROB_BOUND, TINY, outcomes

PROMPTS = [[5, 17, 3, 80, 41], [9] * 11, list(range(40))]


@pytest.mark.parametrize(
    "shards", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["1 shard", "2 shards"]
)
def test_an_engine_with_wider_heads_gives_the_same_tokens_and_log_probabilities(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)] * 3
    wanted = outcomes(make_engine(), PROMPTS, params)
    for op in (paged_decode, paged_extend):
        monkeypatch.setattr(op, "head_dims", lambda pages: (12, 20), raising=False)
    engine = make_engine(tensor_parallel_size=shards)
    found = outcomes(engine, PROMPTS, params)
    assert TINY["head_dim"] == 8
    assert "heads of 8 are stored as 12, with zeros" in engine.resolved.attention_reason
    assert [each.tokens for each in found] == [each.tokens for each in wanted]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(
            [entry.logprob for entry in one.logprobs],
            [entry.logprob for entry in other.logprobs],
            atol=LOGPROB_BOUND,
        )
