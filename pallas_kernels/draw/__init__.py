"""One token a row from its logits: the most likely one, or a draw from the filtered softmax."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import Array

from pallas_kernels.backends import Backends
from pallas_kernels.target import ANYWHERE, HOPPER, Target

BACKENDS = Backends(__name__, "draw", {"reference": ANYWHERE, "mosaic_gpu": HOPPER})
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


def draw(logits_BV: Array, rows: DrawRows, *, backend: str, filters: bool = True) -> Array:
    """One token a row, int32 `token_B`.

    The token is `BROKEN` if the row holds NaN or positive infinity, or has no finite logit that is
    not banned. A draw depends on its row's logits, options and key alone; the same key draws other
    tokens in other back ends. `filters=False` promises that no row filters or bans.

    Raises `UnknownBackend` for a name not in `BACKENDS`, and ValueError for shapes or types that
    the back end does not support.
    """
    return BACKENDS[backend](logits_BV, rows, filters=filters)


def choose(target: Target, logits_BV: Array) -> str:
    """The back end for these logits on a target."""
    return BACKENDS.choose(target, logits_BV)


def is_kernel(backend: str) -> bool:
    """Whether a draw is one kernel: it filters as fast as it draws and needs no memory."""
    return not BACKENDS.runs_anywhere(backend)
