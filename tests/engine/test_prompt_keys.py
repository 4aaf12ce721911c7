"""Prompts share pages where their keys are equal, whatever their tokens are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jaxllm.engine.engine import Engine
from jaxllm.messages import GenerateRequest
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import collect, tokens_of

PAGE = 8
TOKENS = list(range(20, 57))
# One token's content is another one
IMAGE = [*TOKENS[:10], -7, *TOKENS[11:]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


def answer(engine: Engine, prompt: Prompt) -> tuple[list[int], int]:
    """The output, and how many tokens of the prompt were cached."""
    deltas = collect(engine, [GenerateRequest(id="r", prompt=prompt, params=GREEDY)])
    engine.scheduler.check()
    return tokens_of(deltas, "r"), deltas[-1].num_cached_tokens


def test_equal_tokens_with_unequal_keys_share_the_pages_before_alone(engine: Engine) -> None:
    plain, cached = answer(engine, Prompt(TOKENS))
    assert cached == 0
    other = [-number for number in range(1, len(TOKENS) + 1)]
    assert answer(engine, Prompt(TOKENS, other)) == (plain, 0)
    assert answer(engine, Prompt(TOKENS, IMAGE)) == (plain, PAGE)


def test_equal_keys_share_pages_and_those_of_the_output_after_them(engine: Engine) -> None:
    output, _ = answer(engine, Prompt(TOKENS, IMAGE))
    again = Prompt([*TOKENS], [*IMAGE])
    assert answer(engine, again) == (output, len(TOKENS) // PAGE * PAGE)
    longer = Prompt([*TOKENS, *output, 5], [*IMAGE, *output, 5])
    _, cached = answer(engine, longer)
    # The last token's KV is never written
    assert cached == (len(TOKENS) + len(output) - 1) // PAGE * PAGE
    _, cached = answer(engine, Prompt(longer.tokens))
    assert cached == PAGE


def test_keys_that_are_the_tokens_are_found_by_prompts_without_keys(engine: Engine) -> None:
    output, _ = answer(engine, Prompt(TOKENS, [*TOKENS]))
    assert answer(engine, Prompt(TOKENS)) == (output, len(TOKENS) // PAGE * PAGE)
