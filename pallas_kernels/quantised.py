"""Keys and values in 8 bits: each token's head is stored as 8-bit floats and a scale of its own.

A scale is known when its token is written and never changes, so a token's bytes depend on the token
alone, however its prompt was chunked, batched or run again. Scales that are found here are powers
of two: dividing by them and multiplying with them rounds nothing, and the one rounding is that of
the 8-bit type.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

DTYPES = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
SCALE_DTYPE = jnp.dtype(jnp.bfloat16)
# Exponent bits of the smallest scale: what is scaled by it is as good as zero, and sums of its
# inverse stay finite
LEAST = 127 - 64
_MANTISSA = 23  # bits of a float32
# Fraction bits of the largest number of either type, which is 1.75 times a power of two
_TOP = 0b110 << (_MANTISSA - 3)


def is_quantised(dtype: DTypeLike) -> bool:
    """Whether pages of this type come with scales."""
    return jnp.dtype(dtype) in DTYPES


def scale_of(largest: Array, dtype: DTypeLike) -> Array:
    """The smallest power of two by which numbers up to `largest` (float32, not negative) fit the
    8-bit type; float32, at least 2**-64.

    It is found by adding to bits, since the kernels have no logarithm that is exact.
    """
    range_bits = int(jnp.finfo(dtype).max).bit_length() - 1
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    exponent = (
        lax.shift_right_logical(bits + ((1 << _MANTISSA) - 1 - _TOP), jnp.int32(_MANTISSA))
        - range_bits
    )
    return lax.bitcast_convert_type(
        lax.shift_left(jnp.maximum(exponent, LEAST), jnp.int32(_MANTISSA)), jnp.float32
    )


def inverse_of(scale: Array) -> Array:
    """1 / scale of a power of two, float32: exact, where the kernels' division is not."""
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    return lax.bitcast_convert_type((2 * 127 << _MANTISSA) - bits, jnp.float32)


def clipped(x: Array, dtype: DTypeLike) -> Array:
    """Numbers beyond the 8-bit type's range as its largest, which a conversion would not make of
    them everywhere; NaN stays."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.maximum(jnp.minimum(x, limit), -limit)


def quantise(x: Array, dtype: DTypeLike, given: Array | None = None) -> tuple[Array, Array]:
    """Float32 heads `[..., H]` as 8-bit floats `[..., H]` and the scale `[...]` of each, in the
    type that scales are stored in: its own, or those `given` `[heads]` for the last axis but one,
    which are of that type; then larger numbers become the largest."""
    if given is None:
        scale = scale_of(jnp.max(jnp.abs(x), axis=-1), dtype)
        return (x * inverse_of(scale)[..., None]).astype(dtype), scale.astype(SCALE_DTYPE)
    return clipped(x * (1 / given.astype(jnp.float32))[:, None], dtype).astype(
        dtype
    ), jnp.broadcast_to(given, x.shape[:-1])
