"""Calls of an `LLM` by several threads, within each other, with numpy's numbers, and after a
failure."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.messages import RequestError
from tests.engine.few_shapes import few_shapes


@pytest.fixture(scope="module")
def llm() -> LLM:
    with few_shapes():
        return LLM(
            "demo", max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64, enforce_eager=True
        )


def test_threads_take_turns_and_a_call_within_a_call_is_refused(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    wanted, found = llm.generate([7, 8, 9], params, use_tqdm=False)[0].outputs[0].token_ids, []
    threads = [
        threading.Thread(
            target=lambda: found.append(
                llm.generate([7, 8, 9], params, use_tqdm=False)[0].outputs[0].token_ids
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [wanted] * 4

    def calling(output: list[int], logits: np.ndarray) -> np.ndarray:
        llm.generate("a", params, use_tqdm=False)
        return logits

    choice = llm.generate([7, 8, 9], replace(params, logits_processors=[calling]), use_tqdm=False)[
        0
    ].outputs[0]
    assert choice.finish_reason == "error" and "RequestError" in (choice.error or "")
    assert llm.generate([7, 8, 9], params, use_tqdm=False)[0].outputs[0].token_ids == wanted


def test_ids_may_be_numpys(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    ways: Any = (
        [7, 8, 9],
        np.array([7, 8, 9]),
        [np.int64(7), np.int64(8), np.int64(9)],
        [[np.int32(7), np.int32(8), np.int32(9)]],
    )
    assert (
        len(
            {
                tuple(llm.generate(way, params, use_tqdm=False)[0].outputs[0].token_ids)
                for way in ways
            }
        )
        == 1
    )
    wrong: Any
    for wrong in (np.array(5), [np.float32(1.5)]):
        with pytest.raises(RequestError):
            llm.generate(wrong, params, use_tqdm=False)


@pytest.mark.parametrize("top_p", [1e-38, 1e-320, 1e-8])
def test_the_smallest_top_p_leaves_the_likeliest_token(llm: LLM, top_p: float) -> None:
    best = (
        llm.generate("12 + 34 =", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
        .outputs[0]
        .token_ids
    )
    drawn = (
        llm.generate(
            "12 + 34 =", SamplingParams(temperature=1, top_p=top_p, max_tokens=4), use_tqdm=False
        )[0]
        .outputs[0]
        .token_ids
    )
    assert drawn == best


def test_an_engine_that_starts_over_compiles_nothing(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate("a", params, use_tqdm=False)
    before = llm.engine.stats().compiles_after_warmup
    llm.engine.loop.start_over()
    llm.generate("a", params, use_tqdm=False)
    assert llm.engine.stats().compiles_after_warmup == before
