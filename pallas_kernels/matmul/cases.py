"""Cases that every back end of the few-token product must pass; tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes of one call: `tokens` rows of x, a weight of `outputs` rows, `inputs` columns of both."""

    name: str
    tokens: int
    outputs: int
    inputs: int
    out_dtype: str | None = None


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call as numpy arrays (float32), and the expected output."""

    x: np.ndarray
    w: np.ndarray
    expected: np.ndarray


CASES = (
    Case(name="one token", tokens=1, outputs=64, inputs=256),
    Case(name="a row more than a class", tokens=9, outputs=72, inputs=320),
    Case(name="one class exactly", tokens=16, outputs=96, inputs=384),
    Case(name="half a tile", tokens=33, outputs=128, inputs=192),
    Case(name="two tiles", tokens=70, outputs=96, inputs=192),
    Case(name="four tiles", tokens=200, outputs=160, inputs=192),
    Case(name="float32 logits", tokens=5, outputs=136, inputs=128, out_dtype="float32"),
    Case(name="the smallest", tokens=1, outputs=8, inputs=64),
)

# (O, I) of the products of one decode step; the last one of a model is its head.
MODEL_SHAPES = {
    "Qwen2.5-7B": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (152064, 3584)),
    "Llama-3.1-8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    "Qwen3-0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)),
}


def inputs(case: Case, seed: int = 0) -> Inputs:
    """The arguments of a case, with the output computed in float64."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((case.tokens, case.inputs)).astype(np.float32)
    w = rng.standard_normal((case.outputs, case.inputs)).astype(np.float32)
    return Inputs(x, w, x.astype(np.float64) @ w.astype(np.float64).T)
