"""Draws follow the processed softmax: chi-square with fixed seeds."""

import numpy as np
import pytest

from jaxllm.sampling.choose import Sampler
from pallas_kernels.draw.reference import gumbel
from tests.chi_square import chi_square, limit
from tests.sampling.oracle import make_rows, processed, run

DRAWS = 24_000
LOGITS = np.array([2.0, 1.7, 1.5, 1.0, 0.9, 0.2, 0.0, -0.3, -1.0, -1.4, -2.0, -3.5], np.float32)


def draws(sampler: Sampler, vary: str = "position", **options) -> np.ndarray:
    """Tokens of many rows that differ in their position or their seed alone."""
    options[vary] = np.arange(DRAWS)
    logits = np.broadcast_to(LOGITS, (DRAWS, len(LOGITS)))
    return np.asarray(run(logits, make_rows(DRAWS, **options), sampler))


@pytest.mark.parametrize("vary", ["position", "seed"])
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.0])
def test_temperature_alone(temperature, vary):
    other = {"seed": 1234} if vary == "position" else {"position": 77}
    tokens = draws(Sampler.RANDOM, vary, temperature=temperature, **other)
    statistic, freedom = chi_square(tokens, processed(LOGITS, temperature))
    assert freedom == len(LOGITS) - 1
    assert statistic < limit(freedom)


FILTERS = (
    {"top_k": 3},
    {"top_k": 12},
    {"top_p": 0.7},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"top_k": 5, "top_p": 0.8},
    {"top_k": 4, "min_p": 0.1},
    {"top_p": 0.9, "min_p": 0.3},
    {"temperature": 0.5, "top_k": 5},
    {"temperature": 2.0, "top_p": 0.6},
    {"temperature": 1.5, "min_p": 0.15},
    {"temperature": 0.8, "top_k": 8, "top_p": 0.9, "min_p": 0.02},
)


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filters_alone_and_together(options):
    probs = processed(LOGITS, **options)
    statistic, freedom = chi_square(draws(Sampler.FILTERED, seed=9, **options), probs)
    assert 0 < freedom < len(LOGITS)
    assert statistic < limit(freedom)


def test_the_statistic_notices_a_slightly_wrong_temperature():
    statistic, freedom = chi_square(draws(Sampler.RANDOM, temperature=1.0), processed(LOGITS, 1.1))
    assert statistic > 2 * limit(freedom)


def test_draws_at_successive_positions_and_seeds_are_independent():
    for vary in ("position", "seed"):
        tokens = draws(Sampler.RANDOM, vary)
        pairs = tokens[:-1:2] * len(LOGITS) + tokens[1::2]
        probs = processed(LOGITS)
        joint = np.outer(probs, probs).reshape(-1)
        statistic, freedom = chi_square(pairs, joint)
        # Rare pairs make the statistic a little wider than chi-square
        assert statistic < limit(freedom) * 1.1


def test_the_winning_noise_of_a_large_vocabulary_lies_on_a_fine_grid():
    noise = np.sort(np.asarray(gumbel(np.array([1, 2], np.uint32), 200_000)))
    assert np.isfinite(noise).all()
    assert len(np.unique(noise[-1000:])) >= 999  # with 23 random bits about a dozen would coincide
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.std() - np.pi / 6**0.5) < 0.01
