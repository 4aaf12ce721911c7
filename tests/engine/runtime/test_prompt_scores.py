"""Log-probabilities of prompts: each token once, whatever the steps; memory for a block of rows,
never for a prompt's logits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.engine.engine import Engine
from jaxllm.engine.runtime.lattice import forward_key
from jaxllm.engine.runtime.program import Key
from jaxllm.engine.runtime.programs.prompt_logprobs import score_rows
from jaxllm.engine.scheduling.plan import Chunk, Plan, Span, spans
from jaxllm.engine.scheduling.request import Request
from jaxllm.logprobs import prompt_entries
from jaxllm.messages import (
    MAX_SCORES,
    GenerateRequest,
    RequestError,
    TextDelta,
    TokenLogprobs,
    check_prompt_logprobs,
)
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import TINY, collect

MakeEngine = Callable[..., Engine]
PROMPT = [int(token) for token in np.random.default_rng(5).integers(0, 96, 90)]


def scores_of(deltas: list[TextDelta], id: str, prompt: list[int]) -> list[list[TokenLogprobs]]:
    """Of each delta that has some, a prompt's entries."""
    return [
        list(prompt_entries(d.prompt_logprobs, prompt))
        for d in deltas
        if d.id == id and d.prompt_logprobs is not None
    ]


def test_every_choice_begins_with_the_prompts_log_probabilities(engine: Engine) -> None:
    params = SamplingParams(prompt_logprobs=2, n=3, max_tokens=4, seed=1, ignore_eos=True)
    deltas = collect(engine, [GenerateRequest(id="r", prompt=Prompt(PROMPT), params=params)])
    with_scores = [d.index for d in deltas if d.prompt_logprobs is not None]
    assert sorted(with_scores) == [0, 1, 2]
    first_of = {index: next(d for d in deltas if d.index == index) for index in range(3)}
    assert all(d.prompt_logprobs is not None for d in first_of.values())
    one, *others = scores_of(deltas, "r", PROMPT)
    assert [entry.token_id for entry in one] == PROMPT[1:]
    assert all(other == one for other in others)
    for entry in one:
        assert len(entry.top) == 2
        assert (entry.rank == 1) == (entry.token_id == entry.top[0][0])
        if entry.rank == 1:
            assert entry.logprob == entry.top[0][1]


def test_a_prompt_of_one_token_has_an_empty_list(engine: Engine) -> None:
    deltas = collect(
        engine,
        [
            GenerateRequest(
                id="r", prompt=Prompt([5]), params=SamplingParams(prompt_logprobs=0, max_tokens=1)
            )
        ],
    )
    assert scores_of(deltas, "r", [5]) == [[]]


def test_a_prompt_whose_pages_are_cached_is_scored_as_the_first_time(engine: Engine) -> None:
    def scored() -> tuple[list[TokenLogprobs], int]:
        params = SamplingParams(prompt_logprobs=1, max_tokens=1)
        deltas = collect(engine, [GenerateRequest(id="r", prompt=Prompt(PROMPT), params=params)])
        return scores_of(deltas, "r", PROMPT)[0], deltas[0].num_cached_tokens

    assert engine.reset_prefix_cache()
    looked_up = engine.stats().prefix_queries
    first = scored()
    assert scored() == first
    assert first[1] == 0
    assert engine.stats().prefix_queries == looked_up, "what must be computed is not looked up"
    plain = collect(
        engine,
        [GenerateRequest(id="r", prompt=Prompt(PROMPT), params=SamplingParams(max_tokens=1))],
    )
    assert plain[0].num_cached_tokens > 0, "the pages of a scored prompt serve others"


def test_a_request_that_ends_within_its_prompt_leaves_nothing(engine: Engine) -> None:
    for steps in (1, 2):
        params = SamplingParams(prompt_logprobs=1, max_tokens=3)
        engine.add(GenerateRequest(id="gone", prompt=Prompt(PROMPT), params=params))
        for _ in range(steps):
            engine.step()
        engine.abort("gone")
        assert not scores_of(collect(engine, []), "gone", PROMPT)
    assert engine.stats().free_pages == engine.stats().num_pages


def request(scored: int, end: int) -> Request:
    made = Request(
        id="r",
        index=0,
        prompt=Prompt(list(range(100, 120))),
        params=SamplingParams(),
        seed=0,
        arrival=0.0,
        max_tokens=1,
    )
    made.scored, made.score_end = scored, end
    return made


def test_spans_leave_out_what_was_scored_and_find_their_rows() -> None:
    fresh, again, plain, last = request(0, 19), request(6, 19), request(0, 0), request(15, 19)
    chunks = tuple(
        Chunk(r, start, length, False)
        for r, start, length in ((plain, 0, 5), (fresh, 0, 8), (again, 4, 5), (last, 15, 5))
    )
    todo = spans(Plan((), chunks))
    assert todo == [Span(fresh, 0, 8, 5), Span(again, 6, 9, 15), Span(last, 15, 19, 18)]
    row, token = score_rows(todo)
    assert row.tolist() == [*range(5, 13), 15, 16, 17, 18, 19, 20, 21]
    assert token.tolist() == [*range(101, 109), 107, 108, 109, 116, 117, 118, 119]


def test_more_log_probabilities_than_memory_shall_hold_are_refused(engine: Engine) -> None:
    check_prompt_logprobs([MAX_SCORES // 2], 1, 1)
    check_prompt_logprobs([MAX_SCORES // 8], 1, 4)
    with pytest.raises(RequestError, match=f"at most {MAX_SCORES} are given") as caught:
        check_prompt_logprobs([MAX_SCORES // 4] * 3, 1, 1)
    assert caught.value.param == "prompt_logprobs"
    with pytest.raises(RequestError, match="4 choices"):
        check_prompt_logprobs([MAX_SCORES // 4], 1, 4)


def test_no_program_holds_the_logits_of_a_long_chunk(make_engine: MakeEngine) -> None:
    programs = make_engine(max_num_batched_tokens=512, max_model_len=512).runner.programs
    shapes, tokens = programs.shapes, 512
    vocabulary, block = shapes.vocab_size, shapes.buckets.score
    assert block < tokens / 4
    largest = shapes.buckets.extend[-1]
    assert largest.tokens == tokens
    for key in (forward_key(largest), Key("prompt_logprobs", (block, shapes.widths[-1]))):
        recipe = programs.recipe(key)
        text = jax.jit(recipe.function).lower(*recipe.arguments).as_text()
        rows = {int(found) for found in re.findall(rf"tensor<(\d+)x{vocabulary}xf32>", text)}
        assert rows
        assert max(rows) <= max(block, shapes.buckets.logits[-1])


def test_only_rows_that_get_logits_pass_the_last_feed_forward(make_engine: MakeEngine) -> None:
    programs = make_engine(max_num_batched_tokens=512, max_model_len=512).runner.programs
    layers = len(programs.shapes.model.places)
    gate_up = (1, 2, TINY["intermediate_size"], TINY["hidden_size"])
    for shape in programs.shapes.buckets.extend:
        recipe = programs.recipe(forward_key(shape))
        dots = _products(jax.make_jaxpr(recipe.function)(*recipe.arguments).jaxpr)
        rows = [result.shape[0] for result, weight in dots if weight.shape == gate_up]
        assert rows == [shape.tokens + shape.decodes] * (layers - 1) + [
            programs.shapes.buckets.logit_rows(shape)
        ]


def _products(jaxpr: Any) -> list[tuple[Any, Any]]:
    """Result and second factor of every product, in order, those of inner programs too."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append((equation.outvars[0].aval, equation.invars[1].aval))
        for value in equation.params.values():
            found += (
                _products(value.jaxpr)
                if hasattr(value, "jaxpr")
                else _products(value)
                if hasattr(value, "eqns")
                else []
            )
    return found


def test_what_extends_leave_is_written_in_place(make_engine: MakeEngine) -> None:
    runner = make_engine().runner
    largest = runner.shapes.buckets.extend[-1]
    compiled = runner.programs.get(forward_key(largest))
    own = sum(
        x.size * x.dtype.itemsize
        for x in jax.tree.leaves((runner.shapes.kv, runner.shapes.hidden_states))
    )
    assert compiled.memory_analysis().alias_size_in_bytes >= own


def test_a_step_that_fails_leaves_buffers_for_the_next(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    params = SamplingParams(prompt_logprobs=1, max_tokens=1)
    expected = scores_of(
        collect(engine, [GenerateRequest(id="r", prompt=Prompt(PROMPT), params=params)]),
        "r",
        PROMPT,
    )
    engine.add(GenerateRequest(id="lost", prompt=Prompt(PROMPT), params=replace(params)))
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "collect", lambda result: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            collect(engine, [])
    found = scores_of(
        collect(engine, [GenerateRequest(id="r", prompt=Prompt(PROMPT), params=params)]),
        "r",
        PROMPT,
    )
    assert found == expected
