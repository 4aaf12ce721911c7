"""Ordered images of floats, a search on them, and counter-based random numbers, in int32 operations
that Mosaic GPU lowers."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax


def ordered(x: Array) -> Array:
    """int32 images of float32 numbers, in the same order."""
    bits = int_bits(x)
    return jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)


def float_of(image: Array) -> Array:
    """The float32 of an `ordered` image."""
    return float_bits(jnp.where(image < 0, image ^ jnp.int32(2**31 - 1), image))


def float_bits(x: Array) -> Array:
    """The float32 of the same bits."""
    return lax.bitcast_convert_type(x, jnp.float32)


def int_bits(x: Array) -> Array:
    """The int32 of the same bits."""
    return lax.bitcast_convert_type(x, jnp.int32)


def uniform(bits: Array) -> Array:
    """A number in (0, 1) from 31 random bits, with full resolution near 0."""
    return (
        lax.bitwise_and(bits, jnp.int32(2**31 - 1)).astype(jnp.float32) * 2.0**-31 * (1 - 2.0**-23)
        + 2.0**-32
    )


def exponential(bits: Array) -> Array:
    """A standard exponential variable, with full resolution near 0, where races are won."""
    u = uniform(bits)
    return jnp.where(u < 2.0**-10, u * (1.0 + u * 0.5), -jnp.log(1.0 - u))


def threefry(key: tuple[Array, Array], x0: Array, x1: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., 2011) on int32, whose sums wrap."""
    first = key[0]
    second = key[1]
    third = key[0] ^ key[1] ^ jnp.int32(0x1BD11BDA)

    def four(
        rotations: tuple[int, ...],
        state: tuple[Array, ...],
        keys: tuple[Array, Array],
        count: Array | int,
    ) -> tuple[Array, ...]:
        x0, x1 = state
        for r in rotations:
            x0 = x0 + x1
            x1 = lax.shift_left(x1, _like(x1, r)) | lax.shift_right_logical(x1, _like(x1, 32 - r))
            x1 = x1 ^ x0
        return x0 + keys[0], x1 + keys[1] + count

    def eight(i, carry):  # type: ignore[no-untyped-def]
        """Eight rounds, repeated in a loop: unrolled, they are a quarter of the lowering time."""
        x0, x1, a, b, c = carry
        x = four((17, 29, 16, 24), (x0, x1), (a, b), 2 * i + 2)
        return *four((13, 15, 26, 6), x, (b, c), 2 * i + 3), c, a, b

    x = four((13, 15, 26, 6), (x0 + first, x1 + second), (second, third), 1)
    return lax.fori_loop(0, 2, eight, (*x, third, first, second))[:2]  # type: ignore[return-value]


def _like(x: Array, value: int) -> Array:
    """`value` in x's shape. Not `jnp.full_like`, which in programs with shardings gives a plain
    number that JAX 0.11.2 does not lower."""
    return jnp.int32(value) if x.ndim == 0 else lax.broadcast(jnp.int32(value), x.shape)


def reach(x: Array, s: Array, t: Array) -> Array:
    """1 where x ≥ s plus 2^16 where x ≥ t. A sum of fewer than 2^15 of these holds both counts."""
    return jnp.where(x >= s, 1, 0) + jnp.where(x >= t, 1 << 16, 0)


def counts_of(total: Array) -> tuple[Array, Array]:
    """The two counts in a sum of `reach`."""
    low = lax.bitwise_and(total, _like(total, (1 << 16) - 1))
    return low, lax.shift_right_logical(total, _like(total, 16))


def search(
    k: Array,
    low: Array,
    high: Array,
    counts: Callable[[Array, Array], tuple[Array, Array]],
    low_first: bool = False,
) -> Array:
    """The largest t in [low, high] that at least k values reach, or any t that exactly k reach; low
    if there is none.

    Bounds are images of finite floats. `counts(s, t)`, with s ≤ t, gives the number of values that
    reach s and t. A step narrows the range to a third. With `low_first` the first step tests low
    itself.
    """

    def going(carry):  # type: ignore[no-untyped-def]
        low, high, is_exact, _ = carry
        return jnp.logical_and(low < high, is_exact == 0)

    def narrow(carry):  # type: ignore[no-untyped-def]
        low, high, _, guess = carry
        three = jnp.int32(3)
        # high - low could overflow
        step = jnp.maximum(lax.div(high, three) - lax.div(low, three), 1)
        first = jnp.where(guess > 0, low, low + step)
        second = jnp.minimum(low + step + step, high)
        reach_first, reach_second = counts(first, second)
        is_exact = jnp.logical_or(reach_first == k, reach_second == k).astype(jnp.int32)
        # low stays if fewer than k values reach even `first`.
        high = jnp.where(
            reach_first < k,
            jnp.maximum(first - 1, low),
            jnp.where(reach_second < k, second - 1, high),
        )
        low = jnp.where(reach_second >= k, second, jnp.where(reach_first >= k, first, low))
        return low, high, is_exact, jnp.int32(0)

    return lax.while_loop(going, narrow, (low, high, jnp.int32(0), jnp.int32(low_first)))[0]
