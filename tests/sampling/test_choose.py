"""The cheapest sampler that honours a request."""

import pytest

from jaxllm.sampling.choose import LOGPROBS, Sampler, needed, needs, sampler_of
from jaxllm.sampling.options import SamplingParams


@pytest.mark.parametrize(
    ("options", "sampler"),
    [
        ({"temperature": 0}, Sampler.GREEDY),
        ({"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, Sampler.GREEDY),
        ({}, Sampler.RANDOM),
        ({"temperature": 0.7, "top_p": 1, "top_k": -1, "min_p": 0, "seed": 3}, Sampler.RANDOM),
        ({"temperature": 1e-6}, Sampler.GREEDY),
        ({"top_k": 0}, Sampler.RANDOM),
        ({"top_k": 1}, Sampler.FILTERED),
        ({"top_p": 0.99}, Sampler.FILTERED),
        ({"min_p": 0.01}, Sampler.FILTERED),
        ({"temperature": 0, "min_tokens": 1}, Sampler.FILTERED),
        ({"temperature": 0, "logprobs": 0}, Sampler.GREEDY),
    ],
    ids=str,
)
def test_a_request_needs_the_cheapest_sampler_that_honours_it(options, sampler):
    assert needed(SamplingParams(**options)) is sampler


def test_a_batch_needs_what_its_most_demanding_row_needs():
    greedy, random, filtered = (
        needs(SamplingParams(**options)) for options in ({"temperature": 0}, {}, {"top_k": 2})
    )
    assert sampler_of(set()) is Sampler.GREEDY
    assert sampler_of({greedy}) is Sampler.GREEDY
    assert sampler_of({greedy, random}) is Sampler.RANDOM
    assert sampler_of({filtered, greedy, random}) is Sampler.FILTERED


def test_log_probabilities_are_asked_for_beside_any_sampler():
    for options in ({"temperature": 0}, {}, {"top_k": 2}):
        plain, with_logprobs = (
            needs(SamplingParams(**options, **more)) for more in ({}, {"logprobs": 0})
        )
        assert with_logprobs == plain + LOGPROBS
        assert sampler_of({with_logprobs}) == Sampler(plain)
    assert needs(SamplingParams(best_of=2)) == needs(SamplingParams()) + LOGPROBS
    assert (
        sampler_of(
            {needs(SamplingParams(temperature=0, logprobs=3)), needs(SamplingParams(top_k=2))}
        )
        is Sampler.FILTERED
    )
