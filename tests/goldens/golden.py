"""Reads the goldens that make.py wrote. Any test may compare a way of running a model with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Continuation:
    """One prompt and what transformers made of it, greedily, in float32."""

    prompt: list[int]
    prompt_logprobs: np.ndarray  # [len(prompt) - 1]: of each prompt token after the first
    tokens: list[int]
    logprobs: np.ndarray  # [len(tokens), V]: the distribution that each token was taken from


@dataclass(frozen=True)
class Golden:
    """One tiny checkpoint (`directory` is a model directory without tokenizer) and its
    continuations.
    """

    name: str
    directory: Path
    continuations: tuple[Continuation, ...]


def golden_names() -> list[str]:
    """Every case that has been made."""
    return sorted(path.parent.name for path in HERE.glob("*/golden.npz"))


def load_golden(name: str) -> Golden:
    """One case."""
    with np.load(HERE / name / "golden.npz", allow_pickle=False) as stored:
        continuations = tuple(
            Continuation(
                stored[f"prompt_{i}"].tolist(),
                stored[f"prompt_logprobs_{i}"],
                stored[f"greedy_{i}"].tolist(),
                stored[f"greedy_logprobs_{i}"],
            )
            for i in range(sum(key.startswith("greedy_logprobs_") for key in stored))
        )
    return Golden(name, HERE / name, continuations)
