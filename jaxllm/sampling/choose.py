"""Which programs a request needs after a forward. Imports no jax."""

from __future__ import annotations

import enum
from collections.abc import Set

from jaxllm.sampling.options import SamplingParams


class Sampler(enum.IntEnum):
    """The compiled sampling programs. Each does everything that the ones before it do, so a batch
    needs the largest of its rows'."""

    GREEDY = 0  # the most likely token
    RANDOM = 1  # a temperature per row
    FILTERED = 2  # also min_p, top_k, top_p, and stop tokens suppressed until min_tokens


LOGPROBS = 8  # beside a sampler in `needs`: log-probabilities too


def needed(params: SamplingParams) -> Sampler:
    """The cheapest sampler that honours one request. A filter asks for nothing at top_p = 1, top_k
    <= 0 and min_p = 0."""
    if params.min_tokens > 0:
        return Sampler.FILTERED
    if params.greedy:
        return Sampler.GREEDY
    filtered = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
    return Sampler.FILTERED if filtered else Sampler.RANDOM


def needs(params: SamplingParams) -> int:
    """The sampler that one request needs, plus `LOGPROBS` if it asks for them: few different
    numbers, cheap to gather over a batch."""
    # Choices that compete are ranked by them
    logprobs = params.logprobs is not None or params.samples > params.n or params.use_beam_search
    return needed(params) | (LOGPROBS if logprobs else 0)


def sampler_of(kinds: Set[int]) -> Sampler:
    """The cheapest sampler that honours every request of a batch whose different `needs` are
    given."""
    return Sampler(max((kind % LOGPROBS for kind in kinds), default=0))
