"""Draws under every option, and every pair of options, follow the exact processed softmax:
chi-square over 100,000 draws each."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxllm.engine.intake.logits_options import LogitsOptionsReader
from jaxllm.sampling.choose import Sampler
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import Numbers
from tests.sampling import oracle
from tests.sampling.process_oracle import counts_of, expected, rows_of, run, terms_of
from tests.sampling.test_distribution import LOGITS, chi_square, limit
from tests.server.fake import RESOLVED

DRAWS = 100_000
V = len(LOGITS)
PROMPT, OUTPUT = [0, 4, 9], [1, 1, 4, 7]
FILTERS = ("top_k", "top_p", "min_p")
OPTIONS: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 6,
    "top_p": 0.83,
    "min_p": 0.11,
    "repetition_penalty": 1.35,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.65,
    "logit_bias": {2: -1.0, 4: 1.5, 11: 2.0},
    "allowed_token_ids": [0, 1, 2, 4, 5, 7, 8, 10, 11],
    "bad_words": ["6", "4 7 10", "7 3", "1 0", "4 7 2 9"],
    "min_tokens": 1,  # tokens 3 and 8 would end the request
}
STOPS = (3, 8)
FORBIDDEN = [3, 6, 10]  # by the bad words after OUTPUT
CASES = [
    *itertools.combinations(OPTIONS, 1),
    *(
        pair if pair in itertools.pairwise(OPTIONS) else pytest.param(pair, marks=pytest.mark.slow)
        for pair in itertools.combinations(OPTIONS, 2)
    ),
    tuple(OPTIONS),
]


def draws(params: SamplingParams, seed: int) -> np.ndarray:
    """What the device draws, at so many positions."""
    terms, counts = terms_of([(params, PROMPT)], V), counts_of([OUTPUT], V)
    reader = LogitsOptionsReader(replace(RESOLVED, vocab_size=V), Numbers())  # type: ignore[arg-type]
    asked = reader.read_options(params)
    if asked is not None:
        np.asarray(terms.allowed)[0] = asked.allowed_W
        for constraint in asked.constraints:
            constraint.accept_tokens(OUTPUT)
            constraint.apply_mask(np.asarray(terms.allowed)[0])
    _, logits = run(LOGITS[None], rows_of([0], [params]), counts, terms)
    filters = {name: getattr(params, name) for name in ("temperature", *FILTERS)}
    rows = oracle.make_rows(
        DRAWS,
        STOPS,
        **filters,
        seed=seed,
        position=np.arange(DRAWS),
        suppress=params.min_tokens > 0,
    )
    return np.asarray(
        oracle.run(np.broadcast_to(np.asarray(logits), (DRAWS, V)), rows, Sampler.FILTERED)
    )


def exact(params: SamplingParams) -> np.ndarray:
    """The distribution of a draw by the definitions, in float64."""
    logits = expected(LOGITS, params, PROMPT, OUTPUT)
    if params.min_tokens:
        logits[list(STOPS)] = -np.inf
    if params.bad_words:
        logits[FORBIDDEN] = -np.inf
    return oracle.processed(
        logits, params.temperature, **{name: getattr(params, name) for name in FILTERS}
    )


@pytest.mark.parametrize("names", CASES, ids="+".join)
def test_draws_follow_the_exact_distribution(names: tuple[str, ...]) -> None:
    params = SamplingParams(**{name: OPTIONS[name] for name in names})
    probs = exact(params)
    assert np.abs(probs - oracle.processed(LOGITS)).max() > 1e-3, (
        "an option that changes nothing would be no test"
    )
    statistic, freedom = chi_square(draws(params, len(names) * 100 + sum(map(len, names))), probs)
    assert freedom >= 2
    assert statistic < limit(freedom)


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_the_statistic_notices_a_penalty_that_is_a_tenth_too_large(name: str) -> None:
    statistic, freedom = chi_square(
        draws(SamplingParams(**{name: OPTIONS[name] * 1.1}), 5),
        exact(SamplingParams(**{name: OPTIONS[name]})),
    )
    assert statistic > limit(freedom)
