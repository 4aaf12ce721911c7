"""Cases of the rotation and write that every back end must pass, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """`kept` tokens go to distinct random places, `dropped` ones to pages P and beyond, mixed at
    random."""

    name: str
    kept: int
    dropped: int = 0
    num_pages: int = 7
    heads: int = 4
    kv_heads: int = 2
    page_size: int = 16
    head_dim: int = 64
    bias: bool = False
    norm: bool = False
    eps: float = 1e-6
    dim: int | None = None  # as in `HeadRows`: half of the zeros follow each half of a head


@dataclass(frozen=True)
class Inputs:
    """The parts of one call as numpy arrays (float32), and what is expected of it: queries and the
    pages, computed in float64."""

    qkv: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    bias: np.ndarray | None
    norms: tuple[np.ndarray, np.ndarray] | None
    k_pages: np.ndarray
    v_pages: np.ndarray
    page: np.ndarray
    offset: np.ndarray
    expected: tuple[np.ndarray, np.ndarray, np.ndarray]


CASES = (
    Case(name="one token", kept=1),
    Case(name="many tokens", kept=60),
    Case(name="every place", kept=7 * 16),
    Case(name="some dropped", kept=20, dropped=13),
    Case(name="all dropped", kept=0, dropped=9),
    Case(name="one KV head", kept=9, kv_heads=1),
    Case(name="no group", kept=9, heads=2, kv_heads=2, head_dim=128),
    Case(name="pages of 64", kept=40, dropped=3, page_size=64, head_dim=128),
    Case(name="small heads", kept=9, head_dim=16, norm=True, bias=True),
    Case(name="bias, groups of seven", kept=5, dropped=1, heads=14, bias=True, head_dim=128),
    Case(name="norm", kept=5, dropped=1, heads=16, kv_heads=8, norm=True, head_dim=128),
    Case(name="norm with a large eps", kept=3, norm=True, eps=0.1),
    Case(name="heads of 96", kept=5, dropped=1, heads=6, norm=True, head_dim=96),
    Case(name="heads of 96 among zeros", kept=5, bias=True, norm=True, head_dim=128, dim=96),
    Case(
        name="bias and norm, heads of 256",
        kept=3,
        dropped=1,
        heads=3,
        kv_heads=1,
        bias=True,
        norm=True,
        head_dim=256,
    ),
)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """The parts of a case; the angles are any, not those of positions."""
    rng = np.random.default_rng(seed)
    P = case.num_pages
    C = case.page_size
    H = case.head_dim
    N = case.heads
    K = case.kv_heads
    T = case.kept + case.dropped
    places = rng.permutation(P * C)[: case.kept]
    order = rng.permutation(T)
    page = np.concatenate([places // C, rng.integers(P, P + 3, case.dropped)]).astype(np.int32)[
        order
    ]
    offset = np.concatenate([places % C, rng.integers(0, C, case.dropped)]).astype(np.int32)[order]

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    angle = rng.uniform(0, 2 * np.pi, (T, H // 2))
    pages = normal(P, K, C, H), normal(P, K, C, H)
    norms = None
    if case.norm:
        norms = (normal(H), normal(H))
    cos, sin = (f(angle).astype(np.float32) for f in (np.cos, np.sin))
    made = (normal(T, N + 2 * K, H), cos, sin, normal(N + 2 * K, H) if case.bias else None, norms)
    for rows in (made[0], made[3]):
        if rows is not None and case.dim is not None:
            rows.reshape(*rows.shape[:-1], 2, H // 2)[..., case.dim // 2 :] = 0
    return Inputs(*made, *pages, page, offset, _expected(case, made, pages, page, offset))


def _expected(
    case: Case, made: tuple, pages: tuple[np.ndarray, ...], page: np.ndarray, offset: np.ndarray
) -> tuple:
    qkv, cos, sin, bias, norms = made
    N = case.heads
    K = case.kv_heads
    dim = case.dim or case.head_dim
    x = qkv.astype(np.float64) + (0 if bias is None else bias)
    kinds = [x[:, :N], x[:, N : N + K], x[:, N + K :]]
    for i in range(2):
        if norms is not None:
            kinds[i] = (
                kinds[i]
                / np.sqrt((kinds[i] ** 2).sum(axis=-1, keepdims=True) / dim + case.eps)
                * norms[i]
            )
        turn = cos.astype(np.float64) + 1j * sin  # a pair is a complex number
        first, second = np.split(kinds[i], 2, axis=-1)
        turned = (first + 1j * second) * turn[:, None]
        kinds[i] = np.concatenate([turned.real, turned.imag], axis=-1)
    written = [p.astype(np.float64) for p in pages]
    for t in np.flatnonzero(page < case.num_pages):
        for pool, new in zip(written, kinds[1:], strict=True):
            pool[page[t], :, offset[t]] = new[t]
    return kinds[0], *written
