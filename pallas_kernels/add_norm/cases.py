"""Cases of the residual sum and norm. Tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """`rows` random rows; values of row t are 2**`growth` times those of row t - 1."""

    name: str
    rows: int
    width: int
    eps: float = 1e-6
    growth: float = 0
    zero: bool = False  # all values are 0


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call, NumPy float32."""

    x: np.ndarray
    delta: np.ndarray
    weight: np.ndarray


CASES = (
    Case(name="one row", rows=1, width=1024),
    Case(name="one row, width of 28 times 128", rows=1, width=3584),
    Case(name="several rows", rows=5, width=256),
    Case(name="smallest width", rows=2, width=128),
    Case(name="odd multiple of 128", rows=2, width=896),
    Case(name="large eps", rows=2, width=384, eps=0.5),
    Case(name="rows of very different size", rows=4, width=512, growth=4),
    Case(name="zeros", rows=2, width=256, zero=True),
    Case(name="largest width", rows=1, width=16384),
)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """The arguments of a case."""
    rng = np.random.default_rng(seed)
    x, delta = rng.standard_normal((2, case.rows, case.width)).astype(np.float32)
    scale = (
        np.float32(0 if case.zero else 1)
        * np.float32(2) ** (case.growth * np.arange(case.rows, dtype=np.float32))[:, None]
    )
    return Inputs(x * scale, delta * scale, rng.standard_normal(case.width).astype(np.float32))


def expected(
    case: Case, x: np.ndarray, delta: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sum and norm in float64. The sum is rounded to x's type before the norm."""
    rounded = (x.astype(np.float64) + delta.astype(np.float64)).astype(x.dtype)
    total = rounded.astype(np.float64)
    norm = (
        total
        / np.sqrt((total**2).mean(axis=-1, keepdims=True) + case.eps)
        * weight.astype(np.float64)
    )
    return total, norm
