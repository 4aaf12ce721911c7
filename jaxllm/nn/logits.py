"""What families do to logits [R, V] before anything else reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

type LogitsMap = Callable[[Array], Array]


@dataclass(frozen=True)
class Scale:
    """Logits times a factor."""

    factor: float

    def __call__(self, logits_RV: Array) -> Array:
        return logits_RV * self.factor


@dataclass(frozen=True)
class Softcap:
    """cap · tanh(logits / cap)."""

    cap: float

    def __call__(self, logits_RV: Array) -> Array:
        return self.cap * jnp.tanh(logits_RV / self.cap)
