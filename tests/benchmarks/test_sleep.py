"""A server that sleeps and takes other weights, as the benchmark times it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import sleep
from jaxllm import LLM, SamplingParams


def test_bytes_that_are_made_once_fill_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep.Repeated, "SIZE", 8)
    random = sleep.Repeated(np.random.PCG64(1))
    found = random.bytes(20)
    assert len(found) == 20 and found[:8] == found[8:16] and found[16:] == found[:4]
    assert len(random.bytes(3)) == 3


def test_a_shape_gets_a_checkpoint_that_fits_it(tmp_path: Path) -> None:
    weights = sleep.other_weights("shape:tiny", tmp_path)
    llm = LLM(str(weights), skip_tokenizer_init=True, max_model_len=64, enforce_eager=True)
    (output,) = llm.generate([{"prompt_token_ids": [3, 4]}], SamplingParams(max_tokens=2))
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.slow
def test_a_server_sleeps_wakes_and_takes_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    options = ["--options", "--max-num-seqs 4 --max-model-len 256"]
    monkeypatch.setattr(
        sys, "argv", ["sleep", "--repeat", "1", *options, "--output-json", str(out)]
    )
    sleep.main()
    figures = json.loads(out.read_text())["figures"]
    assert [nap["level"] for nap in figures["naps"]] == [1, 2]
    assert all(nap["same_tokens"] for nap in figures["naps"])
    assert figures["updates"][0]["update_s"] > 0
