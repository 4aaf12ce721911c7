"""Which sampling program a batch needs. Imports no jax."""

from __future__ import annotations

import enum
from collections.abc import Set

from jaxllm.sampling.options import DRAW_COLUMNS, SamplingParams, is_set

FILTERS = tuple(name for name, column in DRAW_COLUMNS.items() if column.filters)


class Sampler(enum.IntEnum):
    """The compiled sampling programs. Each includes those before it, so a batch needs the largest
    of its rows'."""

    GREEDY = 0  # the most likely token
    RANDOM = 1  # a temperature per row
    FILTERED = 2  # also options that exclude tokens, and stop tokens banned until min_tokens


LOGPROBS = 8  # the highest flag in `needs`: log-probabilities too


def needed(params: SamplingParams) -> Sampler:
    """The cheapest sampler that honours one request."""
    if params.min_tokens > 0:
        return Sampler.FILTERED
    if params.greedy:
        return Sampler.GREEDY
    if any(is_set(params, name) for name in FILTERS):
        return Sampler.FILTERED
    return Sampler.RANDOM


def needs(params: SamplingParams) -> int:
    """The sampler of one request, plus `LOGPROBS` where it needs them: few different numbers, cheap
    to gather over a batch."""
    return needed(params) | (LOGPROBS if params.logprobs is not None or params.ranked else 0)


def sampler_of(needs: Set[int]) -> Sampler:
    """The cheapest sampler for a batch, from the distinct `needs` of its requests."""
    return Sampler(max((need % LOGPROBS for need in needs), default=0))
