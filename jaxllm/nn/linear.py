"""Parameters, linear maps and the token embedding."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

type Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class Init:
    """Where new parameters get their random numbers and their dtype. Every parameter names its
    logical axes."""

    rngs: nnx.Rngs
    dtype: jax.typing.DTypeLike

    def normal(self, shape: tuple[int, ...], axes: Axes, std: float = 0.02) -> nnx.Param:
        value = jax.random.normal(self.rngs.params(), shape, jnp.float32) * std
        return nnx.Param(value.astype(self.dtype), axes=axes)

    def full(self, shape: tuple[int, ...], axes: Axes, value: float) -> nnx.Param:
        return nnx.Param(jnp.full(shape, value, self.dtype), axes=axes)


def contract(
    x: Array, weight: Array, dims: int, out_dtype: jax.typing.DTypeLike | None = None
) -> Array:
    """Contract the trailing `dims` axes of `x` with those of `weight`: [T, *in] × [*out, *in] → [T,
    *out].

    bfloat16 and float16 products accumulate in float32 on every back end. float32 asks for full
    precision, since some back ends would round the factors to TF32 or bfloat16 otherwise.
    """
    left = tuple(range(x.ndim - dims, x.ndim))
    right = tuple(range(weight.ndim - dims, weight.ndim))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x, weight, ((left, right), ((), ())), precision=precision, preferred_element_type=out_dtype
    )


class Linear(nnx.Module):
    """y[T, *out] = x[T, *inp] · weight[*out, *inp] + bias[*out]: the layout of checkpoints, so
    loading transposes nothing."""

    def __init__(
        self, init: Init, out: tuple[int, ...], inp: tuple[int, ...], axes: Axes, bias: bool = False
    ):
        self.weight = init.normal((*out, *inp), axes)
        self.bias = init.full(out, axes[: len(out)], 0.0) if bias else None
        self.dims = len(inp)

    def product(self, x: Array) -> Array:
        """x · weight, for callers that add the bias later."""
        return contract(x, self.weight[...], self.dims)

    def __call__(self, x: Array) -> Array:
        y = self.product(x)
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """Token table [V, D], also used as output head when tied. Split over the vocabulary when it
    divides over the shards."""

    def __init__(self, init: Init, vocab: int, width: int, shards: int):
        self.weight = init.normal((vocab, width), (vocab_axis(vocab, shards), "embed"))

    def __call__(self, token_T: Array) -> Array:
        return self.weight[...][token_T]


def vocab_axis(vocab: int, shards: int) -> str | None:
    """Logical axis of a vocabulary dimension: replicated when it does not divide."""
    return "vocab" if vocab % shards == 0 else None
