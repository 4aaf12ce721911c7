"""What the demo model loses when its weights or pages are rounded: of 8 bits less than one percent
of the perplexity of conversations, and no greedy token; of 4 bits less than five percent, and few.
What is coarser loses more, so that each bound can be broken."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import pytest

from benchmarks.perplexity import FORMATS, Found, Text, held_out, measured
from benchmarks.weight_accuracy import with_pages
from jaxllm.quantisation import ONLINE
from pallas_kernels.int4_matmul import rounding as of_4_bits
from pallas_kernels.scaled_matmul import rounding

GOLDENS = json.loads((Path(__file__).parents[1] / "demo/goldens.json").read_text())
RECORDED: list[Text] = [(own["prompt_ids"], own["answer_ids"]) for own in GOLDENS.values()]
TEXTS = {"recorded": lambda: RECORDED, "held out": lambda: held_out(2)}  # as in docs/modes.md


@functools.cache
def found(texts: str, name: str | None) -> Found:
    return measured(None if name is None else FORMATS[name], TEXTS[texts]())


@pytest.mark.slow
@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_few_bits_cost_little_of_the_perplexity(name: str, texts: str) -> None:
    plain, own = found(texts, None), found(texts, name)
    few = FORMATS[name].numbers not in ("fp8", "int8")
    assert abs(own.perplexity / plain.perplexity - 1) < (0.05 if few else 0.01)
    assert own.answers / plain.answers - 1 < 0.001
    tokens = sum(len(answer) for _, answer in TEXTS[texts]())
    assert plain.wrong == 0 and own.wrong <= few * tokens / 100


@pytest.mark.slow
def test_3_bits_would_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = found("recorded", None)
    monkeypatch.setattr(rounding, "largest", lambda dtype: 3.0)
    jax.clear_caches()
    coarse = measured(ONLINE["int8_w8a16"], RECORDED)
    jax.clear_caches()
    assert abs(coarse.perplexity / plain.perplexity - 1) > 0.01 and coarse.wrong > 0


@pytest.mark.slow
def test_3_bits_in_place_of_4_would_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = found("recorded", None)
    monkeypatch.setattr(of_4_bits, "LARGEST", 7)
    jax.clear_caches()
    coarse = measured(ONLINE["int4"], RECORDED)
    jax.clear_caches()
    assert abs(coarse.perplexity / plain.perplexity - 1) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(("pages", "weights"), [("fp8_e4m3", None), ("fp8_e4m3", "fp8")])
def test_8_bit_pages_cost_little_of_the_perplexity(pages: str, weights: str | None) -> None:
    plain = found("held out", None)
    own = with_pages(pages, weights, TEXTS["held out"]())
    assert 1e-5 < abs(own.perplexity / plain.perplexity - 1) < 0.01
    assert own.answers / plain.answers - 1 < 0.001


@pytest.mark.slow
def test_pages_with_fewer_digits_cost_more_as_a_start_with_them_says() -> None:
    coarse = with_pages("fp8_e5m2", None, TEXTS["held out"]())
    assert abs(coarse.perplexity / found("held out", None).perplexity - 1) > 0.01
