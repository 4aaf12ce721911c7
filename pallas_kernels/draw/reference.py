"""Draws of tokens in plain JAX. Thresholds come from bisection on the floats' integer images, not
from a sort of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.draw import BROKEN, MIN_TEMPERATURE, DrawRows


def draw(logits_BV: Array, rows: DrawRows, *, filters: bool = True) -> Array:
    """See `pallas_kernels.draw`. The largest of the allowed logits plus Gumbel noise."""
    logits_BV = mask_banned(logits_BV, rows.banned_BK) if filters else logits_BV
    greedy_B = rows.temperature_B < MIN_TEMPERATURE
    scaled_BV = logits_BV / jnp.where(greedy_B, 1.0, rows.temperature_B)[:, None]
    if filters:
        scaled_BV = apply_filters(scaled_BV, rows)
    noise_BV = jax.vmap(gumbel, in_axes=(0, None))(rows.key_B2, logits_BV.shape[-1])
    drawn_B = jnp.argmax(scaled_BV + noise_BV, axis=-1)
    token_B = jnp.where(greedy_B, jnp.argmax(logits_BV, axis=-1), drawn_B).astype(jnp.int32)
    return jnp.where(has_finite_maximum(logits_BV), token_B, BROKEN)


def processed(logits_BV: Array, rows: DrawRows) -> Array:
    """The logits that tokens are drawn by: banned tokens at minus infinity, divided by the
    temperature, filtered. Greedy rows are neither divided nor filtered."""
    logits_BV = mask_banned(logits_BV, rows.banned_BK)
    greedy_B1 = rows.temperature_B[:, None] < MIN_TEMPERATURE
    scaled_BV = logits_BV / jnp.where(greedy_B1, 1.0, rows.temperature_B[:, None])
    return jnp.where(greedy_B1, logits_BV, apply_filters(scaled_BV, rows))


def has_finite_maximum(logits_BV: Array) -> Array:
    """Whether each row has a finite maximum and no NaN. NaN is tested separately: XLA's maximum on
    the CPU loses it in long rows."""
    return jnp.isfinite(logits_BV.max(axis=-1)) & ~jnp.isnan(logits_BV).any(axis=-1)


def mask_banned(logits_BV: Array, banned_BK: Array) -> Array:
    """The logits with the banned tokens at minus infinity."""
    B, V = logits_BV.shape
    ids_BK = jnp.where(banned_BK >= 0, banned_BK, V)  # V is dropped
    return logits_BV.at[jnp.arange(B)[:, None], ids_BK].set(-jnp.inf, mode="drop")


def apply_filters(scaled_BV: Array, rows: DrawRows) -> Array:
    """The logits with minus infinity for tokens that min_p, then top_k, then top_p exclude. Ties at
    a threshold are kept."""
    best_B1 = scaled_BV.max(axis=-1, keepdims=True)
    scaled_BV = jnp.where(
        scaled_BV - best_B1 >= jnp.log(rows.min_p_B)[:, None], scaled_BV, -jnp.inf
    )
    order_BV = _ordered(scaled_BV)
    wanted_B = jnp.where(rows.top_k_B <= 0, scaled_BV.shape[-1], rows.top_k_B)
    kth_B1 = _largest(order_BV, lambda keep: keep.sum(axis=-1, dtype=jnp.int32) >= wanted_B)
    mass = _mass_of(jnp.where(order_BV >= kth_B1, jnp.exp(scaled_BV - best_B1), 0.0))
    wanted_mass_B = jnp.where(
        rows.top_p_B >= 1, jnp.inf, rows.top_p_B * mass(jnp.ones_like(order_BV, bool))
    )
    pth_B1 = _largest(order_BV, lambda keep: mass(keep) >= wanted_mass_B)
    return jnp.where(order_BV >= jnp.maximum(kth_B1, pth_B1), scaled_BV, -jnp.inf)


def _mass_of(weight_BV: Array) -> Callable[[Array], Array]:
    """A function from a mask to the sum of the weights (0 to 1) under it, `[B]`.

    It adds integers in two limbs that cannot overflow. The order of float additions depends on the
    batch's shape and sharding, and the last bit can decide whether a token is in top_p.
    """
    bits = min(14, 32 - weight_BV.shape[-1].bit_length())
    fixed_BV = jnp.minimum(weight_BV * 2.0 ** (2 * bits), 2.0 ** (2 * bits) - 1).astype(jnp.uint32)
    high_BV = fixed_BV >> bits
    low_BV = fixed_BV & ((1 << bits) - 1)

    def mass(keep_BV: Array) -> Array:
        high_B, low_B = (
            jnp.where(keep_BV, limb, 0).sum(axis=-1, dtype=jnp.uint32) for limb in (high_BV, low_BV)
        )
        return high_B.astype(jnp.float32) + low_B.astype(jnp.float32) * 2.0**-bits

    return mass


def _ordered(x: Array) -> Array:
    """uint32 images of float32 numbers in the same order; -0 and 0 are equal."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest(order_BV: Array, enough: Callable[[Array], Array]) -> Array:
    """Per row the largest t for which `enough(order >= t)`, or 0. `enough` is monotone: it holds
    for every superset of a mask that it holds for.

    One bit a pass from the top, always 32 passes.
    """

    def bit(i: Array, found_B1: Array) -> Array:
        candidate_B1 = found_B1 | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(enough(order_BV >= candidate_B1)[:, None], candidate_B1, found_B1)

    return lax.fori_loop(0, 32, bit, jnp.zeros((order_BV.shape[0], 1), jnp.uint32))


def gumbel(key_2: Array, size: int) -> Array:
    """`size` Gumbel variables of one draw: the argmax of logits plus these follows their softmax.

    Large values, which win draws, use all 32 random bits. With the usual 23 bits the largest of
    150,000 variables lies on a grid coarse enough to bias the draw.
    """
    key = jax.random.wrap_key_data(key_2, impl="threefry2x32")
    uniform = (jax.random.bits(key, (size,), jnp.uint32).astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)))
