"""Pearson's chi-square test of drawn tokens against a distribution. Imports numpy only."""

from __future__ import annotations

import numpy as np


def limit(freedom: int) -> float:
    """The statistic that one honest sample in ten thousand exceeds (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.719 * spread**0.5) ** 3


def chi_square(tokens: np.ndarray, probs: np.ndarray) -> tuple[float, int]:
    """The statistic over the possible tokens, and its degrees of freedom. Impossible tokens must
    not occur."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert counts[probs == 0].sum() == 0
    possible = probs > 0
    expected = probs[possible] * len(tokens)
    return float(((counts[possible] - expected) ** 2 / expected).sum()), int(possible.sum()) - 1


def pooled(
    tokens: np.ndarray, probs: np.ndarray, least: float = 5.0
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and their distribution, with the possible tokens that are expected fewer than `least`
    times taken together, as the test requires. Impossible tokens stay apart."""
    rare = (probs > 0) & (probs * len(tokens) < least)
    cell = np.where(rare, rare.argmax(), np.arange(len(probs)))
    return cell[tokens], np.bincount(cell, probs, minlength=len(probs))
