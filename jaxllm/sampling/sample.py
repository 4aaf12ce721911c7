"""Logits to tokens on the device. No sort of the vocabulary: thresholds are found by bisection on the floats' integer images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.sampling.choose import Sampler

__all__ = ["BROKEN", "Sampled", "Sampler", "SamplingRows", "sample"]

BROKEN = -2  # the token of a row whose logits have no finite maximum
SMALLEST_TEMPERATURE = 1e-5  # below it the most likely token is taken, as in `SamplingParams.greedy`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """What each of B rows asks for."""

    temperature_B: Array  # float32; 0 = the most likely token
    top_k_B: Array  # int32; 0 or less keeps all
    top_p_B: Array  # float32; 1 keeps all
    min_p_B: Array  # float32; 0 keeps all
    key_B2: Array  # uint32, the halves of the request's 64-bit seed
    position_B: Array  # int32, the position that the new token will have
    stop_ids_BK: Array  # int32, padded with -1
    suppress_B: Array  # bool; the stop ids are impossible (min_tokens not reached)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """Tokens, and for `Sampler.LOGPROBS` the raw log-probabilities (before temperature and filters) in float32."""

    token_B: Array  # int32; BROKEN where the logits have no finite maximum
    logprob_B: Array | None = None
    rank_B: Array | None = None  # 1 = most likely
    top_ids_BN: Array | None = None
    top_logprobs_BN: Array | None = None


def sample(logits_BV: Array, rows: SamplingRows, sampler: Sampler, num_logprobs: int) -> Sampled:
    """One token a row. A draw depends on the row's logits, options, seed and position, never on its neighbours or its place."""
    raw_BV = logits_BV.astype(jnp.float32)
    logits_BV = suppressed(raw_BV, rows) if sampler >= Sampler.FILTERED else raw_BV
    token_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    if sampler >= Sampler.RANDOM:
        greedy_B = rows.temperature_B < SMALLEST_TEMPERATURE
        scaled_BV = logits_BV / jnp.where(greedy_B, 1.0, rows.temperature_B)[:, None]
        if sampler >= Sampler.FILTERED:
            scaled_BV = filtered(scaled_BV, rows)
        noise_BV = jax.vmap(_gumbel, in_axes=(0, 0, None))(rows.key_B2, rows.position_B, logits_BV.shape[-1])
        drawn_B = jnp.argmax(scaled_BV + noise_BV, axis=-1).astype(jnp.int32)
        token_B = jnp.where(greedy_B, token_B, drawn_B)
    token_B = jnp.where(jnp.isfinite(logits_BV.max(axis=-1)), token_B, BROKEN)
    if sampler < Sampler.LOGPROBS:
        return Sampled(token_B)
    return _with_logprobs(token_B, raw_BV, num_logprobs)


def suppressed(logits_BV: Array, rows: SamplingRows) -> Array:
    """The logits with the stop ids of `suppress` rows at minus infinity."""
    B, V = logits_BV.shape
    usable_BK = rows.suppress_B[:, None] & (rows.stop_ids_BK >= 0)
    ids_BK = jnp.where(usable_BK, rows.stop_ids_BK, V)  # V is dropped
    return logits_BV.at[jnp.arange(B)[:, None], ids_BK].set(-jnp.inf, mode="drop")


def filtered(scaled_BV: Array, rows: SamplingRows) -> Array:
    """The logits with the tokens that min_p, then top_k, then top_p exclude at minus infinity. Ties at a threshold are kept."""
    best_B1 = scaled_BV.max(axis=-1, keepdims=True)
    scaled_BV = jnp.where(scaled_BV - best_B1 >= jnp.log(rows.min_p_B)[:, None], scaled_BV, -jnp.inf)
    order_BV = _ordered(scaled_BV)
    wanted_B = jnp.where(rows.top_k_B <= 0, scaled_BV.shape[-1], rows.top_k_B)
    kth_B1 = _largest(order_BV, lambda keep: keep.sum(axis=-1, dtype=jnp.int32) >= wanted_B)
    mass = _mass_of(jnp.where(order_BV >= kth_B1, jnp.exp(scaled_BV - best_B1), 0.0))
    wanted_mass_B = jnp.where(rows.top_p_B >= 1, jnp.inf, rows.top_p_B * mass(jnp.ones_like(order_BV, bool)))
    pth_B1 = _largest(order_BV, lambda keep: mass(keep) >= wanted_mass_B)
    return jnp.where(order_BV >= jnp.maximum(kth_B1, pth_B1), scaled_BV, -jnp.inf)


def _mass_of(weight_BV: Array) -> Callable[[Array], Array]:
    """A function from a mask to the sum of the weights (0 to 1) under it, `[B]`.

    It adds integers, in two limbs that cannot overflow: how floats are added depends on the batch's shape and the sharding, and
    the last bit can decide whether a token belongs to top_p.
    """
    bits = min(14, 32 - weight_BV.shape[-1].bit_length())
    fixed_BV = jnp.minimum(weight_BV * 2.0 ** (2 * bits), 2.0 ** (2 * bits) - 1).astype(jnp.uint32)
    high_BV, low_BV = fixed_BV >> bits, fixed_BV & ((1 << bits) - 1)

    def mass(keep_BV: Array) -> Array:
        high_B, low_B = (jnp.where(keep_BV, limb, 0).sum(axis=-1, dtype=jnp.uint32) for limb in (high_BV, low_BV))
        return high_B.astype(jnp.float32) + low_B.astype(jnp.float32) * 2.0**-bits

    return mass


def _ordered(x: Array) -> Array:
    """uint32 images of float32 in the same order; -0 and 0 are equal."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest(order_BV: Array, enough: Callable[[Array], Array]) -> Array:
    """Per row the largest t for which `enough(order >= t)`, or 0; `enough` must hold for more tokens if it holds for fewer.

    One bit a pass from the top: 32 passes, whatever the values.
    """

    def bit(i: Array, found_B1: Array) -> Array:
        candidate_B1 = found_B1 | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(enough(order_BV >= candidate_B1)[:, None], candidate_B1, found_B1)

    return lax.fori_loop(0, 32, bit, jnp.zeros((order_BV.shape[0], 1), jnp.uint32))


def _gumbel(key_2: Array, position: Array, size: int) -> Array:
    """`size` Gumbel variables of one draw. Adding them to logits and taking the largest samples from their softmax.

    All 32 bits count towards the large values, where the winners are: with the usual 23 bits, the largest of 150,000 variables
    would fall on a grid coarse enough to bias the draw.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(key_2, impl="threefry2x32"), position)
    uniform = (jax.random.bits(key, (size,), jnp.uint32).astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)))


def _with_logprobs(token_B: Array, raw_BV: Array, num_logprobs: int) -> Sampled:
    logprobs_BV = jax.nn.log_softmax(raw_BV, axis=-1)
    # A masked sum, not an index: the vocabulary may be split over devices.
    chosen_BV = jnp.arange(raw_BV.shape[-1]) == token_B[:, None]
    logprob_B = jnp.where(chosen_BV, logprobs_BV, 0.0).sum(axis=-1)
    chosen_B = jnp.where(chosen_BV, raw_BV, 0.0).sum(axis=-1)
    rank_B = 1 + (raw_BV > chosen_B[:, None]).sum(axis=-1, dtype=jnp.int32)
    top, ids = lax.top_k(logprobs_BV, min(num_logprobs, raw_BV.shape[-1]))
    return Sampled(token_B, logprob_B, rank_B, ids.astype(jnp.int32), top)
