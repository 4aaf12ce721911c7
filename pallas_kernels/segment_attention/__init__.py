"""Attention among the tokens of each of several segments, in both directions."""

from __future__ import annotations

from typing import Any

from jax import Array

from pallas_kernels.backends import Backends
from pallas_kernels.segment_attention.segments import Segments as Segments

BACKENDS = Backends(__name__, "segment_attention", ("reference", "mosaic_gpu"))


def segment_attention(
    q_TNH: Array,
    k_TKH: Array,
    v_TKH: Array,
    segments: Segments,
    *,
    scale: float,
    window: int | None = None,
    plan: Any = None,
    backend: str,
) -> Array:
    """softmax(q·k · scale) · v over the tokens of the same segment, `[T, N, H]`.

    A token sees those of its segment at most `window` away; None sees all. A token of no segment
    gets zeros. Scores and sums are float32. `plan` is the back end's plan of the same segments and
    window, from `BACKENDS.planner`; without one each call makes it. Raises `UnknownBackend` for a
    name not in `BACKENDS`.
    """
    options = {} if plan is None else {"plan": plan}
    run = BACKENDS[backend]
    return run(q_TNH, k_TKH, v_TKH, segments, scale=scale, window=window, **options)
