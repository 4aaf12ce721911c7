"""Makes parameters, and contracts them with activations."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

type Axes = tuple[str | None, ...]

STD = 0.02  # of fresh weights


@dataclass(frozen=True)
class Init:
    """Makes parameters, each with the logical names of its axes.

    Attributes:
        rngs: source of random numbers.
        dtype: of the parameters.
    """

    rngs: nnx.Rngs
    dtype: jax.typing.DTypeLike

    def normal(
        self, shape: tuple[int, ...], axes: Axes, parameter_class: type[nnx.Param] = nnx.Param
    ) -> nnx.Param:
        value = jax.random.normal(self.rngs.params(), shape, jnp.float32) * STD
        return parameter_class(value.astype(self.dtype), axes=axes)

    def full(self, shape: tuple[int, ...], axes: Axes, value: float) -> nnx.Param:
        return nnx.Param(jnp.full(shape, value, self.dtype), axes=axes)


def contract(
    x: Array, weight: Array, dims: int, out_dtype: jax.typing.DTypeLike | None = None
) -> Array:
    """[T, *in] × [*out, *in] → [T, *out]: contract the last `dims` axes of both.

    bfloat16 and float16 products accumulate in float32 on every back end. float32 asks for full
    precision, since some back ends round its factors to TF32 or bfloat16 otherwise.
    """
    left = tuple(range(x.ndim - dims, x.ndim))
    right = tuple(range(weight.ndim - dims, weight.ndim))
    precision = None
    if x.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST
    return lax.dot_general(
        x, weight, ((left, right), ((), ())), precision=precision, preferred_element_type=out_dtype
    )
