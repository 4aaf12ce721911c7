"""The weights of a linear map of each expert, in few bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.rules import Rule
from jaxllm.nn.weight.protocol import Fill, Shape
from jaxllm.nn.weight.schemes import held
from jaxllm.quantisation import WeightFormat
from pallas_kernels.grouped_matmul import Gating, Groups, by_tile


class HeldExperts(nnx.Module):
    """The parameters of the scheme of one expert, `stacked`, with the axis of experts before their
    own. See `weight.protocol.ExpertWeight`."""

    def __init__(self, weight_format: WeightFormat, shape: Shape):
        """`shape.out` is `(E, out)`."""
        experts, *out = shape.out
        axis, *axes = shape.axes
        self.stacked = held(weight_format, replace(shape, out=tuple(out), axes=tuple(axes)))
        for name, parameter in list(vars(self.stacked).items()):
            if isinstance(parameter, nnx.Param):
                empty = parameter.get_value()
                value = jnp.zeros((experts, *empty.shape), empty.dtype)
                setattr(self.stacked, name, nnx.Param(value, axes=(axis, *parameter.axes)))
        self.experts = experts

    def grouped(
        self,
        x_PI: Array,
        groups: Groups,
        context: RowContext,
        bias_EO: Array | None,
        gating: Gating | None,
    ) -> Array:
        y_PO = self.stacked.grouped(x_PI, groups, context, bias_EO, gating)
        if y_PO is not None:
            return y_PO
        graphdef, state = nnx.split(self.stacked)

        def product(x_RI: Array, expert: Array) -> Array:
            weight = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[expert], state))
            return weight.product(x_RI, 1, context.of_expert)

        return by_tile(product, x_PI, groups, bias_EO, gating)

    def rules(self, path: str, fill: Fill) -> Iterator[Rule]:
        for rule in self.stacked.rules(f"{path}.stacked", fill):
            if rule.rounded is not None:
                shape = (self.experts, *rule.rounded.shape)
                made = rule.rounded._replace(shape=shape, experts=True)
                rule = replace(rule, rounded=made)
            yield rule
