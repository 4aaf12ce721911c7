"""The kernels of a step that work token by token."""

from __future__ import annotations

import jax
from jax import Array

from jaxllm.cache.collective import ALONE, Collective
from pallas_kernels import gated_matmul, grouped_matmul, matmul, route
from pallas_kernels.parts import Parts, Product, whole
from pallas_kernels.route import Rule
from pallas_kernels.scaled_matmul import Inputs, Rounding
from pallas_kernels.target import PORTABLE, Target


class RowKernels:
    """The kernels of a traced step that work token by token, chosen for `target`, on one of the
    devices of `collective`."""

    def __init__(self, target: Target = PORTABLE, collective: Collective = ALONE):
        self.target = target
        self.collective = collective

    @property
    def alone(self) -> RowKernels:
        """The same kernels for what is no part of a sum."""
        return self if self.collective is ALONE else self._over(ALONE)

    @property
    def of_expert(self) -> RowKernels:
        """The same kernels over the devices that share an expert."""
        return self._over(self.collective.of_expert)

    def _over(self, collective: Collective) -> RowKernels:
        return RowKernels(self.target, collective)

    def add_norm(
        self,
        x_TD: Array,
        part_TD: Product,
        weight_D: Array,
        eps: float,
        rounding: Rounding | None = None,
    ) -> tuple[Array, Inputs]:
        """`x` plus the sum of all devices' parts, and its norm, rounded if that is asked for."""
        return self.collective.add_norm(x_TD, part_TD, weight_D, eps, self.target, rounding)

    def product(self, x: Array, weight: Array, dims: int) -> Product | None:
        """x · wᵀ over the last `dims` axes, or None where no kernel of the target is known to be
        faster than XLA: with several devices none is, and shares of sums would cost them a launch
        more."""
        if self.collective is not ALONE:
            return None
        x_TI = x.reshape(x.shape[0], -1)
        out = weight.shape[: weight.ndim - dims]
        weight_OI = weight.reshape(-1, x_TI.shape[1])
        backend = matmul.find(self.target, x_TI, weight_OI)
        if backend is None:
            return None
        product = _matmul(x_TI, weight_OI, backend=backend)
        if isinstance(product, Parts):
            return product.shaped(*out)
        return whole(product).reshape(-1, *out)

    def gated_product(
        self, x_TD: Array, weight_X2FD: Array, gating: gated_matmul.Gating
    ) -> Array | None:
        """An MLP's gated product, or None where no kernel of the target is faster than XLA."""
        weight_OD = weight_X2FD.reshape(-1, weight_X2FD.shape[-1])
        backend = gated_matmul.find(self.target, x_TD, weight_OD, gating)
        if backend is None:
            return None
        return _gated_matmul(x_TD, weight_OD, gating=gating, backend=backend)

    def route(
        self, logit_TE: Array, correction_E: Array | None, rule: Rule
    ) -> tuple[grouped_matmul.Groups, Array]:
        """The rows of each of this device's experts, and the weights of each token's choices."""
        backend = route.choose(self.target, logit_TE, rule)
        groups, weight_TK = _route(logit_TE, correction_E, rule=rule, backend=backend)
        return self.collective.experts(groups, logit_TE.shape[1]), weight_TK

    def grouped_product(
        self,
        x_PI: Array,
        weight_EOI: Array,
        groups: grouped_matmul.Groups,
        bias_EO: Array | None = None,
        gating: grouped_matmul.Gating | None = None,
    ) -> Array:
        """Each row times the weight of its expert, plus its bias; with `gating`, of gate and up."""
        backend = grouped_matmul.choose(self.target, x_PI, weight_EOI, groups, gating)
        return _grouped_matmul(
            x_PI, weight_EOI, groups, bias_EO=bias_EO, gating=gating, backend=backend
        )

    def routed(
        self,
        x_PI: Array,
        experts: grouped_matmul.Experts,
        groups: grouped_matmul.Groups,
        gating: grouped_matmul.Gating,
    ) -> Array | None:
        """Each row's expert in one launch, or None where two products are as fast."""
        backend = grouped_matmul.find_one_launch(self.target, x_PI, experts, groups, gating)
        if backend is None:
            return None
        return _feed_forward(x_PI, experts, groups, gating=gating, backend=backend)


# Jitted, so that a kernel is lowered once, not for every layer.
_gated_matmul = jax.jit(gated_matmul.gated_matmul, static_argnames=("gating", "backend"))
_matmul = jax.jit(matmul.matmul_parts, static_argnames=("backend",))
_route = jax.jit(route.route, static_argnames=("rule", "backend"))
_feed_forward = jax.jit(grouped_matmul.feed_forward, static_argnames=("gating", "backend"))
_grouped_matmul = jax.jit(grouped_matmul.grouped_matmul, static_argnames=("gating", "backend"))
