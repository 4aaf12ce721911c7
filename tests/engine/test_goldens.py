"""The engine gives what transformers gives, for every golden checkpoint: prompts together and alone, tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from jaxllm.engine.engine import Engine
from jaxllm.engine.request import GenerateRequest, TextDelta
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import collect, tokens_of
from tests.goldens.golden import Continuation, golden_names, load_golden

QUICK = ("llama-yarn", "mistral-window", "qwen2-yarn", "qwen3-dynamic")
BOUND = 2e-4
NEAR_TIE = 1e-4


def requests(continuations: tuple[Continuation, ...]) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            id=str(i),
            prompt_token_ids=c.prompt,
            params=SamplingParams(temperature=0, max_tokens=len(c.tokens), ignore_eos=True, logprobs=5),
        )
        for i, c in enumerate(continuations)
    ]


def check(deltas: list[TextDelta], id: str, expected: Continuation) -> None:
    """Tokens equal up to the first near-tie of the reference, log-probabilities within the bound until then."""
    top = np.sort(expected.logprobs, axis=-1)
    ties = np.flatnonzero(top[:, -1] - top[:, -2] < NEAR_TIE)
    until = int(ties[0]) if len(ties) else len(expected.tokens)
    assert until > len(expected.tokens) // 2, "a golden that is mostly ties tests little"
    assert tokens_of(deltas, id)[:until] == expected.tokens[:until]
    entries = [entry for d in deltas if d.id == id for entry in d.logprobs or ()]
    for entry, reference in zip(entries[:until], expected.logprobs, strict=False):
        assert abs(entry.logprob - reference[entry.token_id]) < BOUND
        assert entry.rank == 1
        np.testing.assert_allclose([value for _, value in entry.top], [reference[token] for token, _ in entry.top], atol=BOUND)
        assert np.isclose(entry.top[4][1], np.sort(reference)[-5], atol=BOUND)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in golden_names()])
def test_the_engine_gives_the_tokens_and_logprobs_of_transformers(make_engine: Callable[..., Engine], name: str) -> None:
    golden = load_golden(name)
    engine = make_engine(
        model=str(golden.directory), load_format="auto", max_model_len=192, max_num_batched_tokens=64, num_gpu_blocks_override=160
    )
    together = collect(engine, requests(golden.continuations))
    for i, expected in enumerate(golden.continuations):
        check(together, str(i), expected)
    for i, request in enumerate(requests(golden.continuations)):
        check(collect(engine, [request]), str(i), golden.continuations[i])
