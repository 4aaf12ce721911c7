"""Starts with default options on GPUs that are not here: the pools fit beside the largest step,
which XLA compiles for the card, or the error says rightly that the weights do not fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxllm.units import GIB
from tests.engine.runtime.cards import CARDS, MEMORIES
from tests.engine.runtime.h200 import Compiler, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

MODULE = "tests.engine.startup.card_starts"
ALL = CARDS | MEMORIES
SHARE = 0.9  # of a card's memory
# GiB of the weights in 16 bits, with what else a start holds
LEAST = {"llama-3.2-1b": 4, "qwen2.5-7b": 18, "qwen3-30b-a3b": 63}
FAST = [("rtx-3090", "qwen3-30b-a3b")]


@pytest.fixture
def begin() -> Iterator[Callable[[str], Compiler]]:
    """Processes for a kind of card, which end with the test."""
    begun: list[Compiler] = []

    def compiler(card: str) -> Compiler:
        begun.append(Compiler(card, MODULE))
        return begun[-1]

    yield compiler
    for process in begun:
        process.close()


def fits(card: str, model: str) -> bool:
    """Whether the weights leave room on the card."""
    return ALL[card].memory * SHARE >= LEAST[model]


def check(answer: dict[str, Any]) -> None:
    """The largest step that was compiled for the pools has room beside them, and a longest request
    has room in them."""
    assert answer["error"] is None
    assert answer["steps"][-1] <= answer["left"]
    assert answer["pages"] >= answer["pages_per_request"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("card", "model"),
    [
        pytest.param(card, model, marks=[] if (card, model) in FAST else pytest.mark.slow)
        for card in ALL
        for model in LEAST
    ],
)
def test_a_default_start_fits_or_says_that_the_weights_do_not(
    card: str, model: str, begin: Callable[[str], Compiler]
) -> None:
    answer = begin(card).answer(model=model)
    if fits(card, model):
        check(answer)
        return
    assert "no length fits" in answer["error"]
    (weights,) = re.findall(r"is lacking for the rest .* − ([\d.]+) weights", answer["error"])
    assert float(weights) > ALL[card].memory * SHARE


@pytest.mark.timeout(600)
def test_a_start_of_two_layers_fits_a_small_card(
    begin: Callable[[str], Compiler],
) -> None:
    wishes = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "max_model_len": 4096}
    answer = begin("rtx-4090").answer(model="qwen2.5-7b", layers=2, **wishes)
    check(answer)
    assert answer["backend"] == "xla" and answer["weights"] > 2 * GIB


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_smaller_step_that_an_error_names_fits(begin: Callable[[str], Compiler]) -> None:
    compiler = begin("rtx-3090")
    error = compiler.answer(model="qwen2.5-7b", max_num_batched_tokens=65536)["error"]
    helps = re.search(r"What helps: .*--max-num-batched-tokens (\d+)", error)
    assert helps is not None, error
    tokens = int(helps[1])
    assert 256 <= tokens < 65536
    check(compiler.answer(model="qwen2.5-7b", max_num_batched_tokens=tokens))
