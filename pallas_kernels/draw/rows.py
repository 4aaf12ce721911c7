"""Options of the rows of a draw."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import Array

BROKEN = -2  # the token of a row whose logits have no finite maximum
MIN_TEMPERATURE = 1e-5  # below it, the draw is the most likely token


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DrawRows:
    """Options of B rows. Bans apply first, then min_p, then top_k, then top_p; ties are kept.

    Attributes:
      temperature_B: float32; 0 = the most likely token.
      top_k_B: int32; 0 or less keeps all tokens.
      top_p_B: float32; 1 keeps all tokens.
      min_p_B: float32; 0 keeps all tokens.
      key_B2: uint32, the random key of this draw.
      banned_BK: int32, tokens that are impossible; negative = none.
    """

    temperature_B: Array
    top_k_B: Array
    top_p_B: Array
    min_p_B: Array
    key_B2: Array
    banned_BK: Array
