"""Attention among the tokens of each of several segments, in both directions."""

from __future__ import annotations

from jax import Array

from pallas_kernels.backends import Backends

BACKENDS = Backends(__name__, "segment_attention", ("reference",))


def segment_attention(
    q_TNH: Array,
    k_TKH: Array,
    v_TKH: Array,
    segment_T: Array,
    *,
    longest: int,
    scale: float,
    window: int | None = None,
    backend: str = "reference",
) -> Array:
    """softmax(q·k · scale) · v over the tokens of the same segment, `[T, N, H]`.

    `segment_T` is the number of each token's segment; tokens of a segment follow each other, at
    most `longest` of them. A token sees those at most `window` away; None sees all of its segment.
    Scores and sums are float32. Raises `UnknownBackend` for a name not in `BACKENDS`.
    """
    return BACKENDS[backend](
        q_TNH, k_TKH, v_TKH, segment_T, longest=longest, scale=scale, window=window
    )
