"""The loop: what ends a request, what is refused, what is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxllm.engine.engine import Engine
from jaxllm.engine.scheduling.arrival_wait import ArrivalWait
from jaxllm.engine.scheduling.chunk_planner import CERTAIN_SHARE
from jaxllm.grammar.checker import Checker
from jaxllm.grammar.structure import StructuredOutputsParams
from jaxllm.messages import GenerateRequest, RequestError
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import collect, entries_of, run, tokens_of, write_random

MakeEngine = Callable[..., Engine]
PROMPT = [27, 18, 28, 18, 28, 45, 90, 4]


@pytest.fixture(scope="module")
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


@pytest.fixture
def free_run(engine: Engine) -> list[int]:
    """What the model says when nothing stops it."""
    tokens = run(engine, [PROMPT], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))[0]
    assert len(set(tokens)) > 8, "a model that repeats itself tests little"
    return tokens


def doubled(logits_SV: jax.Array, state: Any, *, factor: float = 2.0) -> jax.Array:
    """A processor of research code."""
    return logits_SV * factor[:, None]  # type: ignore[index]


def request(
    params: SamplingParams, id: str = "r", prompt: list[int] | None = None
) -> GenerateRequest:
    return GenerateRequest(id=id, prompt=Prompt(prompt or PROMPT), params=params)


def test_a_stop_token_ends_the_request_and_is_named(engine: Engine, free_run: list[int]) -> None:
    stop = free_run[5]
    deltas = collect(
        engine,
        [
            request(
                SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, stop_token_ids=[stop])
            )
        ],
    )
    assert tokens_of(deltas, "r") == free_run[: free_run.index(stop) + 1]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    assert engine.stats().free_pages == engine.stats().num_pages


def test_end_of_sequence_ends_the_request_unless_ignored(
    engine: Engine, free_run: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    eos = free_run[3]
    monkeypatch.setitem(vars(engine.resolved), "eos_ids", (eos,))
    deltas = collect(engine, [request(SamplingParams(temperature=0, max_tokens=16))])
    assert tokens_of(deltas, "r") == free_run[: free_run.index(eos) + 1]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)
    assert (
        run(engine, [PROMPT], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))[0]
        == free_run
    )


def test_min_tokens_makes_stop_tokens_impossible_until_then(
    engine: Engine, free_run: list[int]
) -> None:
    stop = free_run[1]
    params = SamplingParams(
        temperature=0, max_tokens=16, min_tokens=6, ignore_eos=True, stop_token_ids=[stop]
    )
    tokens = run(engine, [PROMPT], params)[0]
    assert len(tokens) >= 6
    assert stop not in tokens[:6]


def test_max_tokens_ends_the_request(engine: Engine) -> None:
    deltas = collect(
        engine, [request(SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))]
    )
    assert len(tokens_of(deltas, "r")) == 3
    assert deltas[-1].finish_reason == "length"


def test_generation_is_clamped_to_the_models_length(engine: Engine) -> None:
    prompt = PROMPT * 15  # 120 of 128
    deltas = collect(
        engine,
        [request(SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), prompt=prompt)],
    )
    assert len(tokens_of(deltas, "r")) == 8
    assert deltas[-1].finish_reason == "length"


def test_choices_of_one_request_are_different_draws_and_repeatable(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=12, ignore_eos=True)
    first = collect(engine, [request(params)])
    again = collect(engine, [request(params)])
    choices = [tokens_of(first, "r", i) for i in range(3)]
    assert len({tuple(c) for c in choices}) == 3
    assert choices == [tokens_of(again, "r", i) for i in range(3)]
    single = collect(engine, [request(replace(params, n=1))])
    assert tokens_of(single, "r") == choices[0]


def test_requests_without_a_seed_draw_differently_and_an_engine_seed_repeats_them(
    make_engine: MakeEngine,
) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    engine = make_engine(seed=5)
    first, second = run(engine, [PROMPT], params), run(engine, [PROMPT], params)
    assert first != second
    engine = make_engine(seed=5)
    assert [run(engine, [PROMPT], params), run(engine, [PROMPT], params)] == [first, second]


def test_seeds_that_agree_in_their_low_32_bits_draw_differently(engine: Engine) -> None:
    # A negative seed stands for itself plus 2**64
    seeds = (0, 2**32, -1, 2**32 - 1, 2**63 - 1, -(2**63))
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True) for seed in seeds
    ]
    assert len({tuple(tokens) for tokens in run(engine, [PROMPT] * len(seeds), params)}) == len(
        seeds
    )


def test_logprobs_name_the_chosen_token_and_the_top(engine: Engine) -> None:
    deltas = collect(
        engine, [request(SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True))]
    )
    for delta in deltas:
        (entry,) = entries_of([delta])
        assert len(entry.top) == 3
        assert entry.token_id == delta.token_ids[0] == entry.top[0][0]
        assert entry.rank == 1
        assert entry.logprob == entry.top[0][1]
        assert sorted((v for _, v in entry.top), reverse=True) == [v for _, v in entry.top]


def test_a_recycled_slot_keeps_nothing_of_its_last_owner(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = run(engine, [PROMPT], plain)[0]
    wild = SamplingParams(
        temperature=1.7,
        top_k=3,
        top_p=0.5,
        min_p=0.2,
        seed=3,
        min_tokens=4,
        stop_token_ids=[alone[1]],
        max_tokens=9,
    )
    assert run(engine, [PROMPT[:3], PROMPT], [wild, plain])[1] == alone


@pytest.mark.parametrize("leave_late", [False, True])
def test_nothing_compiles_after_warm_up_whatever_is_asked(
    every_shape: MakeEngine, tmp_path: Path, repo: Path, leave_late: bool
) -> None:
    """But late programs, which those requests wait for that need them first."""
    engine = every_shape(
        processors=[doubled],
        model=write_random(tmp_path, repo),
        skip_tokenizer_init=False,
        max_logprobs=5,
        enforce_eager=False,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=24,
        leave_late=leave_late,
    )
    assert engine.stats().compiles_after_warmup == 0
    assert (engine.stats().missing_programs > 0) == leave_late
    mixes: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.01},
        {"logprobs": 5},
        {"prompt_logprobs": 3, "logprobs": 1},
        {"min_tokens": 3, "stop_token_ids": [4]},
        {"n": 3, "seed": 1},
        {"n": 2, "best_of": 3, "seed": 2},
        {"use_beam_search": True, "n": 3, "temperature": 0},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": {5: 1.0}},
        {"allowed_token_ids": list(range(90)), "bad_words": ["a", "the end of it"], "logprobs": 2},
        {"logits_processors": ["doubled"], "extra_args": {"factor": 2.0}},
        {"logits_processors": [lambda output, logits_V: logits_V * 2], "top_p": 0.9},
        {"grammar": "[a-z]{3,30}", "prompt_logprobs": 1},
        {"grammar": "the quick brown fox jumps over the lazy dog", "n": 2},
        {"grammar": "[ab]+", "repetition_penalty": 1.1, "logprobs": 1, "temperature": 0.5},
    ]
    checker = Checker({})
    for first, count in ((0, 1), (0, 2), (0, 4), (0, 9), (9, 7), (3, 16), (12, 4)):
        for at in range(first, first + count):
            asked = dict(mixes[at % len(mixes)])
            grammar = (
                None
                if "grammar" not in asked
                else checker.compile_params(StructuredOutputsParams(regex=asked.pop("grammar")))
            )
            params = SamplingParams(**{"max_tokens": 5 + at, "ignore_eos": True} | asked)
            engine.add(
                replace(request(params, f"{first}-{at}", PROMPT * (1 + at % 4)), grammar=grammar)
            )
        deltas = collect(engine, [])
        assert {delta.finish_reason for delta in deltas} <= {None, "stop", "length"}
    checker.end_processes()
    assert engine.stats().compiles_after_warmup == 0
    assert (engine.stats().late_programs > 0) == leave_late


def test_a_compilation_while_serving_is_counted(every_shape: MakeEngine) -> None:
    engine = every_shape()
    before = engine.stats().compiles_after_warmup
    run(engine, [PROMPT], SamplingParams(max_tokens=2))
    assert engine.stats().compiles_after_warmup > before


def test_prefixes_are_shared_within_a_salt_only(make_engine: MakeEngine) -> None:
    engine, params = make_engine(), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt, cached = PROMPT * 4, []
    for number, salt in enumerate((None, "a", "b", "a", None)):
        wanted = GenerateRequest(
            id=str(number), prompt=Prompt(prompt), params=params, cache_salt=salt
        )
        cached.append(collect(engine, [wanted])[-1].num_cached_tokens)
    assert cached == [0, 0, 0, 24, 24]
    with pytest.raises(RequestError, match="cache_salt"):
        engine.add(GenerateRequest(id="x", prompt=Prompt(prompt), params=params, cache_salt="a/b"))


def test_the_engine_follows_the_policy_and_the_scheduler_that_were_asked_for(
    make_engine: MakeEngine,
) -> None:
    params = [SamplingParams(max_tokens=4, ignore_eos=True, priority=rank) for rank in (3, 0, -3)]
    engine = make_engine(max_num_seqs=1, scheduling_policy="priority")
    ends = [
        d.id
        for d in collect(engine, [request(p, str(p.priority)) for p in params])
        if d.finish_reason
    ]
    assert ends == ["-3", "0", "3"]
    engine = make_engine(
        max_num_seqs=1, scheduler_cls="tests.engine.scheduling.test_policy:ShortestFirst"
    )
    shorter = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (40, 20, 3)]
    ends = [
        d.id
        for d in collect(engine, [request(p, str(p.max_tokens)) for p in shorter])
        if d.finish_reason
    ]
    assert ends == ["3", "20", "40"]
    with pytest.raises(RequestError, match="--scheduling-policy priority") as error:
        engine.validate(request(params[0]))
    assert error.value.param == "priority"


def test_an_engine_learns_to_be_patient_only_from_those_who_look_out(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    engine.steps.arrival_wait = ArrivalWait(lambda: 0.0)
    engine.add(
        GenerateRequest(
            id="a",
            prompt=Prompt([5, 6, 7]),
            params=SamplingParams(max_tokens=40, ignore_eos=True),
        )
    )
    for _ in range(10):
        engine.step()
    margins: list[float] = []
    engine.steps.arrival_wait._decodes.learn = margins.append  # type: ignore[method-assign]
    engine.step()
    assert margins == []
    assert engine.wait_seconds == 0.0
    engine.step()
    assert len(margins) == 1


def test_a_step_with_chunks_leaves_as_much_longer_to_look_out_as_warm_up_says(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=64)
    engine.steps.arrival_wait = ArrivalWait(lambda: 0.0)
    engine.runner.depth = 1
    buckets = engine.runner.shapes.buckets
    engine.runner.seconds = dict.fromkeys(buckets.extend, 5e-3) | dict.fromkeys(
        buckets.decode, 1e-3
    )
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.add(GenerateRequest(id="a", prompt=Prompt([5, 6, 7]), params=params))
    for _ in range(4):
        engine.step()
    engine.steps.arrival_wait._decodes.seconds, engine.steps.arrival_wait._chunks.seconds = (
        2e-4,
        9e-3,
    )
    assert engine.wait_seconds == 2e-4
    engine.add(GenerateRequest(id="b", prompt=Prompt([5, 6, 8]), params=params))
    assert engine.wait_seconds == 0.0, "somebody waits already"
    engine.step()
    assert engine.wait_seconds == pytest.approx(CERTAIN_SHARE * 4e-3)
    engine.step()
    assert engine.wait_seconds < 1e-3
