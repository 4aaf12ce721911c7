"""best_of: the most likely of several choices, told when all have ended."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from jaxllm.engine.engine import Engine
from jaxllm.messages import GenerateRequest, TextDelta
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import Outcome, collect, entries_of

PROMPT = [27, 18, 28, 18, 28, 45, 90, 4, 33]
OPTIONS: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 9}


def ask(engine: Engine, **options: Any) -> list[TextDelta]:
    return collect(
        engine,
        [
            GenerateRequest(
                id="r", prompt=Prompt(PROMPT), params=SamplingParams(**(OPTIONS | options))
            )
        ],
    )


def test_a_choice_is_not_the_first_of_the_request_with_the_next_seed(engine: Engine) -> None:
    said = [Outcome.of(ask(engine, n=3, seed=3), "r", index).tokens for index in range(3)]
    assert len({tuple(tokens) for tokens in said}) == 3
    others = [Outcome.of(ask(engine, seed=seed), "r").tokens for seed in (3, 4, 5, 6)]
    assert [tokens in others for tokens in said] == [True, False, False]


def test_the_most_likely_choices_are_told_in_order(engine: Engine) -> None:
    every = ask(engine, n=6, logprobs=0)
    choices = [Outcome.of(every, "r", index) for index in range(6)]
    sums = [math.fsum(entry.logprob for entry in choice.logprobs) for choice in choices]
    assert len({len(choice.tokens) for choice in choices}) > 1, "some choices end early"
    order = sorted(range(6), key=lambda index: -sums[index])
    assert order[:2] != [0, 1]
    best = ask(engine, n=2, best_of=6)
    assert [(d.index, d.token_ids, d.finish_reason) for d in best] == [
        (place, choices[index].tokens, choices[index].finish_reason)
        for place, index in enumerate(order[:2])
    ]
    assert [d.cumulative_logprob for d in best] == pytest.approx(
        [sums[index] for index in order[:2]], abs=1e-4
    )
    assert [d.logprobs for d in best] == [None, None]
    shown = ask(engine, n=2, best_of=6, logprobs=2)
    assert [[(e.token_id, len(e.top)) for e in entries_of([d])] for d in shown] == [
        [(t, 2) for t in d.token_ids] for d in best
    ]


def test_the_prompts_log_probabilities_come_with_the_winners(engine: Engine) -> None:
    alone, best = ask(engine, prompt_logprobs=2), ask(engine, n=2, best_of=3, prompt_logprobs=2)
    assert alone[0].prompt_logprobs is not None
    assert all(
        delta.prompt_logprobs is not None and delta.prompt_logprobs.top == 2 for delta in best
    )


def test_as_many_as_are_returned_need_no_competition(engine: Engine) -> None:
    alone, same = ask(engine, n=3), ask(engine, n=3, best_of=3)
    assert [Outcome.of(alone, "r", i).tokens for i in range(3)] == [
        Outcome.of(same, "r", i).tokens for i in range(3)
    ]
    assert len(same) > 3, "they are told as they come"


def test_an_abort_ends_what_was_asked_for(engine: Engine) -> None:
    engine.add(
        GenerateRequest(
            id="r",
            prompt=Prompt(PROMPT),
            params=SamplingParams(**OPTIONS, n=2, best_of=4, ignore_eos=True),
        )
    )
    for _ in range(4):
        assert engine.step() == []
    engine.abort("r")
    assert [(d.index, d.finish_reason) for d in collect(engine, [])] == [(0, "abort"), (1, "abort")]


def test_a_queue_counts_every_choice(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_num_queued_reqs=2)  # beside the 4 that run
    engine.add(
        GenerateRequest(id="r", prompt=Prompt(PROMPT), params=SamplingParams(**OPTIONS, best_of=3))
    )
    assert engine.scheduler.waiting == 3
    for best_of, fits in ((3, True), (4, False)):
        assert (
            engine.queue_has_space(
                GenerateRequest(
                    id="s", prompt=Prompt(PROMPT), params=SamplingParams(best_of=best_of)
                )
            )
            == fits
        )
