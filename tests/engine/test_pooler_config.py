"""What `--pooler-config` changes: results of every token, and another pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.load import load_engine
from jaxllm.messages import RequestError
from jaxllm.pooled import PoolingParams, normalised
from tests.engine.few_shapes import few_shapes
from tests.engine.pooled_goldens import (
    GOLDENS,
    RAW,
    assert_close,
    golden,
    make,
    pool,
    second_texts,
)


@pytest.mark.parametrize(
    ("case", "task", "whole"),
    [
        ("bert-mean", "token_embed", lambda tokens: normalised(tokens.mean(axis=0))),
        ("qwen3-embedding", "token_embed", lambda tokens: tokens[-1]),
        ("qwen2-classifier", "token_classify", lambda tokens: tokens[-1]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_every_token_has_a_result_of_which_the_pool_is_made(
    case: str, task: str, whole: Callable[[np.ndarray], np.ndarray]
) -> None:
    (prompts, vectors), seconds = golden(case), second_texts(case)
    engine = make(case, pooler_config={"task": task})
    params = PoolingParams() if case == "qwen3-embedding" else RAW
    found = pool(engine, prompts * 2, params, seconds * 2)
    assert [len(tokens) for tokens in found] == [*map(len, prompts)] * 2
    assert_close([whole(tokens) for tokens in found], vectors * 2)


@pytest.mark.slow
def test_results_of_tokens_are_cut_scaled_and_made_probabilities_one_by_one() -> None:
    prompts, _ = golden("qwen3-embedding")
    (tokens,) = pool(
        make("qwen3-embedding", pooler_config={"pooling_type": "ALL"}),
        prompts[1:2],
        PoolingParams(dimensions=8),
    )
    np.testing.assert_allclose(np.linalg.norm(tokens, axis=1), np.ones(7), rtol=1e-6)
    assert tokens.shape == (7, 8)
    labels = make("qwen2-classifier", pooler_config={"task": "token_classify"})
    (classes,) = pool(labels, golden("qwen2-classifier")[0][1:2])
    np.testing.assert_allclose(classes.sum(axis=1), np.ones(7), rtol=1e-6)


@pytest.mark.parametrize(
    ("case", "wish", "message"),
    [
        ("bert-mean", {"task": "classify"}, "task must be embed or token_embed here"),
        ("llama-mean-dense", {"task": "token_embed"}, "first map takes 64 numbers"),
        ("bert-mean", {"pooling_type": "STEP"}, "one of CLS, LAST, MEAN, ALL"),
        ("bert-mean", {"task": "token_embed", "pooling_type": "CLS"}, "does not go with"),
        ("bert-mean", {"dimensions": 8}, "'dimensions' is not supported"),
        ("demo", {"task": "embed"}, "this one generates"),
    ],
    ids=["other", "width", "type", "both", "key", "generates"],
)
def test_a_pooler_config_that_does_not_fit_is_one_error(
    case: str, wish: dict[str, Any], message: str
) -> None:
    model = case if case == "demo" else str(GOLDENS / case)
    with pytest.raises(ConfigError, match=message):
        load_engine(EngineConfig(model=model, pooler_config=wish, skip_tokenizer_init=True))


def test_a_pooling_type_replaces_the_checkpoints() -> None:
    prompts, _ = golden("bert-mean")
    engine, seconds = (
        make("bert-mean", pooler_config={"pooling_type": "CLS"}),
        second_texts("bert-mean"),
    )
    tokens = make("bert-mean", pooler_config={"pooling_type": "ALL"})
    firsts = [rows[0] for rows in pool(tokens, prompts, RAW, seconds)]
    assert_close(pool(engine, prompts, RAW, seconds), firsts)


def test_the_library_gives_arrays_of_tokens_and_refuses_other_tasks() -> None:
    prompts, vectors = golden("qwen3-embedding")
    wishes = {"max_model_len": 160, "max_num_seqs": 4, "num_gpu_blocks_override": 96}
    with few_shapes():
        llm = LLM(
            str(GOLDENS / "qwen3-embedding"),
            skip_tokenizer_init=True,
            enforce_eager=True,
            pooler_config={"task": "token_embed"},
            **wishes,
        )
    found = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
    assert [each.outputs.data.shape for each in found] == [(len(ids), 32) for ids in prompts]
    assert_close([each.outputs.data[-1] for each in found], vectors)
    for refused in (
        lambda: llm.embed(prompts, use_tqdm=False),
        lambda: llm.encode(prompts, pooling_task="embed", use_tqdm=False),
    ):
        with pytest.raises(RequestError, match=r"embeddings of every token.*--pooler-config"):
            refused()
