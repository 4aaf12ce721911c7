"""What lies between the linear maps of a block, in plain JAX on one device: differentiable."""

from __future__ import annotations

from typing import Self

from jax import Array

from jaxllm.cache.collective import ALONE, Collective
from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import Experts, Gating, Groups
from pallas_kernels.parts import Product
from pallas_kernels.route import Rule, choose, route
from pallas_kernels.scaled_matmul import Inputs, Rounding
from pallas_kernels.target import PORTABLE


class PlainRows:
    """A `RowContext`; contexts of plain attention extend it."""

    target = PORTABLE
    collective: Collective = ALONE

    @property
    def alone(self) -> Self:
        return self

    @property
    def of_expert(self) -> Self:
        return self

    def add_norm(
        self,
        x_TD: Array,
        part_TD: Product,
        weight_D: Array,
        eps: float,
        rounding: Rounding | None = None,
    ) -> tuple[Array, Inputs]:
        """`x + part`, and its norm, rounded if that is asked for."""
        return self.collective.add_norm(x_TD, part_TD, weight_D, eps, self.target, rounding)

    def product(self, x: Array, weight: Array, dims: int) -> None:
        """None: XLA computes and differentiates the product."""
        return None

    def gated_product(self, x_TD: Array, weight_X2FD: Array, gating: Gating) -> Array | None:
        """None: XLA computes and differentiates the products."""
        return None

    def route(
        self, logit_TE: Array, correction_E: Array | None, rule: Rule
    ) -> tuple[Groups, Array]:
        """The rows of each expert, and the weights of each token's choices."""
        backend = choose(self.target, logit_TE, rule)
        return route(logit_TE, correction_E, rule, backend=backend)

    def grouped_product(
        self,
        x_PI: Array,
        weight_EOI: Array,
        groups: Groups,
        bias_EO: Array | None = None,
        gating: Gating | None = None,
    ) -> Array:
        """Each row times the weight of its expert, plus its bias, tile by tile."""
        backend = grouped_matmul.choose(self.target, x_PI, weight_EOI, groups, gating)
        return grouped_matmul.grouped_matmul(
            x_PI, weight_EOI, groups, bias_EO=bias_EO, gating=gating, backend=backend
        )

    def routed(self, x_PI: Array, experts: Experts, groups: Groups, gating: Gating) -> Array | None:
        """None: it is computed as two products."""
        return None
