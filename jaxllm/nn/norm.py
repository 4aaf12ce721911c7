"""Norms, each with its weights. All are computed in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.linear import Init, Stored
from jaxllm.nn.rules import Ordered, Piece, Plus, Rule
from pallas_kernels.add_norm import rms_norm
from pallas_kernels.parts import NormedRows, Product
from pallas_kernels.scaled_matmul import Inputs, Rounding


class Norm(Protocol):
    """A norm over the last axis."""

    eps: float

    def __call__(self, x: Array) -> Array: ...

    def add(
        self,
        x_TD: Array,
        part_TD: Product,
        context: RowContext,
        rounding: Rounding | None = None,
    ) -> tuple[Array, Inputs]:
        """`x` plus the sum of all devices' parts, rounded, and its norm, plain or as `rounding`
        has it."""


class NoNorm(nnx.Module):
    """In the place of a norm that a model leaves out."""

    eps = 0.0

    def __call__(self, x: Array) -> Array:
        return x

    def add(
        self,
        x_TD: Array,
        part_TD: Product,
        context: RowContext,
        rounding: Rounding | None = None,
    ) -> tuple[Array, Inputs]:
        x_TD = x_TD + context.collective.sum(part_TD)
        return x_TD, x_TD


class RMSNorm(Stored):
    """x / rms(x) · weight over the last axis.

    `axis` is the logical name of that axis. `order` has the checkpoint's number of each of its
    entries, -1 for zero; () keeps them.
    """

    def __init__(
        self,
        init: Init,
        width: int,
        eps: float,
        axis: str = "embed",
        order: tuple[int, ...] = (),
    ):
        self.weight = init.full((width,), (axis,), 1.0)
        self.eps = eps
        self.order = order

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.weight[...], self.eps)

    def add(
        self,
        x_TD: Array,
        part_TD: Product,
        context: RowContext,
        rounding: Rounding | None = None,
    ) -> tuple[Array, Inputs]:
        return context.add_norm(x_TD, part_TD, self.weight[...], self.eps, rounding)

    def later(self, y_TD: Array) -> NormedRows:
        """The norm, for whatever adds it to the residual stream."""
        return NormedRows(y_TD, self.weight[...], self.eps)

    def rules(self, name: str) -> Iterator[Rule]:
        (rule,) = super().rules(name)
        (piece,) = rule.pieces
        if self.order:
            source = (sum(entry >= 0 for entry in self.order),)
            piece = replace(piece, source=source, steps=(Ordered(source, 0, self.order),))
        yield replace(rule, pieces=(piece,))


class OffsetRMSNorm(RMSNorm):
    """x / rms(x) · (1 + stored weight), as Gemma defines it. The sum is kept in float32."""

    def __init__(
        self,
        init: Init,
        width: int,
        eps: float,
        axis: str = "embed",
        order: tuple[int, ...] = (),
    ):
        super().__init__(replace(init, dtype=jnp.float32), width, eps, axis, order)

    def rules(self, name: str) -> Iterator[Rule]:
        (rule,) = super().rules(name)
        yield replace(
            rule, pieces=tuple(replace(p, steps=(*p.steps, Plus(1.0))) for p in rule.pieces)
        )


class LayerNorm(Stored):
    """(x - mean(x)) / deviation(x) · weight + bias over the last axis; the bias may be left out."""

    def __init__(self, init: Init, width: int, eps: float, bias: bool = True):
        self.weight = init.full((width,), ("embed",), 1.0)
        if bias:
            self.bias = init.full((width,), ("embed",), 0.0)
        else:
            self.bias = None
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        y = _standard(x, self.eps) * self.weight[...].astype(jnp.float32)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)

    def add(
        self,
        x_TD: Array,
        part_TD: Product,
        context: RowContext,
        rounding: Rounding | None = None,
    ) -> tuple[Array, Inputs]:
        x_TD = x_TD + context.collective.sum(part_TD)
        return x_TD, self(x_TD)

    def rules(self, name: str) -> Iterator[Rule]:
        yield from super().rules(name)
        if self.bias is not None:
            shape = self.bias.get_value().shape
            yield Rule("bias", (Piece(f"{name}.bias", shape, shape),))


class BareLayerNorm(nnx.Module):
    """A layer norm without weights."""

    def __init__(self, init: Init, width: int, eps: float):
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return _standard(x, self.eps).astype(x.dtype)

    def add(
        self,
        x_TD: Array,
        part_TD: Product,
        context: RowContext,
        rounding: Rounding | None = None,
    ) -> tuple[Array, Inputs]:
        x_TD = x_TD + context.collective.sum(part_TD)
        return x_TD, self(x_TD)


def _standard(x: Array, eps: float) -> Array:
    """(x - mean(x)) / deviation(x) over the last axis, in float32."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
