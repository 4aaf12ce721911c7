"""Cases of grouped products. Tests and benchmarks share them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes of one routed feed-forward.

    Attributes:
      tokens: of the step.
      experts, choices: experts there are, and those that a token chooses.
      width, inner: columns of a token, and of an expert's hidden layer.
      skew: exponent of the Zipf law by which tokens choose; 0 = all experts alike.
    """

    name: str
    tokens: int
    experts: int
    choices: int
    width: int = 128
    inner: int = 64
    skew: float = 0.0


CASES = (
    Case(name="one token", tokens=1, experts=8, choices=2),
    Case(name="fewer rows than experts", tokens=3, experts=32, choices=4),
    Case(name="every expert of every token", tokens=5, experts=4, choices=4),
    Case(name="one expert", tokens=19, experts=1, choices=1),
    Case(name="tiles of eight", tokens=16, experts=16, choices=2, inner=192),
    Case(name="a favourite that fills several tiles", tokens=70, experts=16, choices=2, skew=3.0),
    Case(name="many tokens", tokens=300, experts=8, choices=2, width=192),
)


@dataclass(frozen=True)
class ModelShape:
    """The routed feed-forward of a published model."""

    experts: int
    choices: int
    width: int
    inner: int


MODEL_SHAPES = {
    "Qwen3-30B-A3B": ModelShape(128, 8, 2048, 768),
    "DeepSeek-V2-Lite": ModelShape(64, 6, 2048, 1408),
}


class Inputs(NamedTuple):
    """Arrays of a case, float32; products are of order 1.

    Attributes:
        x: `[T, D]`.
        gate_up: `[E, 2F, D]`.
        down: `[E, D, F]`.
        expert: chosen experts `[T, K]`, int32, all different in a row.
        weight: of the choices, `[T, K]`, rows of sum 1.
    """

    x: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray
    expert: np.ndarray
    weight: np.ndarray


def choices(
    tokens: int, experts: int, chosen: int, skew: float, rng: np.random.Generator
) -> np.ndarray:
    """Experts of each token, `[T, K]` int32, drawn without repetition with probability
    proportional to rank^-skew (Gumbel's top-k)."""
    score = -skew * np.log(1 + rng.permutation(experts)) + rng.gumbel(size=(tokens, experts))
    return np.argsort(-score, axis=1)[:, :chosen].astype(np.int32)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """Arrays of a case."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((case.tokens, case.width))
    gate_up = rng.standard_normal((case.experts, 2 * case.inner, case.width)) / case.width**0.5
    down = rng.standard_normal((case.experts, case.width, case.inner)) / case.inner**0.5
    weight = rng.dirichlet(np.ones(case.choices), case.tokens)
    expert = choices(case.tokens, case.experts, case.choices, case.skew, rng)
    low = functools.partial(np.asarray, dtype=np.float32)
    return Inputs(low(x), low(gate_up), low(down), expert, low(weight))


def expected(arrays: Inputs, bias: np.ndarray | float = 0.0) -> np.ndarray:
    """The routed feed-forward with silu gates in float64, `[T, D]`, token by token.

    `bias` `[E, 2F]` is that of gate and up.
    """
    bias = np.broadcast_to(np.asarray(bias, np.float64), arrays.gate_up.shape[:2])
    x, gate_up, down, weight = (
        np.asarray(a, np.float64) for a in (arrays.x, arrays.gate_up, arrays.down, arrays.weight)
    )
    out = np.zeros(x.shape)
    for token, experts in enumerate(arrays.expert):
        for choice, expert in enumerate(experts):
            gate, up = np.split(gate_up[expert] @ x[token] + bias[expert], 2)
            hidden = gate / (1 + np.exp(-gate)) * up
            out[token] += weight[token, choice] * (down[expert] @ hidden)
    return out
