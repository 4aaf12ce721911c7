"""Cases of the draw, and the tokens each may draw by a float64 oracle that sorts. Tests and
benchmarks share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pallas_kernels.draw import DrawRows

ROUNDING = 1e-5  # relative error of a mass or ratio that float32 may decide either way


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of one row; `best_banned` bans its most likely token."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    best_banned: bool = False


OPTIONS = {
    "greedy": Options(temperature=0.0),
    "plain": Options(),
    "hot": Options(temperature=2.0, top_p=0.99),
    "cold": Options(temperature=0.05, top_p=0.5),
    "top_p": Options(temperature=0.8, top_p=0.9),
    "least top_p": Options(top_p=1e-6),
    "top_k": Options(top_k=50),
    "top one": Options(top_k=1),
    "two filters": Options(top_k=50, top_p=0.9),
    "many kept": Options(top_k=600, top_p=0.95),
    "min_p": Options(min_p=0.05),
    "three filters": Options(temperature=0.8, top_k=100, top_p=0.95, min_p=0.02),
    "banned, greedy": Options(temperature=0.0, best_banned=True),
    "banned": Options(temperature=0.3, best_banned=True),
    "banned, top_p": Options(top_p=0.5, best_banned=True),
}
LOGITS = ("flat", "spread", "head", "ties", "equal", "rising", "clustered", "negative")


def logits(distribution: str, rows: int, vocabulary: int, seed: int = 0) -> np.ndarray:
    """float32 logits `[rows, vocabulary]` of one of `LOGITS`."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, vocabulary))
    if distribution == "spread":
        x *= 4
    elif distribution == "head":  # a few likely tokens whose probabilities fall by a power law
        tokens = rng.permuted(np.tile(np.arange(vocabulary), (rows, 1)), axis=1)[
            :, : min(200, vocabulary // 4)
        ]
        np.put_along_axis(x, tokens, 18 - 2.2 * np.log(np.arange(1, tokens.shape[1] + 1)), axis=1)
    elif distribution == "ties":
        x = np.round(x * 2)
    elif distribution == "equal":
        x[:] = 0.5
    elif distribution == "rising":
        x = np.sort(x, axis=1)
    elif distribution == "clustered":  # likely tokens share slots, whatever the size of the chunks
        x[:, :: min(4096, vocabulary // 4)] += 6
        x[:, ::256] += 3
    elif distribution == "negative":  # far below zero, some impossible
        x = np.where(rng.random(x.shape) < 0.3, -np.inf, 100 * x - 1e4)
    return x.astype(np.float32)


def rows_of(options: Sequence[Options], logits_BV: np.ndarray, seed: int = 0) -> DrawRows:
    """The rows as numpy arrays, with random keys."""

    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(row_options, name) for row_options in options], dtype)

    banned = np.full((len(options), 3), -1, np.int32)
    banned[:, 1] = np.where(column("best_banned", bool), logits_BV.argmax(axis=1), -1)
    keys = np.random.default_rng(seed).integers(0, 2**32, (len(options), 2), np.uint32)
    floats = (column("top_p", np.float32), column("min_p", np.float32))
    return DrawRows(
        column("temperature", np.float32), column("top_k", np.int32), *floats, keys, banned
    )  # type: ignore[arg-type]


def possible(logits_V: np.ndarray, options: Options, slack: float = 0.0) -> np.ndarray:
    """A mask of the tokens that one row may draw. `slack` widens min_p and top_p, to allow for
    rounding."""
    x = logits_V.astype(np.float64)
    if options.best_banned:
        x[logits_V.argmax()] = -np.inf
    if options.temperature == 0:
        return np.arange(len(x)) == x.argmax()
    scaled = x / np.float64(np.float32(options.temperature))
    weight = np.exp(scaled - scaled.max())
    keep = x > -np.inf
    if options.min_p > 0:
        keep &= scaled - scaled.max() >= np.log(np.float64(np.float32(options.min_p))) - slack
    if 0 < options.top_k < keep.sum():
        keep &= x >= np.sort(x[keep])[-options.top_k]
    if options.top_p < 1:
        values, group = np.unique(-x[keep], return_inverse=True)
        mass = np.bincount(group, weight[keep])
        # The mass above each value; equal logits are kept or dropped together.
        above = np.cumsum(mass) - mass
        wanted = (np.float64(np.float32(options.top_p)) + slack) * mass.sum()
        last = values[above < wanted].max(initial=values[0])
        keep &= -x <= last
    return keep


def probabilities(logits_V: np.ndarray, options: Options) -> np.ndarray:
    """The exact distribution of one row's draw, float64."""
    keep = possible(logits_V, options)
    if options.temperature == 0:
        return keep.astype(np.float64)
    scaled = np.where(keep, logits_V.astype(np.float64) / options.temperature, -np.inf)
    weight = np.exp(scaled - scaled.max())
    return weight / weight.sum()
