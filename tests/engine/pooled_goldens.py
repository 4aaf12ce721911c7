"""Engines around the checkpoints of pooling models' goldens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine.load import load_engine
from jaxllm.engine.pooling_engine import PoolingEngine
from jaxllm.messages import PoolingRequest
from jaxllm.pooled import PoolingParams, result
from jaxllm.prompt import Prompt
from tests.engine.few_shapes import few_shapes
from tests.goldens.pooled_cases import CASES, PROMPT_LENGTHS

GOLDENS = Path(__file__).parents[1] / "goldens" / "pooled"
BOUND = 1e-4
RAW = PoolingParams(use_activation=False)


def make(model: str | Path, **overrides: Any) -> PoolingEngine:
    """An engine with few shapes around a golden's checkpoint."""
    wishes: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 160,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "block_size": 8,
        "num_gpu_blocks_override": 96,
        "enforce_eager": True,
    }
    with few_shapes():
        engine = load_engine(EngineConfig(model=str(GOLDENS / model), **wishes | overrides))
    assert isinstance(engine, PoolingEngine)
    return engine


def pool(
    engine: PoolingEngine,
    prompts: Sequence[list[int]],
    params: PoolingParams | None = None,
    seconds: Sequence[int] = (),
) -> list[np.ndarray]:
    """Every prompt at once through the engine; `seconds` is where their second texts begin."""
    assert engine.resolved.pooling is not None
    for index, prompt in enumerate(prompts):
        second = seconds[index] if seconds else 0
        engine.add(PoolingRequest(id=str(index), prompt=Prompt(prompt), second_text=second))
    found = {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.pooled is not None, delta.error
            found[delta.id] = result(
                engine.resolved.pooling, delta.pooled, params or PoolingParams()
            )
    engine.scheduler.check()
    return [found[str(index)] for index in range(len(prompts))]


def golden(case: str) -> tuple[list[list[int]], list[np.ndarray]]:
    """Prompts and vectors."""
    data = np.load(GOLDENS / case / "golden.npz")
    count = range(len(PROMPT_LENGTHS))
    return [data[f"prompt_{i}"].tolist() for i in count], [data[f"vector_{i}"] for i in count]


def params_of(case: str) -> PoolingParams | None:
    """Options that give a golden's vectors: only those of some are normalised."""
    return None if "Normalize" in json.dumps(CASES[case]) else RAW


def second_texts(case: str) -> list[int]:
    """Where the second texts of a golden's prompts begin; empty where it has none."""
    data = np.load(GOLDENS / case / "golden.npz")
    return [int(data[name]) for name in sorted(data) if name.startswith("second_")]


def assert_close(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=BOUND, rtol=0)
