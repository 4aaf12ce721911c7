"""Cases of routing. Tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from pallas_kernels.route.rules import Rule, normalised, softmax, unchanged


@dataclass(frozen=True, kw_only=True)
class Case:
    """Random logits `[tokens, experts]`; with `corrected`, a correction of each expert.

    Some experts of the second token are equal, and its best; so are all of the third.
    """

    name: str
    tokens: int
    experts: int
    rule: Rule
    corrected: bool = False


CASES = (
    Case(name="one token", tokens=1, experts=128, rule=Rule(8)),
    Case(
        name="one token, corrected",
        tokens=1,
        experts=60,
        rule=Rule(4, score=jax.nn.sigmoid, scale=2.5),
        corrected=True,
    ),
    Case(name="shared tiles", tokens=5, experts=12, rule=Rule(3, weigh=unchanged, scale=0.5)),
    Case(name="sorted", tokens=18, experts=40, rule=Rule(5), corrected=True),
    Case(name="all experts", tokens=3, experts=4, rule=Rule(4, score=unchanged, weigh=softmax)),
    Case(name="full shared tiles", tokens=16, experts=128, rule=Rule(8)),
    Case(name="two words of bits", tokens=40, experts=256, rule=Rule(8, weigh=normalised)),
    Case(
        name="several tiles an expert",
        tokens=200,
        experts=8,
        rule=Rule(2, score=jax.nn.sigmoid, weigh=unchanged),
    ),
    Case(name="a long prompt", tokens=600, experts=60, rule=Rule(4, weigh=unchanged)),
    Case(name="the most of all", tokens=256, experts=256, rule=Rule(16), corrected=True),
)


def inputs(case: Case, seed: int = 0) -> tuple[np.ndarray, np.ndarray | None]:
    """Logits and correction of a case, float32."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((case.tokens, case.experts)).astype(np.float32) * 2
    logits[1:2, case.experts // 3 : case.experts // 2] = logits.max() + 1
    logits[2:3] = -3
    correction = rng.standard_normal(case.experts).astype(np.float32)
    return logits, correction if case.corrected else None
