"""What log-probabilities are of: the model's own logits, or what tokens are drawn by, whatever has
changed that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine.engine import Engine
from jaxllm.logprobs import prompt_entries
from jaxllm.messages import RequestError
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import TINY, collect, entries_of, reading_words
from tests.engine.test_engine import PROMPT, request
from tests.sampling.process_oracle import expected

MakeEngine = Callable[..., Engine]
V = TINY["vocab_size"]


def doubled(logits_SV: jax.Array, state: Any) -> jax.Array:
    """A processor of research code."""
    return jnp.where(jnp.arange(V) < 20, logits_SV * 2, logits_SV)


def halved(output: list[int], logits_V: np.ndarray) -> np.ndarray:
    """A function on the host."""
    return logits_V / 2


@pytest.fixture(scope="module")
def raw_logits(make_engine: MakeEngine) -> list[dict[int, float]]:
    """Of every token at the first three places of a greedy run that cannot end."""
    return everything(
        make_engine(max_logprobs=104, logprobs_mode="raw_logits"), temperature=0, ignore_eos=True
    )


@pytest.fixture(scope="module")
def raw(make_engine: MakeEngine) -> Engine:
    return reading_words(make_engine(processors=[doubled], max_logprobs=104))


@pytest.fixture(scope="module")
def processed(make_engine: MakeEngine) -> Engine:
    return reading_words(
        make_engine(processors=[doubled], max_logprobs=104, logprobs_mode="processed_logprobs")
    )


def everything(engine: Engine, **options: Any) -> list[dict[int, float]]:
    """What an engine says of every token, place by place."""
    deltas = collect(engine, [request(SamplingParams(max_tokens=3, logprobs=104, **options))])
    return [dict(entry.top) for entry in entries_of(deltas)]


def test_logits_can_take_the_place_of_log_probabilities(
    raw: Engine, raw_logits: list[dict[int, float]]
) -> None:
    for found, logits in zip(
        everything(raw, temperature=0, ignore_eos=True), raw_logits, strict=True
    ):
        total = np.log(np.sum(np.exp(np.array(list(logits.values()), np.float64))))
        assert found == pytest.approx({id: logit - total for id, logit in logits.items()}, abs=2e-5)


def test_minus_one_is_the_whole_vocabulary(make_engine: MakeEngine) -> None:
    engine = make_engine(max_logprobs=-1)
    both = SamplingParams(temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1)
    deltas = collect(engine, [request(both)])
    assert both.logprobs == -1  # the caller's object stays as it is
    scores = deltas[0].prompt_logprobs
    assert scores is not None
    assert scores.top == V
    for entry in [*entries_of(deltas), *prompt_entries(scores, PROMPT)]:
        assert sorted(id for id, _ in entry.top) == list(range(V))
        assert sum(np.exp(value) for _, value in entry.top) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_the_whole_vocabulary_needs_a_limit_of_its_size(make_engine: MakeEngine, name: str) -> None:
    engine = make_engine(max_logprobs=V - 1)
    with pytest.raises(
        RequestError, match=rf"at most {V - 1} \(--max-logprobs\), got -1, .* {V} "
    ) as error:
        engine.validate(request(SamplingParams(**{name: -1})))
    assert error.value.param == name
    assert engine.validate(request(SamplingParams(**{name: V - 1})))


def test_processed_log_probabilities_are_of_what_the_draw_may_take(
    processed: Engine, raw_logits: list[dict[int, float]]
) -> None:
    first = everything(processed, temperature=0.5, top_k=3, seed=1)[0]
    likeliest = sorted(raw_logits[0], key=lambda id: -raw_logits[0][id])[:3]
    weights = np.exp(np.array([raw_logits[0][id] for id in likeliest]) / 0.5)
    assert [first[id] for id in likeliest] == pytest.approx(
        np.log(weights / weights.sum()), abs=2e-5
    )
    assert {value for id, value in first.items() if id not in likeliest} == {-np.inf}
    ends = TINY["eos_token_id"]
    until = everything(processed, temperature=0, min_tokens=2)
    assert [all(place[id] == -np.inf for id in ends) for place in until] == [True, True, False]  # type: ignore[attr-defined]


ASKED: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]]] = {
    "bias": ({"logit_bias": {5: 3.0, 99: -2.0}}, lambda logits_V: logits_V),
    "penalty": ({"repetition_penalty": 1.7}, lambda logits_V: logits_V),
    "allowed": ({"allowed_token_ids": list(range(0, V, 2))}, lambda logits_V: logits_V),
    "bad words": (
        {"bad_words": ["7", "8 9"]},
        lambda logits_V: np.where(np.arange(V) == 7, -np.inf, logits_V),
    ),
    "processor": (
        {"logits_processors": ["doubled"]},
        lambda logits_V: np.where(np.arange(V) < 20, logits_V * 2, logits_V),
    ),
    "host": (
        {"logits_processors": [halved], "repetition_penalty": 1.3},
        lambda logits_V: logits_V / 2,
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_process_and_processors_change_shows_in_processed_log_probabilities_alone(
    raw: Engine, processed: Engine, raw_logits: list[dict[int, float]], name: str
) -> None:
    options, change = ASKED[name]
    logits_V = np.array([raw_logits[0][id] for id in range(V)])
    params = SamplingParams(
        **{
            key: value
            for key, value in options.items()
            if key not in ("bad_words", "logits_processors")
        }
    )
    asked_V = change(expected(logits_V, params, PROMPT, []))
    for temperature in (0, 1):
        found, own = (
            everything(engine, temperature=temperature, seed=3, **options)[0]
            for engine in (processed, raw)
        )
        assert [found[id] for id in range(V)] == pytest.approx(log_softmax(asked_V), abs=2e-5)
        assert [own[id] for id in range(V)] == pytest.approx(log_softmax(logits_V), abs=2e-5)
    assert not np.allclose(log_softmax(asked_V), log_softmax(logits_V), atol=1e-2)


def log_softmax(x: np.ndarray) -> list[float]:
    """In float64."""
    return (x - x.max() - np.log(np.exp(x - x.max()).sum())).tolist()
