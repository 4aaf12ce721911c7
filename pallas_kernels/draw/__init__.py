"""One token a row from its logits: the most likely one, or a draw from the filtered softmax."""

from __future__ import annotations

from jax import Array

from pallas_kernels.backends import Backends
from pallas_kernels.draw.rows import BROKEN as BROKEN
from pallas_kernels.draw.rows import DrawRows as DrawRows

BACKENDS = Backends(__name__, "draw", ("reference", "mosaic_gpu"))


def draw(logits_BV: Array, rows: DrawRows, *, backend: str, filters: bool = True) -> Array:
    """One token a row, int32 `token_B`.

    The token is `BROKEN` if the row holds NaN or positive infinity, or has no finite logit that is
    not banned. A draw depends on its row's logits, options and key alone; the same key draws other
    tokens in other back ends. `filters=False` promises that no row filters or bans.

    Raises `UnknownBackend` for a name not in `BACKENDS`, and ValueError for shapes or types that
    the back end does not support.
    """
    return BACKENDS[backend](logits_BV, rows, filters=filters)


def backend_for(wanted: str, logits_BV: Array) -> str:
    """`wanted` if the op has that back end and it supports these logits, else "reference"."""
    return wanted if BACKENDS.supports(wanted, logits_BV) else "reference"
