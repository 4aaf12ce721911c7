"""Parameters, linear maps and the token embedding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxllm.nn.rules import Layout, Ordered, Part, Piece, Rows, Rule, Step, Transposed

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

    A map that fuses several checkpoint matrices says in `parts` which rows of its second output
    axis each of them fills. `order` has the checkpoint's number of each entry along the last input
    axis, -1 for zeros; () keeps them. `layout` is that of the checkpoint.
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
        order: tuple[int, ...] = (),
    ):
        self.weight = init.normal((*out, *inp), axes)
        self.bias = init.full(out, axes[: len(out)], 0.0) if bias else None
        self.dims = len(inp)
        self.parts = parts
        self.order = order
        self.layout = Layout.OUT_IN

    def product(self, x: Array) -> Array:
        """x · weight, for callers that add the bias later."""
        return contract(x, self.weight[...], self.dims)

    def __call__(self, x: Array) -> Array:
        y = self.product(x)
        return y if self.bias is None else y + self.bias[...]

    def rules(self, *names: str) -> Iterator[Rule]:
        """The checkpoint tensors `{name}.weight` and `{name}.bias` fill the map: one name for each
        part in their order, or one for a tensor that holds all of them."""
        weight = self.weight.get_value().shape
        out, inp = weight[: -self.dims], weight[-self.dims :]
        yield Rule("weight", tuple(self._pieces("weight", names, out, inp)))
        if self.bias is not None:
            yield Rule("bias", tuple(self._pieces("bias", names, out, ())))

    def _pieces(
        self, leaf: str, names: tuple[str, ...], out: tuple[int, ...], inp: tuple[int, ...]
    ) -> Iterator[Piece]:
        """Checkpoints flatten output and input axes to one each; a bias has no input."""
        parts = self.parts or (None,)
        filled = [
            out if rows is None else (out[0] // rows.repeat, rows.count, *out[2:]) for rows in parts
        ]
        kept = [
            shape if rows is None else _stored(shape, 2, rows.order)
            for shape, rows in zip(filled, parts, strict=True)
        ]
        sizes, given = [math.prod(shape) for shape in kept], _stored(inp, -1, self.order)
        columns = (math.prod(given),) if inp else ()
        fused = len(names) == 1 < len(parts)
        turned = self.layout is Layout.IN_OUT and bool(inp)
        start = 0
        for index, (name, rows) in enumerate(
            zip(names * len(parts) if fused else names, parts, strict=True)
        ):
            stored = (sum(sizes) if fused else sizes[index], *columns)
            steps: tuple[Step, ...] = (Transposed(),) if turned else ()
            if fused:
                steps += (self._part(sizes, index, columns, kept[-1][-1]),)
            view = (*filled[index], *inp)
            if rows is not None and rows.order:
                steps += (Ordered((*kept[index], *given), 2, rows.order),)
            if inp and self.order:
                steps += (Ordered((*filled[index], *given), len(view) - 1, self.order),)
            repeat = 1 if rows is None else rows.repeat
            source = stored[::-1] if turned else stored
            yield Piece(f"{name}.{leaf}", source, view, start, repeat, steps=steps)
            start += 0 if rows is None else rows.count

    def _part(self, sizes: list[int], index: int, columns: tuple[int, ...], head: int) -> Part:
        """Where part `index` lies in a tensor that holds all of them, of `sizes` rows each and
        `head` rows a head."""
        groups = sizes[-1] // head if self.layout is Layout.GROUPED else 1
        own = [size // groups for size in sizes]
        start = sum(own[:index])
        return Part((groups, sum(own), *columns), 1, start, start + own[index])


def _stored(shape: tuple[int, ...], axis: int, order: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a checkpoint has for `shape`: without the zeros that `order` adds."""
    if not order or not shape:
        return shape
    sizes = list(shape)
    sizes[axis] = sum(entry >= 0 for entry in order)
    return tuple(sizes)


class Stored(nnx.Module):
    """A module whose one parameter is a checkpoint tensor as it is stored."""

    weight: nnx.Param

    def rules(self, name: str) -> Iterator[Rule]:
        """The checkpoint tensor `{name}.weight` fills the weight."""
        shape = self.weight.get_value().shape
        yield Rule("weight", (Piece(f"{name}.weight", shape, shape),))
