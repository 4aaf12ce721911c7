"""Feed-forward of a mixture: a router sends each token to a few of many gated feed-forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
from flax import nnx
from jax import Array

from jaxllm.nn.context import RowContext
from jaxllm.nn.linear import Axes, Init, Linear
from jaxllm.nn.mlp import ACTIVATIONS, FeedForward
from jaxllm.nn.routers import Router
from jaxllm.nn.rules import Piece, Rule
from pallas_kernels.grouped_matmul import Groups, combine, group_tokens, tile_for


@dataclass(frozen=True)
class Gated:
    """activation(gate) · up."""

    activation: Callable[[Array], Array]

    def __call__(self, gate: Array, up: Array) -> Array:
        return self.activation(gate) * up


class ExpertMaps(nnx.Module):
    """One linear map of every expert; `parts` maps of the checkpoint lie below each other in it.

    `weight` is `[E, out, inp]`.
    """

    def __init__(self, init: Init, shape: tuple[int, int, int], axes: Axes, parts: int = 1):
        self.weight = init.normal(shape, axes)
        self.parts = parts

    def rules(self, *names: str) -> Iterator[Rule]:
        """`names` are full names of checkpoint tensors: with {} for an expert's number those of the
        parts in their order, without it that of all experts' fused maps. Both forms may be given;
        then checkpoints may hold either."""
        single, fused = (
            [name for name in names if ("{}" in name) == numbered] for numbered in (True, False)
        )
        shape = self.weight.get_value().shape
        forms: list[tuple[Piece, ...]] = [(Piece(name, shape, shape),) for name in fused]
        if single:
            forms.insert(0, tuple(self._pieces(single)))
        first, *others = forms
        yield Rule("weight", first, tuple(others))

    def _pieces(self, names: list[str]) -> Iterator[Piece]:
        experts, out, inp = self.weight.get_value().shape
        own = out // self.parts
        for part, name in zip(range(self.parts), names, strict=True):
            for expert in range(experts):
                yield Piece(
                    name.format(expert), (own, inp), (1, own, inp), start=part * own, row=expert
                )


class Experts(nnx.Module):
    """down(activation(gate(x)) · up(x)) of each expert. `gate_up` holds the gate's rows, then
    up's."""

    def __init__(self, init: Init, experts: int, width: int, inner: int, activation: str):
        axes = ("expert", None, "embed")
        self.gate_up = ExpertMaps(init, (experts, 2 * inner, width), axes, parts=2)
        self.down = ExpertMaps(init, (experts, width, inner), ("expert", "embed", None))
        self.gating = Gated(ACTIVATIONS[activation])

    def __call__(
        self, x_TD: Array, expert_TK: Array, weight_TK: Array, context: RowContext
    ) -> Array:
        """Each token's experts, added up with their weights, `[T, D]`."""
        gate_up_EOD = self.gate_up.weight[...]
        groups: Groups = _group(expert_TK, gate_up_EOD.shape[0])
        hidden_PF = context.grouped_product(x_TD[groups.token_P], gate_up_EOD, groups, self.gating)
        out_PD = context.grouped_product(hidden_PF, self.down.weight[...], groups, None)
        return combine(out_PD, groups, weight_TK)


class SharedExpert(nnx.Module):
    """A feed-forward that computes every token, times sigmoid(gate(x))."""

    def __init__(self, init: Init, mlp: FeedForward, width: int):
        self.mlp = mlp
        self.gate = Linear(init, (1,), (width,), (None, "embed"))

    def __call__(self, x_TD: Array, context: RowContext) -> Array:
        return jax.nn.sigmoid(self.gate(x_TD)) * self.mlp(x_TD, context)


class MixtureMLP(nnx.Module):
    """Routed experts, and beside them a `shared` feed-forward where there is one."""

    def __init__(self, router: Router, experts: Experts, shared: FeedForward | None = None):
        self.router = router
        self.experts = experts
        self.shared = shared

    def __call__(self, x_TD: Array, context: RowContext) -> Array:
        routed_TD = self.experts(x_TD, *self.router(x_TD), context)
        return routed_TD if self.shared is None else routed_TD + self.shared(x_TD, context)


def _group(expert_TK: Array, experts: int) -> Groups:
    tokens, choices = expert_TK.shape
    return group_tokens(expert_TK, experts, tile_for(tokens, choices, experts))
