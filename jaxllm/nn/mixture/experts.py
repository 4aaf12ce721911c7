"""Feed-forward of a mixture: a router sends each token to a few of many gated feed-forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import jax
from flax import nnx
from jax import Array

from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.linear import Linear
from jaxllm.nn.mixture.routers import Router
from jaxllm.nn.mlp import ACTIVATIONS, FeedForward
from jaxllm.nn.rules import Piece, Rule
from jaxllm.nn.weight.dense import Dense
from jaxllm.nn.weight.parameters import Axes, Init
from jaxllm.nn.weight.protocol import ExpertWeight
from pallas_kernels.grouped_matmul import Gating, Groups, combine


@dataclass(frozen=True)
class Gated:
    """activation(gate) · up."""

    activation: Callable[[Array], Array]

    def __call__(self, gate: Array, up: Array) -> Array:
        return self.activation(gate) * up


class ExpertMaps(nnx.Module):
    """One linear map of every expert; `parts` maps of the checkpoint lie below each other in it.

    `weight` is `[E, out, inp]`, `bias` `[E, out]`.
    """

    def __init__(
        self,
        init: Init,
        shape: tuple[int, int, int],
        axes: Axes,
        parts: int = 1,
        bias: bool = False,
    ):
        self.weight: ExpertWeight = init.normal(shape, axes, Dense)
        self.shape = shape
        self.bias = init.full(shape[:2], axes[:2], 0.0) if bias else None
        self.parts = parts

    def rules(self, *names: str) -> Iterator[Rule]:
        """`names` are full names of checkpoint tensors: with {} for an expert's number those of the
        parts in their order, without it that of all experts' fused maps. Both forms may be given;
        then checkpoints may hold either."""
        single, fused = (
            [name for name in names if ("{}" in name) == numbered] for numbered in (True, False)
        )
        forms: list[tuple[Piece, ...]] = [(Piece(name, self.shape, self.shape),) for name in fused]
        if single:
            forms.insert(0, tuple(self._pieces(single)))
        first, *others = forms
        yield Rule("weight", first, tuple(others))

    def product(
        self, x_PI: Array, groups: Groups, context: RowContext, gating: Gating | None = None
    ) -> Array:
        """Each row of `groups` by its own expert."""
        bias = None if self.bias is None else self.bias[...]
        return self.weight.grouped(x_PI, groups, context, bias, gating)

    def _pieces(self, names: list[str]) -> Iterator[Piece]:
        experts, out, inp = self.shape
        own = out // self.parts
        for part, name in zip(range(self.parts), names, strict=True):
            for expert in range(experts):
                yield Piece(
                    name.format(expert), (own, inp), (1, own, inp), start=part * own, row=expert
                )


class Experts(nnx.Module):
    """down(gating(gate(x), up(x))) of each expert. `gate_up` holds the gate's rows, then up's."""

    def __init__(self, gate_up: ExpertMaps, down: ExpertMaps, gating: Gating):
        self.gate_up = gate_up
        self.down = down
        self.gating = gating

    @classmethod
    def plain(cls, init: Init, experts: int, width: int, inner: int, activation: str) -> Self:
        """Experts without biases, gated by an activation."""
        axes = ("expert", None, "embed")
        return cls(
            ExpertMaps(init, (experts, 2 * inner, width), axes, parts=2),
            ExpertMaps(init, (experts, width, inner), ("expert", "embed", None)),
            Gated(ACTIVATIONS[activation]),
        )

    def __call__(self, x_TD: Array, groups: Groups, weight_TK: Array, context: RowContext) -> Array:
        """Each token's experts, added up with their weights, `[T, D]`."""
        hidden_PF = self.gate_up.product(x_TD, groups, context, self.gating)
        out_PD = self.down.product(hidden_PF, groups, context)
        return combine(out_PD, groups, weight_TK)


class SharedExpert(nnx.Module):
    """A feed-forward that computes every token, times sigmoid(gate(x))."""

    def __init__(self, init: Init, mlp: FeedForward, width: int):
        self.mlp = mlp
        self.gate = Linear(init, (1,), (width,), (None, "embed"))

    def __call__(self, x_TD: Array, context: RowContext) -> Array:
        return jax.nn.sigmoid(self.gate(x_TD, context)) * self.mlp(x_TD, context)


class MixtureMLP(nnx.Module):
    """Routed experts, and beside them a `shared` feed-forward where there is one."""

    def __init__(self, router: Router, experts: Experts, shared: FeedForward | None = None):
        self.router = router
        self.experts = experts
        self.shared = shared

    def __call__(self, x_TD: Array, context: RowContext) -> Array:
        routed_TD = self.experts(x_TD, *self.router(x_TD, context), context)
        return routed_TD if self.shared is None else routed_TD + self.shared(x_TD, context)
