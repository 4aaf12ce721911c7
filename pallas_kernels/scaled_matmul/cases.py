"""Cases of the scaled product. Tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes of one call.

    Attributes:
      tokens: rows of x.
      outputs: rows of the weight.
      columns: of x and of the weight.
      group: columns that share a scale; None: all of a row.
      inputs: how x is rounded.
      integers: the weight is int8, not float8_e4m3fn.
    """

    name: str
    tokens: int
    outputs: int
    columns: int
    group: int | None = None
    inputs: str = "token"
    integers: bool = False


CASES = (
    Case(name="one token", tokens=1, outputs=64, columns=256),
    Case(name="odd sizes", tokens=9, outputs=37, columns=100),
    Case(name="weights alone", tokens=5, outputs=48, columns=96, inputs="plain"),
    Case(name="a given scale", tokens=5, outputs=48, columns=96, inputs="given"),
    Case(name="blocks", tokens=7, outputs=160, columns=256, group=128, inputs="group"),
    Case(name="blocks cut off", tokens=7, outputs=33, columns=200, group=128, inputs="group"),
    Case(
        name="blocks of weights alone", tokens=3, outputs=33, columns=80, group=32, inputs="plain"
    ),
    Case(name="blocks, tokens", tokens=3, outputs=33, columns=80, group=32),
    Case(name="integers", tokens=9, outputs=37, columns=100, integers=True),
    Case(
        name="integers with zero points",
        tokens=9,
        outputs=37,
        columns=100,
        inputs="shifted",
        integers=True,
    ),
    Case(
        name="groups of integers with zero points",
        tokens=3,
        outputs=33,
        columns=80,
        group=32,
        inputs="shifted",
        integers=True,
    ),
    Case(
        name="integers, weights alone",
        tokens=9,
        outputs=37,
        columns=100,
        inputs="plain",
        integers=True,
    ),
    Case(
        name="groups of integers",
        tokens=9,
        outputs=24,
        columns=96,
        group=32,
        inputs="plain",
        integers=True,
    ),
)

# What the Hopper kernel takes
KERNEL_CASES = (
    Case(name="one token", tokens=1, outputs=64, columns=256),
    Case(name="rows that no block divides", tokens=20, outputs=200, columns=640),
    Case(name="a given scale", tokens=9, outputs=136, columns=384, inputs="given"),
    Case(name="blocks", tokens=70, outputs=328, columns=512, group=128, inputs="group"),
    Case(name="blocks, tokens", tokens=300, outputs=64, columns=256, group=128),
    Case(name="two bands", tokens=600, outputs=320, columns=384),
    Case(name="integers", tokens=100, outputs=72, columns=384, integers=True),
    Case(name="many integers", tokens=300, outputs=192, columns=256, integers=True),
)


class Inputs(NamedTuple):
    """x and the scaled weight of a case."""

    x: np.ndarray
    weight: np.ndarray
    scale: np.ndarray
    input_scale: np.float32


def inputs(case: Case, seed: int = 0) -> Inputs:
    """Arrays of a case; products are of order 1. A row of x and one of the weight are zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((case.tokens, case.columns)).astype(np.float32)
    x[-1] *= case.tokens == 1
    shape = (case.outputs, case.columns)
    weight: np.ndarray
    if case.integers:
        weight = rng.integers(-127, 128, shape).astype(np.int8)
    else:
        weight = np.clip(rng.standard_normal(shape) * 100, -448, 448)
        weight = weight.astype(ml_dtypes.float8_e4m3fn)
    weight[-1] = 0
    groups = -(-case.columns // (case.group or case.columns))
    scale = rng.uniform(0.5, 2, (case.outputs, groups)) / (100 * case.columns**0.5)
    return Inputs(x, weight, scale.astype(np.float32), np.float32(0.01))


def expected(case: Case, arrays: Inputs) -> np.ndarray:
    """The scaled product in float64, of inputs rounded as the definition says."""
    group = case.group or case.columns
    weight = arrays.weight.astype(np.float64) * _columns(arrays.scale, group, case.columns)
    return _rounded(case, arrays, group) @ weight.T


def _rounded(case: Case, arrays: Inputs, group: int) -> np.ndarray:
    """x after rounding, times its scales."""
    if case.inputs == "plain":
        return arrays.x.astype(np.float64)
    if case.inputs == "shifted":
        return _shifted(arrays.x)
    if case.inputs == "group":
        size = group
    else:
        size = case.columns
    starts = np.arange(0, case.columns, size)
    limit = 448
    if case.integers:
        limit = 127
    scale = np.maximum.reduceat(np.abs(arrays.x), starts, axis=1) * np.float32(1 / limit)
    scale = np.where(scale == 0, np.float32(1), scale)
    if case.inputs == "given":
        scale = np.full((case.tokens, 1), arrays.input_scale)
    wide = _columns(scale, size, case.columns)
    inside = np.clip(arrays.x * (1 / wide), -128 if case.integers else -limit, limit)
    if case.integers:
        numbers = np.rint(inside)
    else:
        numbers = inside.astype(ml_dtypes.float8_e4m3fn)
    return numbers.astype(np.float64) * wide


def _shifted(x: np.ndarray) -> np.ndarray:
    """x as integers from each row's smallest number on, 0 among them."""
    low = np.minimum(x.min(1, keepdims=True), 0)
    high = np.maximum(x.max(1, keepdims=True), 0)
    scale = np.where(low == high, np.float32(1), (high - low) * np.float32(1 / 255))
    zero = np.rint(-128 - low * (1 / scale))
    return (np.clip(np.rint(x * (1 / scale) + zero), -128, 127) - zero) * scale.astype(np.float64)


def _columns(scale: np.ndarray, group: int, columns: int) -> np.ndarray:
    return np.repeat(scale, group, axis=1)[:, :columns]
