"""A weight whose columns are in the order of their groups, and inputs are put into it."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.rules import Rule
from jaxllm.nn.weight.protocol import Fill, Held, Shape
from pallas_kernels.gated_matmul import Gating
from pallas_kernels.parts import Product
from pallas_kernels.scaled_matmul import Inputs, Rounding


class Reordered(nnx.Module):
    """The weight `inner` of inputs `[T, columns]`, of which column i is input `order[0, i]`. See
    `weight.protocol.Weight`.

    Columns of a group may be those of several devices, so each device has all of them.
    """

    def __init__(self, inner: Held, shape: Shape):
        """`shape` is that of the map; it has one tensor of the checkpoint."""
        self.inner = inner
        self.order = nnx.Param(jnp.zeros((1, shape.columns), jnp.int32), axes=(None, None))
        self.shape = shape

    def rounding(self, tokens: int, context: RowContext) -> None:
        return None

    def product(self, x: Inputs, dims: int, context: RowContext) -> Array:
        return self.inner.product(self._ordered(x, context), 1, context)

    def part(self, x: Inputs, dims: int, context: RowContext) -> Product:
        return self.inner.part(self._ordered(x, context), 1, context)

    def gated(
        self, x_TD: Inputs, gating: Gating, context: RowContext, rounding: Rounding | None
    ) -> None:
        return None

    def _ordered(self, x: Inputs, context: RowContext) -> Array:
        assert isinstance(x, Array)  # no rounding is asked for
        order = self.order[...]
        x_TI = self.shape.flat(x, order.shape[1], context.collective)[:, order[0]]
        # XLA would fuse this with the product, for which its CPU back end has no bfloat16
        return lax.optimization_barrier(x_TI)

    def rules(self, path: str, fill: Fill) -> Iterator[Rule]:
        yield from self.inner.rules(f"{path}.inner", fill)
        yield Rule(f"{path}.order", fill.each("weight.order", self.order.shape[1]))
