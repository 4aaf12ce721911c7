"""Log-probabilities of tokens, their ranks and the most likely tokens, packed into one array for
the way to the host."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array, lax

from jaxllm.sampling.largest import largest
from pallas_kernels.draw.reference import filtered, without
from pallas_kernels.draw.rows import SMALLEST_TEMPERATURE, DrawRows


def packed_logprobs(logits_BV: Array, token_B: Array, count: int, normalised: bool) -> Array:
    """int32 `[B, 2 + 2·count]`: the bits of a token's log-probability, its rank, the ids of the
    most likely tokens, their bits.

    Ranks begin with 1 and equal logits share the best. Unless `normalised`, logits take the place
    of log-probabilities.
    """
    top_BN, ids_BN = largest(logits_BV, max(1, count))
    best_B1, top_BN = top_BN[:, :1], top_BN[:, :count]
    chosen_B1 = jnp.take_along_axis(
        logits_BV, jnp.maximum(token_B, 0)[:, None], axis=1, mode="clip"
    )
    rank_B1 = 1 + (logits_BV > chosen_B1).sum(axis=1, keepdims=True, dtype=jnp.int32)
    values = jnp.concatenate([chosen_B1, top_BN], axis=1)
    if normalised:
        # The difference first: logits can be large, and the likeliest tokens' log-probabilities
        # small.
        values = (values - best_B1) - jnp.log(
            jnp.exp(logits_BV - best_B1).sum(axis=1, keepdims=True)
        )
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.concatenate([bits[:, :1], rank_B1, ids_BN[:, :count], bits[:, 1:]], axis=1)


def processed(logits_BV: Array, rows: DrawRows) -> Array:
    """The logits that tokens are drawn by: without banned tokens, divided by the temperature, minus
    infinity where filters exclude. Where the most likely token is taken, neither temperature nor
    filters change anything."""
    greedy_B = rows.temperature_B < SMALLEST_TEMPERATURE
    rows = replace(
        rows,
        temperature_B=jnp.where(greedy_B, 1.0, rows.temperature_B),
        top_k_B=jnp.where(greedy_B, 0, rows.top_k_B),
        top_p_B=jnp.where(greedy_B, 1.0, rows.top_p_B),
        min_p_B=jnp.where(greedy_B, 0.0, rows.min_p_B),
    )
    return filtered(without(logits_BV, rows.banned_BK) / rows.temperature_B[:, None], rows)
