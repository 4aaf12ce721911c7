"""The engine's beam search finds the sequences and scores of transformers', searches together and
alone, beside other requests."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.load import load_engine
from jaxllm.messages import GenerateRequest, TextDelta
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.few_shapes import few_shapes

HERE = Path(__file__).parent
FOUND: dict[str, list[dict[str, Any]]] = {
    name: list(entries)
    for name, entries in groupby(
        json.loads((HERE / "beams.json").read_text()), key=lambda entry: entry["checkpoint"]
    )
}
BOUND = 2e-4
ONE = "mistral-window"


def engine(name: str, **overrides: Any) -> Engine:
    wishes: dict[str, Any] = {
        "model": str(HERE / name),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 96,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "block_size": 8,
        "num_gpu_blocks_override": 256,
        "enforce_eager": True,
    }
    with few_shapes():
        return load_engine(EngineConfig(**(wishes | overrides)))


def params(setting: dict[str, Any], **more: Any) -> SamplingParams:
    """One setting of transformers in this engine's words."""
    return SamplingParams(
        use_beam_search=True,
        n=setting["num_beams"],
        max_tokens=setting["max_new_tokens"],
        min_tokens=setting.get("min_new_tokens", 0),
        stop_token_ids=setting["eos_token_id"],
        ignore_eos=True,
        length_penalty=setting["length_penalty"],
        early_stopping=setting["early_stopping"],
        **more,
    )


def collect(core: Engine, preempt_every: int = 10**9) -> dict[str, list[TextDelta]]:
    deltas: dict[str, list[TextDelta]] = {}
    while core.has_work:
        if core.stats().steps % preempt_every == preempt_every - 1:
            core.scheduler.preempt_all()
        for delta in core.step():
            deltas.setdefault(delta.id, []).append(delta)
    return deltas


def check(entry: dict[str, Any], found: list[TextDelta]) -> None:
    """Sequences are equal, scores within the bound."""
    setting = entry["setting"]
    assert [delta.index for delta in found] == list(range(setting["num_beams"]))
    assert [delta.token_ids for delta in found] == entry["sequences"]
    sums = np.array([delta.cumulative_logprob for delta in found], float)
    lengths = np.array([len(delta.token_ids) for delta in found], float)
    scores = sums / lengths ** setting["length_penalty"]
    np.testing.assert_allclose(
        scores,
        entry["scores"],
        rtol=1e-5,
        atol=BOUND * lengths.max() ** max(0, -setting["length_penalty"]),
    )
    for delta in found:
        ended = delta.token_ids[-1] in setting["eos_token_id"]
        assert delta.finish_reason == ("stop" if ended else "length")
        assert delta.stop_reason == (delta.token_ids[-1] if ended else None)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_searches_find_what_transformers_finds(name: str) -> None:
    core = engine(name)
    for number, entry in enumerate(FOUND[name]):
        core.add(
            GenerateRequest(
                id=str(number), prompt=Prompt(entry["prompt"]), params=params(entry["setting"])
            )
        )
        core.add(
            GenerateRequest(
                id=f"other {number}",
                prompt=Prompt(entry["prompt"][:5]),
                params=SamplingParams(max_tokens=20),
            )
        )
    together = collect(core)
    for number, entry in enumerate(FOUND[name]):
        check(entry, together[str(number)])
    core.scheduler.check()
    assert core.stats().free_pages == core.stats().num_pages


@pytest.mark.parametrize(
    "overrides",
    [
        {"enable_prefix_caching": False},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_searches_that_are_preempted_again_and_again_in_a_small_pool_find_the_same(
    overrides: dict[str, Any],
) -> None:
    core = engine(ONE, max_num_seqs=8, num_gpu_blocks_override=64, **overrides)
    for number, entry in enumerate(FOUND[ONE]):
        core.add(
            GenerateRequest(
                id=str(number), prompt=Prompt(entry["prompt"]), params=params(entry["setting"])
            )
        )
    found = collect(core, preempt_every=9)
    assert core.stats().preemptions > 50
    for number, entry in enumerate(FOUND[ONE]):
        check(entry, found[str(number)])
    core.scheduler.check()
