"""Cases of the gated product. Tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pallas_kernels.gated_matmul.gating import GELU, SILU, Gated


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes of one call.

    Attributes:
      tokens: rows of x.
      outputs: rows of the weight, gate and up together.
      inputs: columns of x and of the weight.
    """

    name: str
    tokens: int
    outputs: int
    inputs: int


CASES = (
    Case(name="one token", tokens=1, outputs=64, inputs=256),
    Case(name="a row more than a tile of eight", tokens=9, outputs=144, inputs=320),
    Case(name="one class exactly", tokens=64, outputs=96, inputs=192),
    Case(name="two classes", tokens=100, outputs=96, inputs=192),
    Case(name="three warpgroups", tokens=150, outputs=96, inputs=192),
    Case(name="a wide class", tokens=200, outputs=160, inputs=192),
    Case(name="several bands, the last cut", tokens=600, outputs=176, inputs=128),
    Case(name="the smallest", tokens=1, outputs=16, inputs=64),
)

# (O, I) of a model's gate and up.
MODEL_SHAPES = {
    "Qwen2.5-7B": (37888, 3584),
    "Llama-3.1-8B": (28672, 4096),
    "Gemma-2-9B": (28672, 3584),
    "Qwen3-0.6B": (6144, 1024),
}


def inputs(case: Case, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """x and the weight of a case, float32; products are of order 1."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((case.tokens, case.inputs)).astype(np.float32)
    w = rng.standard_normal((case.outputs, case.inputs)) / case.inputs**0.5
    return x, w.astype(np.float32)


def silu(x: np.ndarray) -> np.ndarray:
    """In the type of x."""
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    """Its approximation by tanh, in the type of x."""
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


# Each gating's activation as the oracle has it
ACTIVATIONS = {SILU: silu, GELU: gelu}


def expected(x: np.ndarray, w: np.ndarray, gating: Gated) -> np.ndarray:
    """The gated product in float64."""
    gate, up = np.split(x.astype(np.float64) @ w.astype(np.float64).T, 2, axis=1)
    return ACTIVATIONS[gating](gate) * up
