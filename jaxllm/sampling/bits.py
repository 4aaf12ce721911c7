"""Sets of tokens as packed bits, uint32 `[W]`: token i is bit i % 32 of word i // 32. Imports no
jax."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

WORD = 32


def words_of(vocab_size: int) -> int:
    """How many words hold a bit for every token."""
    return -(-vocab_size // WORD)


def packed(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """The set of these tokens, which must be in the vocabulary."""
    flags = np.zeros(words_of(vocab_size) * WORD, np.bool_)
    flags[np.fromiter(ids, np.int64)] = True
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def everything(vocab_size: int) -> np.ndarray:
    """The set of all tokens."""
    return packed(range(vocab_size), vocab_size)


def remove(bits_W: np.ndarray, token: int) -> None:
    """Remove one token in place."""
    bits_W[token // WORD] &= np.uint32(2**WORD - 1 ^ 1 << token % WORD)


def has(bits_W: np.ndarray, token: int) -> bool:
    """Whether a token is in the set."""
    return bool(int(bits_W[token // WORD]) >> token % WORD & 1)


def nothing_but(bits_W: np.ndarray, tokens: Collection[int]) -> bool:
    """Whether a set has no tokens except these, which are distinct."""
    words = np.flatnonzero(bits_W)
    return len(words) <= len(tokens) and int(np.bitwise_count(bits_W[words]).sum()) == sum(
        has(bits_W, token) for token in tokens
    )
