"""One token a row from its logits: the most likely one, or one drawn from the softmax over what
filters keep."""

from __future__ import annotations

from jax import Array

from pallas_kernels.backends import Backends
from pallas_kernels.draw.rows import BROKEN as BROKEN
from pallas_kernels.draw.rows import DrawRows as DrawRows

BACKENDS = Backends(__name__, "draw", ("reference", "mosaic_gpu"))


def draw(logits_BV: Array, rows: DrawRows, *, backend: str, filters: bool = True) -> Array:
    """int32 `token_B`; `BROKEN` where no logit that is not banned is finite, or one is NaN or
    positive infinity.

    A draw depends on nothing but the row's logits, options and key; the same key draws different
    tokens in different back ends. `filters=False` promises that no row filters or bans. Raises
    `UnknownBackend` for a name not in `BACKENDS`; a back end raises ValueError for shapes and
    dtypes that it does not take.
    """
    return BACKENDS[backend](logits_BV, rows, filters=filters)


def backend_for(logits_BV: Array, wanted: str) -> str:
    """`wanted` if it is a back end that takes these logits, else the reference."""
    if wanted == "mosaic_gpu":
        from pallas_kernels.draw.mosaic_gpu import check

        return wanted if check(logits_BV) is None else "reference"
    return "reference"
