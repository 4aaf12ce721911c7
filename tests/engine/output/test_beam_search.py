"""Beam searches in the engine: what is told, refused, aborted and counted; and the arithmetic where
everything can be enumerated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from jaxllm.engine.engine import Engine
from jaxllm.engine.output.beam_search import BeamSearch, Rules
from jaxllm.messages import GenerateRequest, RequestError, TextDelta
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.by_layer import spoiled
from tests.engine.conftest import collect, entries_of

PROMPT = [27, 18, 28, 18, 28, 45, 90, 4, 33]
OPTIONS: dict[str, Any] = {"use_beam_search": True, "max_tokens": 6, "ignore_eos": True}


def request(id: str = "r", prompt: list[int] | None = None, **options: Any) -> GenerateRequest:
    return GenerateRequest(
        id=id, prompt=Prompt(prompt or PROMPT), params=SamplingParams(**(OPTIONS | options))
    )


def ask(engine: Engine, **options: Any) -> list[TextDelta]:
    return collect(engine, [request(**options)])


def values(prefix: tuple[int, ...]) -> list[float]:
    """Log-probabilities of three tokens after a prefix."""
    weights = [
        1.0 + math.sin(7.3 * token + sum((i + 1.7) * t for i, t in enumerate(prefix, 1)))
        for token in range(3)
    ]
    return [math.log(weight / sum(weights)) for weight in weights]


@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5])
def test_a_search_with_room_for_everything_finds_the_best_of_all(penalty: float) -> None:
    search = BeamSearch(
        Rules(
            width=100,
            max_tokens=4,
            stops=frozenset([2]),
            length_penalty=penalty,
            early_stopping="never",
        )
    )
    parents = [0]
    while parents:
        tops = [
            sorted(enumerate(values(tuple(beam.tokens))), key=lambda pair: -pair[1])
            for beam in search.beams
        ]
        parents = search.step(tops)
    every = []
    for length in range(1, 5):
        for sequence in itertools.product(range(3), repeat=length):
            if 2 in sequence[:-1] or (length < 4 and sequence[-1] != 2):
                continue
            total = sum(values(sequence[:i])[token] for i, token in enumerate(sequence))
            every.append((total / length**penalty, list(sequence)))
    every.sort(reverse=True)
    assert [one.beam.tokens for one in search.finished] == [sequence for _, sequence in every]
    assert [one.score for one in search.finished] == pytest.approx([score for score, _ in every])


def test_one_beam_is_the_greedy_continuation(engine: Engine) -> None:
    greedy = collect(engine, [request(use_beam_search=False, temperature=0, logprobs=2)])
    (beam,) = ask(engine, n=1, logprobs=2)
    assert beam.token_ids == [token for delta in greedy for token in delta.token_ids]
    assert [(e.token_id, e.rank, len(e.top)) for e in entries_of([beam])] == [
        (token, 1, 2) for token in beam.token_ids
    ]
    assert beam.cumulative_logprob == pytest.approx(
        sum(e.logprob for e in entries_of(greedy)), abs=1e-4
    )


def test_the_n_best_of_so_many_beams_are_told_at_once_and_in_order(engine: Engine) -> None:
    every, best = ask(engine, n=4), ask(engine, n=2, best_of=4)
    assert [delta.token_ids for delta in best] == [delta.token_ids for delta in every[:2]]
    assert [(delta.index, delta.finish_reason, delta.logprobs) for delta in every] == [
        (i, "length", None) for i in range(4)
    ]
    scores = [delta.cumulative_logprob for delta in every]
    assert scores == sorted(scores, reverse=True), "all are as long"  # type: ignore[type-var]
    assert (
        every[0].times is not None
        and every[0].times.arrival <= every[0].times.scheduled <= every[0].times.first_token
    )


def test_an_end_token_ends_a_sequence_and_is_named_unless_it_is_the_models(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (free,) = ask(engine, n=1, max_tokens=12)
    stop = free.token_ids[3]
    (named,) = ask(engine, n=1, max_tokens=12, stop_token_ids=[stop])
    assert (named.token_ids, named.finish_reason, named.stop_reason) == (
        free.token_ids[: free.token_ids.index(stop) + 1],
        "stop",
        stop,
    )
    (early,) = ask(engine, n=1, max_tokens=12, stop_token_ids=[stop], min_tokens=12)
    assert len(early.token_ids) == 12 and stop not in early.token_ids
    ends = ask(engine, n=4, max_tokens=30, ignore_eos=False)
    assert any(delta.finish_reason == "stop" for delta in ends)
    assert all(delta.stop_reason is None for delta in ends)


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        ({"n": 5}, "n", "--max-num-seqs is 4"),
        ({"n": 2, "best_of": 5}, "best_of", "5 beams"),
        ({"n": 4, "stop_token_ids": list(range(17))}, "n", "--max-logprobs is 20"),
        ({"n": 4, "max_tokens": 100, "prompt": [1, 2]}, "max_tokens", "KV pages"),
    ],
)
def test_a_search_that_does_not_fit_is_refused(
    make_engine: Callable[..., Engine], options: dict[str, Any], param: str, says: str
) -> None:
    engine = make_engine(num_gpu_blocks_override=16)
    with pytest.raises(RequestError, match=says) as error:
        engine.add(request(**options))
    assert error.value.param == param
    assert not engine.has_work


@pytest.mark.parametrize(
    ("options", "param"),
    [({"n": 2}, "use_beam_search"), ({"use_beam_search": False, "best_of": 2}, "best_of")],
)
def test_choices_do_not_compete_by_logits(
    make_engine: Callable[..., Engine], options: dict[str, Any], param: str
) -> None:
    engine = make_engine(logprobs_mode="raw_logits")
    with pytest.raises(RequestError, match="--logprobs-mode raw_logits") as error:
        engine.add(request(**options))
    assert error.value.param == param


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_frees_all_beams_at_once(engine: Engine, steps: int) -> None:
    engine.add(request(n=2, best_of=4, max_tokens=40))
    for _ in range(steps):
        assert engine.step() == []
    engine.abort("r")
    assert engine.stats().free_pages == engine.stats().num_pages
    assert [(delta.index, delta.finish_reason) for delta in collect(engine, [])] == [
        (0, "abort"),
        (1, "abort"),
    ]


@pytest.mark.slow
def test_logits_that_are_not_finite_end_the_search_alone(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(enable_prefix_caching=False, max_num_seqs=8)
    engine.add(request("poisoned", [7] * 9, n=3, max_tokens=24))
    engine.add(request("healthy", n=3, max_tokens=24))
    deltas: list[TextDelta] = []
    for _ in range(6):
        deltas += engine.step()
    victim = next(r for r in engine.scheduler._running if r.id == "poisoned")
    engine.runner.kv = spoiled(engine.runner.kv, 0, victim.pages[0])
    deltas += collect(engine, [])
    found = {id: [delta for delta in deltas if delta.id == id] for id in ("poisoned", "healthy")}
    assert [(delta.index, delta.finish_reason) for delta in found["poisoned"]] == [
        (i, "error") for i in range(3)
    ]
    assert [delta.token_ids for delta in found["healthy"]] == [
        delta.token_ids for delta in ask(engine, n=3, max_tokens=24)
    ]
    engine.scheduler.check()


def test_a_step_that_fails_forgets_searches_too(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.add(request(n=3))
    engine.step()
    with monkeypatch.context() as broken:
        broken.setattr(engine.scheduler, "plan", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert not engine.has_work
    engine.self_check()
    assert engine.stats().self_check_failures == 0
    assert len(ask(engine, n=3)) == 3
