"""Feed-forward of a mixture: a router sends each token to a few of many gated feed-forwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import jax
from flax import nnx
from jax import Array

from jaxllm.mesh import is_split
from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.linear import Linear
from jaxllm.nn.mixture.routers import Router
from jaxllm.nn.mlp import ACTIVATIONS, FeedForward
from jaxllm.nn.rules import Ordered, Part, Piece, Rule
from jaxllm.nn.weight.dense import Dense
from jaxllm.nn.weight.experts import HeldExperts
from jaxllm.nn.weight.parameters import Axes, Init
from jaxllm.nn.weight.protocol import ExpertWeight, Shape
from jaxllm.quantisation import WeightFormat
from pallas_kernels.gated_matmul import Gated
from pallas_kernels.grouped_matmul import Experts as Weights
from pallas_kernels.grouped_matmul import Gating, Groups, rows_for
from pallas_kernels.parts import Product, WeightedRows, whole


@dataclass(frozen=True)
class Split:
    """How experts lie on devices.

    Attributes:
        groups: of devices, each with experts of its own.
        shards: devices of a group, each with a share of the width of each expert.
    """

    groups: int = 1
    shards: int = 1

    def held(self, experts: int) -> int:
        """Experts with those that nobody chooses, which make groups even."""
        return -(-experts // self.groups) * self.groups


UP: Axes = ("expert", "expert_mlp", "embed")
DOWN: Axes = ("expert", "embed", "expert_mlp")


class ExpertMaps(nnx.Module):
    """One linear map of every expert; `parts` maps of the checkpoint lie below each other in it.

    `weight` is `[E, out, inp]`, `bias` `[E, out]`; E are the experts that `split` holds. Of several
    parts each shard has its own rows: those of the first part, then those of the next.

    Args:
        shape: of the checkpoint's experts.
        axes: `UP` or `DOWN`.
    """

    def __init__(
        self,
        init: Init,
        shape: tuple[int, int, int],
        axes: Axes,
        parts: int = 1,
        bias: bool = False,
        split: Split = Split(),
    ):
        self.held = (split.held(shape[0]), *shape[1:])
        self.weight: ExpertWeight = init.normal(self.held, axes, Dense)
        self.axes = axes
        self.shape = shape
        self.dtype = init.dtype
        if bias:
            self.bias = init.full(self.held[:2], axes[:2], 0.0)
        else:
            self.bias = None
        self.parts = parts
        self.split = split

    def hold(self, weight_format: WeightFormat) -> None:
        """Have empty weights of this format in place of plain numbers."""
        *out, inp = self.held
        parts = self.parts
        shards = self.split.shards
        shape = Shape(tuple(out), (inp,), self.axes, (), shards, parts, self.dtype)
        self.weight = HeldExperts(weight_format, shape)

    @property
    def blocks(self) -> Iterator[range]:
        """The rows of the parts, one after the other, in the order in which the map has them."""
        part = self.shape[1] // self.parts
        if self.parts > 1:
            block = part // self.split.shards
        else:
            block = part
        for first in range(0, part, block):
            for start in range(first, self.shape[1], part):
                yield range(start, start + block)

    def forms(self, *names: str) -> list[Tensors]:
        """The tensors of each form in which checkpoints may hold the weights.

        `names` are full names of checkpoint tensors: with {} for an expert's number those of the
        parts in their order, without it that of all experts' fused maps. Both forms may be given;
        then checkpoints may hold either.
        """
        single, fused = (
            [name for name in names if ("{}" in name) == numbered] for numbered in (True, False)
        )
        by_expert = [name.format(expert) for name in single for expert in range(self.shape[0])]
        if by_expert:
            several = [Tensors(self, tuple(by_expert), fused=False)]
        else:
            several = []
        return [*several, *(Tensors(self, (name,), fused=True) for name in fused)]

    def rules(self, *names: str) -> Iterator[Rule]:
        """The checkpoint tensors of `names`, see `forms`."""
        every = (self.weight.rules("weight", form) for form in self.forms(*names))
        for first, *others in zip(*every, strict=True):
            yield replace(first, others=tuple(rule.pieces for rule in others))

    def product(
        self, x_PI: Array, groups: Groups, context: RowContext, gating: Gating | None = None
    ) -> Array:
        """Each row of `groups` by its own expert; where its inputs are split, this device's part of
        a sum."""
        return self.weight.grouped(x_PI, groups, context, self.own_bias(context), gating)

    def own_bias(self, context: RowContext) -> Array | None:
        """The bias, where there is one; where inputs are split, this device's part of a sum."""
        if self.bias is None or not is_split(self.axes[2]):
            if self.bias is None:
                return None
            return self.bias[...]
        return context.collective.of_expert.once(self.bias[...])

    def pieces(self, name: str, leaf: str, columns: int | None) -> tuple[Piece, ...]:
        """The pieces of the tensor `name` with all experts; `columns` are its columns, where it has
        others than the weight."""
        view = (*self.shape[:2], self.shape[2] if columns is None else columns)
        blocks = [*self.blocks]
        if len(blocks) > self.parts:
            order = tuple(row for block in blocks for row in block)
        else:
            order = ()
        steps = (Ordered(view, 1, order),) if order else ()
        return (Piece(leaf_of(name, leaf), view, view, steps=steps),)


@dataclass(frozen=True)
class Tensors:
    """The checkpoint tensors of a map of all experts in one of its forms, see
    `weight.protocol.Fill`: `fused`, one for all experts, else one for each part of each."""

    maps: ExpertMaps
    names: tuple[str, ...]
    fused: bool

    def __call__(self, leaf: str, columns: int | None = None) -> tuple[Piece, ...]:
        experts, out, inp = self.maps.shape
        if self.fused:
            return self.maps.pieces(self.names[0], leaf, columns)
        part = out // self.maps.parts
        if columns is not None:
            inp = columns
        return tuple(
            Piece(
                leaf_of(self.names[block.start // part * experts + expert], leaf),
                (part, inp),
                (1, len(block), inp),
                start=index * len(block),
                row=expert,
                steps=_rows(block, part, inp),
            )
            for index, block in enumerate(self.maps.blocks)
            for expert in range(experts)
        )

    def each(self, leaf: str, columns: int = 1) -> tuple[Piece, ...]:
        experts = self.maps.shape[0]
        source = (1, columns)
        view = (1, 1, columns)
        return tuple(
            Piece(leaf_of(name, leaf), source, view, index // experts, row=index % experts)
            for index, name in enumerate(self.names)
        )


def _rows(block: range, part: int, inp: int) -> tuple[Part, ...]:
    """Takes the rows of a block from the tensor of its part."""
    start = block.start % part
    if len(block) == part:
        return ()
    return (Part((part, inp), 0, start, start + len(block)),)


def leaf_of(name: str, leaf: str) -> str:
    """The name of a leaf `weight` or `weight.X` of a tensor whose own name may end with it."""
    return name + leaf.removeprefix("weight")


class Experts(nnx.Module):
    """down(gating(gate(x), up(x))) of each expert. `gate_up` holds the gate's rows, then up's."""

    def __init__(self, gate_up: ExpertMaps, down: ExpertMaps, gating: Gating):
        self.gate_up = gate_up
        self.down = down
        self.gating = gating

    @classmethod
    def plain(
        cls,
        init: Init,
        experts: int,
        width: int,
        inner: int,
        activation: str,
        split: Split = Split(),
        maps: type[ExpertMaps] = ExpertMaps,
    ) -> Self:
        """Experts without biases, gated by an activation; `maps` is the class of their maps."""
        return cls(
            maps(init, (experts, 2 * inner, width), UP, parts=2, split=split),
            maps(init, (experts, width, inner), DOWN, split=split),
            Gated(ACTIVATIONS[activation]),
        )

    def __call__(
        self, x_TD: Array, groups: Groups, weight_TK: Array, context: RowContext
    ) -> WeightedRows:
        """The rows of each token's experts, yet to be added up."""
        out_PD = self._at_once(x_TD, groups, context)
        if out_PD is None:
            hidden_PF = self.gate_up.product(x_TD, groups, context, self.gating)
            out_PD = self.down.product(hidden_PF, groups, context)
        return rows_for(out_PD, groups, weight_TK)

    def _at_once(self, x_TD: Array, groups: Groups, context: RowContext) -> Array | None:
        """The rows, or None where a kernel of both products takes no such weights or is slower."""
        maps = self.gate_up, self.down
        plain = [
            expert_map.weight[...] for expert_map in maps if isinstance(expert_map.weight, Dense)
        ]
        if len(plain) < len(maps):
            return None
        weights = Weights(*plain, *(expert_map.own_bias(context) for expert_map in maps))
        return context.routed(x_TD, weights, groups, self.gating)


class SharedExpert(nnx.Module):
    """A feed-forward that computes every token, times sigmoid(gate(x))."""

    def __init__(self, init: Init, mlp: FeedForward, width: int):
        self.mlp = mlp
        self.gate = Linear(init, (1,), (width,), (None, "embed"))

    def __call__(self, x_TD: Array, context: RowContext) -> Array:
        return jax.nn.sigmoid(self.gate(x_TD, context)) * whole(self.mlp(x_TD, context))


class MixtureMLP(nnx.Module):
    """Routed experts, and beside them a `shared` feed-forward where there is one."""

    def __init__(self, router: Router, experts: Experts, shared: FeedForward | None = None):
        self.router = router
        self.experts = experts
        self.shared = shared

    def __call__(self, x_TD: Array, context: RowContext) -> Product:
        routed = self.experts(x_TD, *self.router(x_TD, context), context)
        if self.shared is None:
            return routed
        return routed.whole + whole(self.shared(x_TD, context))


class AveragedMLP(MixtureMLP):
    """Half of the sum of routed experts and the `shared` feed-forward."""

    def __call__(self, x_TD: Array, context: RowContext) -> Product:
        return whole(super().__call__(x_TD, context)) / 2
