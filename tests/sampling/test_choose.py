"""The cheapest sampler that honours a request."""

import pytest

from jaxllm.sampling.choose import Sampler, choose, needed
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
        ({"temperature": 0, "logprobs": 0}, Sampler.LOGPROBS),
        ({"top_p": 0.5, "logprobs": 5}, Sampler.LOGPROBS),
    ],
    ids=str,
)
def test_a_request_needs_the_cheapest_sampler_that_honours_it(options, sampler):
    assert needed(SamplingParams(**options)) is sampler


def test_a_batch_needs_what_its_most_demanding_row_needs():
    greedy, random, filtered = SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=2)
    assert choose([]) is Sampler.GREEDY
    assert choose([greedy, greedy]) is Sampler.GREEDY
    assert choose([greedy, random]) is Sampler.RANDOM
    assert choose([filtered, greedy, random]) is Sampler.FILTERED
    assert choose([greedy, SamplingParams(logprobs=1), filtered]) is Sampler.LOGPROBS
