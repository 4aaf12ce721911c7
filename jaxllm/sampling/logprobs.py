"""Log-probabilities of tokens, their ranks and the most likely tokens, packed into one array for
the transfer to the host."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from jaxllm.sampling.largest import largest
from pallas_kernels.draw.reference import processed as processed


def packed_logprobs(logits_BV: Array, token_B: Array, count: int, normalised: bool) -> Array:
    """int32 `[B, 2 + 2·count]`: the bits of a token's log-probability, its rank, the ids of the
    `count` most likely tokens, the bits of their log-probabilities.

    Ranks start at 1; equal logits share the best. Unless `normalised`, logits take the place of
    log-probabilities.
    """
    top_BN, ids_BN = largest(logits_BV, max(1, count))
    best_B1, top_BN = top_BN[:, :1], top_BN[:, :count]
    chosen_B1 = jnp.take_along_axis(
        logits_BV, jnp.maximum(token_B, 0)[:, None], axis=1, mode="clip"
    )
    rank_B1 = 1 + (logits_BV > chosen_B1).sum(axis=1, keepdims=True, dtype=jnp.int32)
    values = jnp.concatenate([chosen_B1, top_BN], axis=1)
    if normalised:
        # The difference first: logits can be large where log-probabilities are small
        values = (values - best_B1) - jnp.log(
            jnp.exp(logits_BV - best_B1).sum(axis=1, keepdims=True)
        )
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.concatenate([bits[:, :1], rank_B1, ids_BN[:, :count], bits[:, 1:]], axis=1)
