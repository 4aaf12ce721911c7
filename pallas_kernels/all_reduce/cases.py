"""Cases of a sum over devices. Tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """`rows` random rows, and a part of each on every device."""

    name: str
    rows: int
    width: int
    devices: int
    eps: float = 1e-6


CASES = (
    Case(name="one row of two devices", rows=1, width=256, devices=2),
    Case(name="fewer rows than devices", rows=3, width=512, devices=4),
    Case(name="more rows than devices", rows=10, width=256, devices=4),
    Case(name="eight devices", rows=9, width=768, devices=8),
)


def inputs(case: Case, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x `[T, D]`, the parts `[X, T, D]`, and the weight `[D]`, float32. Some numbers of the parts
    are zeros of either sign."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((case.rows, case.width)).astype(np.float32)
    parts = rng.standard_normal((case.devices, case.rows, case.width)).astype(np.float32)
    parts[rng.random(parts.shape) < 0.25] = 0.0
    parts[rng.random(parts.shape) < 0.25] *= -1.0
    return x, parts, rng.standard_normal(case.width).astype(np.float32)


def expected(
    case: Case, x: np.ndarray, parts: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The sum and its norm in float64."""
    total = x.astype(np.float64) + parts.astype(np.float64).sum(axis=0)
    size = np.sqrt((total**2).mean(axis=-1, keepdims=True) + case.eps)
    return total, total / size * weight.astype(np.float64)
