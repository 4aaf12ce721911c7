"""Log-probabilities of tokens, their ranks and the most likely tokens, packed into one array for
the transfer to the host."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.draw.reference import processed as processed

FEW = 640  # numbers that are ranked by comparing all pairs
MOST = 64  # results; for more, a sort is faster
WIDEST = 128  # numbers of a block


def packed_logprobs(logits_BV: Array, token_B: Array, count: int, normalised: bool) -> Array:
    """int32 `[B, 2 + 2·count]`: the bits of a token's log-probability, its rank, the ids of the
    `count` most likely tokens, the bits of their log-probabilities.

    Ranks start at 1; equal logits share the best. Unless `normalised`, logits take the place of
    log-probabilities.
    """
    top_BN, ids_BN = largest(logits_BV, max(1, count))
    best_B1 = top_BN[:, :1]
    top_BN = top_BN[:, :count]
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


def largest(x_BV: Array, count: int) -> tuple[Array, Array]:
    """(values, int32 places), each `[B, count]`, descending; of equal values the first comes first.
    `count` is at most V.

    The `count` blocks with the largest maxima (of equal ones the first) hold the `count` largest
    numbers, since any other number comes after all of these maxima. So all numbers are read once,
    and few are ranked.
    """
    if count > MOST:
        # top_k orders -0 below 0
        values_BN, places_BN = lax.top_k(jnp.where(x_BV == 0, 0.0, x_BV), count)
        return values_BN, places_BN.astype(jnp.int32)
    size = x_BV.shape[1]
    if size <= FEW:
        return _by_rank(x_BV, count)
    # So that there are about as many blocks as candidates
    width = min(WIDEST, 2 ** int(math.log2(math.sqrt(size / count))))
    blocks = -(-size // width)
    padded_BV = jnp.pad(x_BV, ((0, 0), (0, blocks * width - size)), constant_values=-jnp.inf)
    _, best_BN = largest(padded_BV.reshape(-1, blocks, width).max(axis=2), count)
    # In the order of places, which decides between equal values; padding comes last
    places_BC = (
        _ascending(best_BN)[:, :, None] * width + jnp.arange(width, dtype=jnp.int32)
    ).reshape(best_BN.shape[0], -1)
    candidates_BC = jnp.where(
        places_BC < size, _at(x_BV, jnp.minimum(places_BC, size - 1)), -jnp.inf
    )
    values_BN, at_BN = largest(candidates_BC, count)
    return values_BN, _at(places_BC, at_BN)


def _by_rank(x_BM: Array, count: int) -> tuple[Array, Array]:
    """`largest` by ranks: a number's rank is how many come before it."""
    place_M = jnp.arange(x_BM.shape[1], dtype=jnp.int32)
    x_BM1 = x_BM[:, :, None]
    x_B1M = x_BM[:, None, :]
    ahead_BMM = (x_B1M > x_BM1) | ((x_B1M == x_BM1) & (place_M < place_M[:, None]))
    rank_BM = ahead_BMM.sum(axis=2, dtype=jnp.int32)
    here_BNM = rank_BM[:, None, :] == jnp.arange(count, dtype=jnp.int32)[:, None]
    values_BN = jnp.where(here_BNM, x_B1M, 0.0).sum(axis=2)
    return values_BN, jnp.where(here_BNM, place_M, 0).sum(axis=2, dtype=jnp.int32)


def _ascending(x_BN: Array) -> Array:
    """A few distinct integers in ascending order."""
    rank_BN = (x_BN[:, None, :] < x_BN[:, :, None]).sum(axis=2, dtype=jnp.int32)
    here_BNN = rank_BN[:, None, :] == jnp.arange(x_BN.shape[1], dtype=jnp.int32)[:, None]
    return jnp.where(here_BNN, x_BN[:, None, :], 0).sum(axis=2, dtype=jnp.int32)


def _at(x_BM: Array, places_BN: Array) -> Array:
    return jnp.take_along_axis(x_BM, places_BN, axis=1, mode="clip")
