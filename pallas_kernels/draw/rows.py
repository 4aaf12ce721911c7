"""What each row of a draw asks for."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import Array

BROKEN = -2  # the token of a row whose logits have no finite maximum
SMALLEST_TEMPERATURE = 1e-5  # below it the most likely token is taken


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DrawRows:
    """Options of B rows. Of the tokens not banned, min_p, then top_k, then top_p keep those that
    may be drawn; ties are kept."""

    temperature_B: Array  # float32; 0 = the most likely token
    top_k_B: Array  # int32; 0 or less keeps all
    top_p_B: Array  # float32; 1 keeps all
    min_p_B: Array  # float32; 0 keeps all
    key_B2: Array  # uint32; the key of this draw
    banned_BK: Array  # int32 tokens that are impossible; less than 0 = none
