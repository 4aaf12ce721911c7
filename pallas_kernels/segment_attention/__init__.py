"""Attention among the tokens of each of several segments, in both directions."""

from __future__ import annotations

from typing import Any

from jax import Array

from pallas_kernels.backends import Backends

BACKENDS = Backends(__name__, "segment_attention", ("reference", "mosaic_gpu"))


def segment_attention(
    q_TNH: Array,
    k_TKH: Array,
    v_TKH: Array,
    first_T: Array,
    end_T: Array,
    *,
    longest: int,
    scale: float,
    window: int | None = None,
    plan: Any = None,
    backend: str,
) -> Array:
    """softmax(q·k · scale) · v over the tokens of the same segment, `[T, N, H]`.

    A token's segment is the tokens `first_T` to `end_T` (int32), itself included, at most `longest`
    of them; a token of no segment, whose end is not after its first, gets zeros. A token sees those
    at most `window` away; None sees all of its segment. Scores and sums are float32. `plan` is the
    back end's plan of the same segments and window, from `BACKENDS.planner`; without one each call
    makes it. Raises `UnknownBackend` for a name not in `BACKENDS`.
    """
    options = {} if plan is None else {"plan": plan}
    return BACKENDS[backend](
        q_TNH,
        k_TKH,
        v_TKH,
        first_T,
        end_T,
        longest=longest,
        scale=scale,
        window=window,
        **options,
    )
