"""Cases of attention within segments. Tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SCALE = 0.125


@dataclass(frozen=True, kw_only=True)
class Case:
    """Segments side by side.

    Attributes:
      lengths: tokens of each; rest: tokens of no segment after them.
      heads, kv_heads, head_dim: of queries, of keys and values, and the width of each.
      window: tokens that a token sees on either side; None = all of its segment.
    """

    name: str
    lengths: tuple[int, ...]
    rest: int = 0
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    window: int | None = None

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + self.rest


CASES = (
    Case(name="one token", lengths=(1,)),
    Case(name="no segment at all", lengths=(), rest=130),
    Case(name="whole tiles", lengths=(128, 256), head_dim=128),
    Case(name="heads of 96", lengths=(70, 3), rest=9, head_dim=96),
    Case(name="ragged", lengths=(1, 130, 7, 60, 128), rest=74),
    Case(name="full tiles between others", lengths=(70, 400), heads=4, kv_heads=2),
    Case(name="itself alone", lengths=(5, 140), window=0),
    Case(name="a window", lengths=(300, 3, 100), rest=9, window=5),
    Case(name="a window with full tiles", lengths=(600,), heads=1, kv_heads=1, window=200),
)


class Inputs(NamedTuple):
    """Arrays of a case, float32 and int32, in the order of the op's arguments."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    first: np.ndarray
    end: np.ndarray


def inputs(case: Case, seed: int = 0) -> Inputs:
    """Arrays of a case."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(case.lengths, dtype=np.int32)
    spread = [np.repeat(x, case.lengths) for x in (ends - np.array(case.lengths, np.int32), ends)]
    first, end = (np.pad(x, (0, case.rest)).astype(np.int32) for x in spread)
    heads = case.heads, case.kv_heads, case.kv_heads
    shapes = ((case.tokens, count, case.head_dim) for count in heads)
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return Inputs(q, k, v, first, end)


def expected(arrays: Inputs, window: int | None) -> np.ndarray:
    """The definition with all scores in memory, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in arrays[:3])
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    place = np.arange(len(q))
    seen = (place >= arrays.first[:, None]) & (place < arrays.end[:, None])
    if window is not None:
        seen &= np.abs(place[:, None] - place) <= window
    weight = np.exp(SCALE * np.einsum("tnh,snh->nts", q, k)) * seen
    total = weight.sum(-1, keepdims=True)
    return np.einsum("nts,snh->tnh", weight / np.where(total > 0, total, 1), v)
