"""Attention among the tokens of each of several segments, in both directions."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.backends import Backends
from pallas_kernels.segment_attention.segments import Segments as Segments
from pallas_kernels.target import ANYWHERE, HOPPER

BACKENDS = Backends(__name__, "segment_attention", {"reference": ANYWHERE, "mosaic_gpu": HOPPER})


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
    gets zeros; one that sees a number that is not finite gets NaN, and no other does. Scores and
    sums are float32. `plan` is the back end's plan of the same segments and window, from
    `BACKENDS.planner`; without one each call makes it. Raises `UnknownBackend` for a name not in
    `BACKENDS`.
    """
    options = {} if plan is None else {"plan": plan}
    run = BACKENDS[backend]
    k_TKH, v_TKH = _contained(k_TKH, v_TKH)
    return run(q_TNH, k_TKH, v_TKH, segments, scale=scale, window=window, **options)


def _contained(k_TKH: Array, v_TKH: Array) -> tuple[Array, Array]:
    """Keys of NaN and values of 0 where a value is not finite.

    A back end multiplies values that a token does not see by 0, which keeps NaN, but it masks
    scores. So tokens that see such a value get NaN, and no other token does.
    """
    finite_TKH = jnp.isfinite(v_TKH)
    whole_TK1 = finite_TKH.all(axis=-1, keepdims=True)
    return jnp.where(whole_TK1, k_TKH, jnp.nan), jnp.where(finite_TKH, v_TKH, 0)
