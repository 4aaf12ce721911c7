"""Sequences in pages, and attention in float64 one head at a time: NumPy oracles of test cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """What the cases of both paged attention ops have.

    Attributes:
      value_dim: width of a value; None is that of a key.
      spare: entries by which the page table is wider than the longest row needs.
      poison: what places that no row sees hold.
    """

    name: str
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    page_size: int = 16
    spare: int = 2
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    poison: float = float("nan")

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the op."""
        sinks = np.linspace(-2.0, 4.0, self.heads, dtype=np.float32) if self.sinks else None
        return {
            "scale": self.head_dim**-0.5,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": sinks,
        }


@dataclass(frozen=True)
class Pages:
    """Sequences in pages.

    Attributes:
      k, v: pages `[P, K, C, H]`.
      table: page of each block of a row's tokens, int32 `[rows, M]`.
    """

    k: np.ndarray
    v: np.ndarray
    table: np.ndarray


def made(
    rng: np.random.Generator, case: AttentionCase, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Random keys and values of a sequence, float32."""
    both = rng.standard_normal((2, tokens, case.kv_heads, case.head_dim)).astype(np.float32)
    return both[0], both[1][..., : case.value_dim]


def in_pages(
    k_sequences: Sequence[np.ndarray],
    v_sequences: Sequence[np.ndarray],
    page_size: int,
    spare: int,
    poison: float,
    seed: int,
) -> Pages:
    """Lay each sequence `[length, K, H]` out in its own pages, in random order.

    Slots that no sequence owns hold `poison`. Table entries beyond a sequence name random pages,
    owned or free. The table is `spare` entries wider than the longest sequence needs.
    """
    rng = np.random.default_rng(seed)
    needs = [-(-len(k) // page_size) for k in k_sequences]
    num_pages = sum(needs) + 3
    order = rng.permutation(num_pages)
    table = rng.integers(0, num_pages, (len(needs), max(needs, default=0) + spare)).astype(np.int32)
    k, v = (
        np.full((num_pages, x.shape[1], page_size, x.shape[2]), poison, x.dtype)
        for x in (k_sequences[0], v_sequences[0])
    )
    used = 0
    for row, need in enumerate(needs):
        table[row, :need] = order[used : used + need]
        used += need
        for j in range(len(k_sequences[row])):
            page = table[row, j // page_size]
            offset = j % page_size
            k[page, :, offset] = k_sequences[row][j]
            v[page, :, offset] = v_sequences[row][j]
    return Pages(k, v, table)


def dense_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attention in float64 of a sequence's last queries `[Q, N, H]` over its keys `[S, K, H]` and
    values `[S, K, V]`.

    `sinks` `[N]` adds one score to every query of a head, with the value zero.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    Q, N, _ = q.shape
    S, K, _ = k.shape
    out = np.zeros((Q, N, v.shape[2]))
    query = np.arange(S - Q, S)[:, None]
    key = np.arange(S)[None, :]
    visible = (key <= query) & (key > query - (S + 1 if window is None else window))
    for head in range(N):
        scores = q[:, head] @ k[:, head // (N // K)].T * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        scores = np.where(visible, scores, -np.inf)
        sink = np.full((Q, 1), -np.inf if sinks is None else sinks[head])
        scores = np.concatenate([scores, sink], axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights[:, :-1] / weights.sum(axis=1, keepdims=True) @ v[:, head // (N // K)]
    return out
