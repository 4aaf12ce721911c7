"""From wished sampling to the one that runs."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from jaxllm.messages import RequestError
from jaxllm.prepared import Additions, count_logprobs, prepared
from jaxllm.sampling.options import MAX_STOP_TOKEN_IDS, SamplingParams
from tests.server.fake import RESOLVED

MODEL = replace(RESOLVED, max_model_len=100, vocab_size=50, max_logprobs=50)
EVERYTHING = Additions(
    scores_prompt=True,
    stop_token_ids=(3, 1),
    shows_special_tokens=True,
    is_compiled=True,
    seed=7,
)


def test_wishes_never_change() -> None:
    wishes = SamplingParams()
    with pytest.raises(FrozenInstanceError):
        wishes.temperature = 0.0  # type: ignore[misc]
    prepared(wishes, MODEL, 10, EVERYTHING)
    assert wishes == SamplingParams()


@pytest.mark.parametrize(
    ("wish", "limit"), [(None, 90), (16, 16), (90, 90), (91, 90), (2**31 - 1, 90)]
)
def test_an_output_ends_with_the_context(wish: int | None, limit: int) -> None:
    params = prepared(SamplingParams(max_tokens=wish), MODEL, 10)
    assert params.output_limit == params.max_tokens == limit


def test_no_more_tokens_are_needed_than_fit() -> None:
    params = prepared(SamplingParams(min_tokens=95, max_tokens=96), MODEL, 10)
    assert (params.min_tokens, params.max_tokens) == (90, 90)


def test_minus_one_is_the_vocabulary() -> None:
    params = prepared(SamplingParams(logprobs=-1, prompt_logprobs=-1), MODEL, 10)
    assert (params.logprobs, params.prompt_logprobs) == (50, 50)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("wish", "shown"), [(-1, "-1, the whole vocabulary of 50 tokens"), (21, "21")]
)
def test_too_many_logprobs_are_refused(name: str, wish: int, shown: str) -> None:
    model = replace(MODEL, max_logprobs=20)
    with pytest.raises(RequestError) as refused:
        prepared(SamplingParams(**{name: wish}), model, 10)
    assert refused.value.param == name
    assert str(refused.value) == f"{name} must be at most 20 (--max-logprobs), got {shown}"
    assert count_logprobs(SamplingParams(**{name: 20}), name, model) == 20


@pytest.mark.parametrize(
    ("logprobs", "prompt_logprobs", "top"), [(0, None, 0), (2, None, 2), (2, 5, 5), (-1, 5, 50)]
)
def test_an_echo_scores_the_prompt_as_the_output(
    logprobs: int, prompt_logprobs: int | None, top: int
) -> None:
    wishes = SamplingParams(logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    assert prepared(wishes, MODEL, 10, Additions(scores_prompt=True)).prompt_logprobs == top


def test_stop_tokens_of_the_endpoint_come_to_those_of_the_client() -> None:
    wishes = SamplingParams(stop_token_ids=[9, 3])
    assert prepared(wishes, MODEL, 10, EVERYTHING).stop_token_ids == [1, 3, 9]
    full = SamplingParams(stop_token_ids=list(range(100, 100 + MAX_STOP_TOKEN_IDS)))
    with pytest.raises(RequestError, match="at most 64 ids, got 66") as refused:
        prepared(full, MODEL, 10, EVERYTHING)
    assert refused.value.param == "stop_token_ids"


def test_a_seed_is_for_those_that_have_none() -> None:
    assert prepared(SamplingParams(), MODEL, 10, EVERYTHING).seed == 7
    assert prepared(SamplingParams(seed=0), MODEL, 10, EVERYTHING).seed == 0


@pytest.mark.parametrize("additions", [Additions(), EVERYTHING])
def test_what_is_prepared_stays_as_it_is(additions: Additions) -> None:
    wishes = SamplingParams(
        max_tokens=None, logprobs=-1, structured_outputs={"regex": "a+"}, n=2, min_tokens=3
    )
    params = prepared(wishes, MODEL, 10, additions)
    assert prepared(params, MODEL, 10, additions) is params
    assert prepared(params, MODEL, 10) is params
    assert replace(params) == params, "its values are legal"


def test_prompts_that_change_nothing_share_one_value() -> None:
    wishes = SamplingParams(max_tokens=16, allowed_token_ids=list(range(40)))
    assert prepared(wishes, MODEL, 10) is prepared(wishes, MODEL, 20) is wishes
    shorter = prepared(wishes, MODEL, 90)
    assert shorter.max_tokens == 10
    assert shorter.allowed_token_ids is wishes.allowed_token_ids, "nothing is read again"
