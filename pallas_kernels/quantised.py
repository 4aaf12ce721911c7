"""Keys and values in 8 bits: 8-bit floats and one scale per token and head.

A scale is fixed when its token is written. A token's bytes therefore depend on the token alone, not
on how its prompt was chunked or batched. Scales computed here are powers of two, so scaling is
exact and only the conversion to the 8-bit type rounds.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

DTYPES = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
SCALE_DTYPE = jnp.dtype(jnp.bfloat16)
# Exponent bits of the smallest scale, 2**-64: smaller heads count as zero, and sums of its inverse
# stay finite
MIN_SCALE_BITS = 127 - 64
_MANTISSA = 23  # bits of a float32
# Fraction bits of the largest number of both types, which is 1.75 times a power of two
_TOP = 0b110 << (_MANTISSA - 3)


def is_quantised(dtype: DTypeLike) -> bool:
    """Whether pages of this type have scales."""
    return jnp.dtype(dtype) in DTYPES


def scale_of(largest: Array, dtype: DTypeLike) -> Array:
    """The smallest power of two s such that `largest / s` fits the 8-bit type.

    `largest` is float32 and not negative; s is float32 and at least 2**-64. Computed on the bits,
    because kernels have no exact logarithm.
    """
    range_bits = int(jnp.finfo(dtype).max).bit_length() - 1
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    exponent = (
        lax.shift_right_logical(bits + ((1 << _MANTISSA) - 1 - _TOP), jnp.int32(_MANTISSA))
        - range_bits
    )
    return lax.bitcast_convert_type(
        lax.shift_left(jnp.maximum(exponent, MIN_SCALE_BITS), jnp.int32(_MANTISSA)), jnp.float32
    )


def inverse_of(scale: Array) -> Array:
    """1 / scale for a power of two, float32. Exact, unlike the kernels' division."""
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    return lax.bitcast_convert_type((2 * 127 << _MANTISSA) - bits, jnp.float32)


def clipped(x: Array, dtype: DTypeLike) -> Array:
    """x limited to the 8-bit type's range, which conversions do not do on every device; NaN
    stays."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.maximum(jnp.minimum(x, limit), -limit)


def quantise(x: Array, dtype: DTypeLike, fixed_scale: Array | None = None) -> tuple[Array, Array]:
    """Float32 heads `[..., H]` as 8-bit floats `[..., H]` and scales `[...]` of `SCALE_DTYPE`.

    Each head gets its own scale, or with `fixed_scale` `[heads]` the scale of its place on the last
    axis but one. Fixed scales may be too small: numbers out of range become the type's largest.
    """
    if fixed_scale is None:
        scale = scale_of(jnp.max(jnp.abs(x), axis=-1), dtype)
        return (x * inverse_of(scale)[..., None]).astype(dtype), scale.astype(SCALE_DTYPE)
    scaled = clipped(x * (1 / fixed_scale.astype(jnp.float32))[:, None], dtype)
    return scaled.astype(dtype), jnp.broadcast_to(fixed_scale, x.shape[:-1])
