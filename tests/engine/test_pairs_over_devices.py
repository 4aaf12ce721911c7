"""Features in pairs over several devices: whatever an engine is asked for together, it says what
one device says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.sampling.processors import ProcessorState
from tests.engine.conftest import write_random
from tests.engine.fake_host import Optimist
from tests.engine.few_shapes import few_shapes

type Wishes = dict[str, Any]

# What each pair of is tried with each number of devices; a feature's first way is the usual one
FEATURES: dict[str, dict[str, Wishes]] = {
    "devices": {
        "2 shards": {"tensor_parallel_size": 2},
        "4 shards": {"tensor_parallel_size": 4},
        "8 shards": {"tensor_parallel_size": 8},
        "2 stages": {"pipeline_parallel_size": 2},
        "2 stages of 2 shards": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    },
    "weights": {
        "plain": {},
        "fp8": {"quantization": "fp8_w8a16"},
        "int4": {"quantization": "int4"},
    },
    "pages": {"plain": {}, "8 bits": {"kv_cache_dtype": "fp8"}},
    "room": {
        "ample": {},
        "recomputed": {"num_gpu_blocks_override": 20},
        "swapped": {
            "num_gpu_blocks_override": 20,
            "preemption_mode": "swap",
            "swap_space": 0.01,
        },
        "on the host": {"num_gpu_blocks_override": 20, "kv_offloading_size": 0.01},
    },
    "prefixes": {"kept": {}, "not kept": {"enable_prefix_caching": False}},
    "batches": {"free": {}, "invariant": {"batch_invariant": True}},
    "steps": {"ahead": {}, "one by one": {"async_scheduling": False}},
    "chunks": {"whole": {}, "short": {"max_num_batched_tokens": 16}},
}
# Ways that refuse each other, each in one line that another test knows
REFUSED = ({"on the host", "not kept"},)

Row = tuple[str, ...]
PLACES = {way: place for place, ways in enumerate(FEATURES.values()) for way in ways}


def pairs_of(row: Row) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    return set(itertools.combinations(enumerate(row), 2))


def is_possible(row: Row) -> bool:
    return not any(pair <= set(row) for pair in REFUSED)


def covering() -> Iterator[Row]:
    """Few rows, a way of each feature, that have every possible pair among them: each row is the
    one with most of the pairs that are left."""
    possible = [row for row in itertools.product(*FEATURES.values()) if is_possible(row)]
    rows = {row: pairs_of(row) for row in possible}
    left = set().union(*rows.values())
    while left:
        best = max(rows, key=lambda row: len(rows[row] & left))
        left -= rows.pop(best)
        yield best


ROWS = list(covering())


def wishes_of(row: Row) -> Wishes:
    """The configuration of a row."""
    ways = zip(FEATURES.values(), row, strict=True)
    return {name: value for feature, way in ways for name, value in feature[way].items()}


def push(
    logits_SV: jax.Array, state: ProcessorState, *, token: float = 0, strength: float = 0.0
) -> jax.Array:
    """Adds to one token's logit."""
    place = jnp.arange(logits_SV.shape[1])
    return logits_SV + jnp.where(place == token[:, None], strength[:, None], 0)  # type: ignore[index]


def halved(output_ids: list[int], logits: Any) -> Any:
    """A function of the host."""
    return logits / 2


USUAL: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "max_tokens": 14, "ignore_eos": True}
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 3},
    {"seed": 1, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 2},
    {"seed": 2, "prompt_logprobs": 2, "logit_bias": {"3": 4.0}, "min_p": 0.02},
    {"seed": 3, "structured_outputs": {"regex": "[a-z]{9,12}"}, "ignore_eos": False},
    {"seed": 4, "n": 2, "top_k": 30, "bad_words": ["a"]},
    {"seed": 5, "logits_processors": ["push"], "extra_args": {"token": 9.0, "strength": 3.0}},
    {"seed": 6, "logits_processors": [halved], "logprobs": 1},
    {"temperature": 0, "n": 2, "best_of": 2, "use_beam_search": True, "top_p": 1.0},
)
PROMPTS = [[(7 * i + 3 * j) % 96 + 40 for j in range(9 + 5 * i)] for i in range(len(ASKED))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, repo: Path) -> str:
    return write_random(tmp_path_factory.mktemp("random"), repo)


@pytest.fixture(scope="module")
def said(model: str) -> Callable[[Wishes], list[Any]]:
    """What an engine says to all requests at once, twice, so that prefixes are cached."""

    def say(wishes: Wishes) -> list[Any]:
        usual: Wishes = {
            "load_format": "dummy",
            "dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "block_size": 8,
            "num_gpu_blocks_override": 160,
            "enforce_eager": True,
            "logits_processors": [push],
        }
        with few_shapes():
            llm = LLM(model, **(usual | wishes))
        llm.engine.scheduler.estimator = Optimist()
        params = [SamplingParams(**USUAL | options) for options in ASKED]
        found = [llm.generate(PROMPTS, params, use_tqdm=False) for _ in range(2)]
        llm.engine.scheduler.check()
        assert llm.engine.stats().free_pages == llm.engine.stats().num_pages
        return [choice for outputs in found for output in outputs for choice in told(output)]

    return say


def told(output: Any) -> list[tuple[list[int], str, list[float]]]:
    """Tokens, end and log-probabilities of each choice; the first has its prompt's, too."""
    choices = []
    for choice in output.outputs:
        scores = [entry.logprob for step in choice.logprobs or () for entry in step.values()]
        choices.append((list(choice.token_ids), choice.finish_reason, scores))
    inside = [e.logprob for step in output.prompt_logprobs or () if step for e in step.values()]
    choices[0][2].extend(inside)
    return choices


def test_the_rows_have_every_pair_that_is_not_refused() -> None:
    found = set().union(*(pairs_of(row) for row in ROWS))
    ways = [[(place, way) for way in feature] for place, feature in enumerate(FEATURES.values())]
    for one, other in itertools.combinations(ways, 2):
        for pair in itertools.product(one, other):
            assert pair in found or {way for _, way in pair} in REFUSED, pair
    assert len(ROWS) <= 24


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=", ".join)
def test_devices_say_what_one_says_whatever_is_asked_for_together(
    row: Row, said: Callable[[Wishes], list[Any]]
) -> None:
    wishes = wishes_of(row)
    alone = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    wanted, found = said(wishes | alone), said(wishes)
    for (tokens, end, scores), (own, other, values) in zip(wanted, found, strict=True):
        assert (own, other) == (tokens, end)
        assert values == pytest.approx(scores, abs=1e-4)
