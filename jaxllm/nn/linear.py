"""Parameters, linear maps and the token embedding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxllm.nn.rules import Piece, Rows, Rule

type Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class Init:
    """Makes parameters, each with the logical names of its axes.

    Attributes:
        rngs: source of random numbers.
        dtype: of the parameters.
    """

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
    """[T, *in] × [*out, *in] → [T, *out]: contract the last `dims` axes of both.

    bfloat16 and float16 products accumulate in float32 on every back end. float32 asks for full
    precision, since some back ends round its factors to TF32 or bfloat16 otherwise.
    """
    left = tuple(range(x.ndim - dims, x.ndim))
    right = tuple(range(weight.ndim - dims, weight.ndim))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x, weight, ((left, right), ((), ())), precision=precision, preferred_element_type=out_dtype
    )


class Linear(nnx.Module):
    """y[T, *out] = x[T, *inp] · weight[*out, *inp] + bias[*out].

    This is the layout of checkpoints, so loading transposes nothing. A map that fuses several
    checkpoint matrices says in `parts` which rows of its second output axis each of them fills.
    """

    def __init__(
        self,
        init: Init,
        out: tuple[int, ...],
        inp: tuple[int, ...],
        axes: Axes,
        bias: bool = False,
        *,
        parts: tuple[Rows, ...] = (),
    ):
        self.weight = init.normal((*out, *inp), axes)
        self.bias = init.full(out, axes[: len(out)], 0.0) if bias else None
        self.dims = len(inp)
        self.parts = parts

    def product(self, x: Array) -> Array:
        """x · weight, for callers that add the bias later."""
        return contract(x, self.weight[...], self.dims)

    def __call__(self, x: Array) -> Array:
        y = self.product(x)
        return y if self.bias is None else y + self.bias[...]

    def rules(self, *names: str) -> Iterator[Rule]:
        """The checkpoint tensors `{name}.weight` and `{name}.bias` fill the map, one name for each
        part in their order."""
        weight = self.weight.get_value().shape
        out, inp = weight[: -self.dims], weight[-self.dims :]
        yield Rule("weight", tuple(self._pieces("weight", names, out, inp)))
        if self.bias is not None:
            yield Rule("bias", tuple(self._pieces("bias", names, out, ())))

    def _pieces(
        self, leaf: str, names: tuple[str, ...], out: tuple[int, ...], inp: tuple[int, ...]
    ) -> Iterator[Piece]:
        """Checkpoints flatten output and input axes to one each; a bias has no input."""
        start = 0
        for name, rows in zip(names, self.parts or (None,), strict=True):
            filled = out if rows is None else (out[0] // rows.repeat, rows.count, *out[2:])
            source = (math.prod(filled), math.prod(inp)) if inp else (math.prod(filled),)
            repeat = 1 if rows is None else rows.repeat
            yield Piece(f"{name}.{leaf}", source, (*filled, *inp), start, repeat)
            start += 0 if rows is None else rows.count


class Stored(nnx.Module):
    """A module whose one parameter is a checkpoint tensor as it is stored."""

    weight: nnx.Param

    def rules(self, name: str) -> Iterator[Rule]:
        """The checkpoint tensor `{name}.weight` fills the weight."""
        shape = self.weight.get_value().shape
        yield Rule("weight", (Piece(f"{name}.weight", shape, shape),))


class Embedding(Stored):
    """Token table [V, D], also the output head of tied models.

    It is split over the vocabulary where that divides over the shards.
    """

    def __init__(self, init: Init, vocab: int, width: int, shards: int):
        self.weight = init.normal((vocab, width), (vocab_axis(vocab, shards), "embed"))

    def __call__(self, token_T: Array) -> Array:
        return self.weight[...][token_T]


def vocab_axis(vocab: int, shards: int) -> str | None:
    """Logical axis of a vocabulary dimension; None (replicated) where it does not divide."""
    return "vocab" if vocab % shards == 0 else None
