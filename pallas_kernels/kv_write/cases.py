"""Cases that every back end of the KV write must pass; tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """`kept` tokens go to distinct random places, `dropped` ones to pages P and beyond, mixed at random."""

    name: str
    kept: int
    dropped: int = 0
    num_pages: int = 7
    kv_heads: int = 2
    page_size: int = 16
    head_dim: int = 32


@dataclass(frozen=True)
class Inputs:
    """The positional arguments of one call as numpy arrays (float32), and the pages expected."""

    args: tuple[np.ndarray, ...]
    expected: tuple[np.ndarray, np.ndarray]


CASES = (
    Case(name="one token", kept=1),
    Case(name="many tokens", kept=60),
    Case(name="every place", kept=7 * 16),
    Case(name="some dropped", kept=20, dropped=13),
    Case(name="all dropped", kept=0, dropped=9),
    Case(name="one head", kept=9, kv_heads=1),
    Case(name="pages of 64", kept=40, dropped=3, page_size=64, head_dim=128),
)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """The arguments of a case and the pages after the write."""
    rng = np.random.default_rng(seed)
    P, C = case.num_pages, case.page_size
    places = rng.permutation(P * C)[: case.kept]
    order = rng.permutation(case.kept + case.dropped)
    page = np.concatenate([places // C, rng.integers(P, P + 3, case.dropped)]).astype(np.int32)[order]
    offset = np.concatenate([places % C, rng.integers(0, C, case.dropped)]).astype(np.int32)[order]
    pages = [rng.standard_normal((P, case.kv_heads, C, case.head_dim)).astype(np.float32) for _ in range(2)]
    new = [rng.standard_normal((len(page), case.kv_heads, case.head_dim)).astype(np.float32) for _ in range(2)]
    expected = [x.copy() for x in pages]
    for t in range(len(page)):
        if page[t] < P:
            for x, y in zip(expected, new, strict=True):
                x[page[t], :, offset[t]] = y[t]
    return Inputs((*pages, *new, page, offset), (expected[0], expected[1]))
