"""Plain numbers of the type that the model computes in."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.rules import Rule
from jaxllm.nn.weight.parameters import contract
from jaxllm.nn.weight.protocol import Fill
from pallas_kernels.grouped_matmul import Gating, Groups
from pallas_kernels.parts import Product, in_shares, takes_shares, whole
from pallas_kernels.scaled_matmul import Inputs, Rounding


class Dense(nnx.Param):
    """A weight that is one array; see `weight.protocol.Weight` and `HeadWeight`."""

    def rounding(self, tokens: int, context: RowContext) -> None:
        return None

    def product(self, x: Inputs, dims: int, context: RowContext) -> Array:
        assert isinstance(x, Array)  # no rounding is asked for
        product = context.product(x, self[...], dims)
        if product is None:
            return contract(x, self[...], dims)
        return whole(product)

    def sums(self, x_TD: Array, context: RowContext) -> Array:
        return contract(x_TD, self[...], 1, jnp.float32)

    def looked_up(self, token_T: Array, context: RowContext, vocab: int) -> Array:
        table = self[...]
        return context.collective.rows(table.__getitem__, token_T, len(table), vocab)

    def part(self, x: Inputs, dims: int, context: RowContext) -> Product:
        weight = self[...]
        assert isinstance(x, Array)
        product = context.product(x, weight, dims)
        if product is not None:
            return product
        if weight.ndim == 2 and takes_shares(context.target, x, weight.shape[0]):
            return in_shares(x, weight)
        return contract(x, weight, dims)

    def gated(
        self, x_TD: Inputs, gating: Gating, context: RowContext, rounding: Rounding | None
    ) -> Array | None:
        assert isinstance(x_TD, Array)
        return context.gated_product(x_TD, self[...], gating)

    def grouped(
        self,
        x_PI: Array,
        groups: Groups,
        context: RowContext,
        bias_EO: Array | None,
        gating: Gating | None,
    ) -> Array:
        return context.grouped_product(x_PI, self[...], groups, bias_EO, gating)

    def rules(self, path: str, fill: Fill) -> Iterator[Rule]:
        yield Rule(path, fill("weight"))
