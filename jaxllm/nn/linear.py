"""Linear maps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flax import nnx
from jax import Array

from jaxllm.mesh import is_split
from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.rules import Layout, Ordered, Part, Piece, Rows, Rule, Step, Transposed
from jaxllm.nn.weight.apart import Apart
from jaxllm.nn.weight.dense import Dense
from jaxllm.nn.weight.parameters import Axes, Init
from jaxllm.nn.weight.protocol import HeadWeight, Shape, Weight
from jaxllm.nn.weight.schemes import held
from jaxllm.nn.weight.table import held_head
from jaxllm.quantisation import WeightFormat
from pallas_kernels.gated_matmul import Gating
from pallas_kernels.parts import Product
from pallas_kernels.scaled_matmul import Inputs, Rounding


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
        self.weight: Weight = init.normal((*out, *inp), axes, Dense)
        self.axes = axes
        if bias:
            self.bias = init.full(out, axes[: len(out)], 0.0)
        else:
            self.bias = None
        self.out = out
        self.inp = inp
        self.dtype = init.dtype
        self.parts = parts
        self.order = order
        self.layout = Layout.OUT_IN

    def hold(self, kinds: Sequence[WeightFormat | None], shards: int) -> None:
        """Have an empty weight, over `shards` tensor shards, in place of plain numbers: of the
        `kinds` of the checkpoint's tensors that fill it, None for plain ones, or of the one that
        all have."""
        shape = Shape(self.out, self.inp, self.axes, self.order, shards, len(kinds), self.dtype)
        first, *others = set(kinds)
        reordered = first is not None and not first.ordered and len(kinds) > 1
        if others or reordered:  # each part has an order of its own
            self.weight = Apart(kinds, [rows.count for rows in self.parts], shape)
        elif first is not None:
            self.weight = held(first, shape)

    def rounding(self, tokens: int, context: RowContext) -> Rounding | None:
        """The rounding of inputs that the map takes in place of `tokens` plain ones, from a norm
        that can make it; None where it takes plain ones alone."""
        return self.weight.rounding(tokens, context)

    def product(self, x: Inputs, context: RowContext) -> Array:
        """x · weight, for callers that add the bias later."""
        return self.weight.product(x, len(self.inp), context)

    def gated(
        self, x: Inputs, gating: Gating, context: RowContext, reader: Linear
    ) -> Inputs | None:
        """gating(gate(x), up(x)), as its `reader` may have it; None where the product and XLA's
        activation are as fast, or need a bias."""
        if self.bias is not None:
            return None
        return self.weight.gated(x, gating, context, reader.rounding(x.shape[0], context))

    def __call__(self, x: Inputs, context: RowContext) -> Array:
        """The map; where its inputs are split, this device's part of a sum."""
        y = self.product(x, context)
        if self.bias is None:
            return y
        bias = self.bias[...]
        if any(map(is_split, self.axes[len(self.out) :])):
            bias = context.collective.once(bias)
        return y + bias

    def part(self, x: Inputs, context: RowContext) -> Product:
        """The map for a norm that adds it to something, and so adds up what is in parts."""
        if self.bias is None:
            return self.product_part(x, context)
        return self(x, context)

    def product_part(self, x: Inputs, context: RowContext) -> Product:
        """x · weight for callers that add the bias later, and add up what is in parts."""
        return self.weight.part(x, len(self.inp), context)

    def rules(self, *names: str) -> Iterator[Rule]:
        """The checkpoint tensors `{name}.weight` and `{name}.bias` fill the map: one name for each
        part in their order, or one for a tensor that holds all of them."""
        yield from self.weight.rules("weight", Tensors(self, names))
        if self.bias is not None:
            yield Rule("bias", tuple(self.pieces("bias", names, (), ())))

    def pieces(
        self, leaf: str, names: tuple[str, ...], inp: tuple[int, ...], order: tuple[int, ...]
    ) -> Iterator[Piece]:
        """The checkpoint tensors of these names that fill the parameter `leaf`. Checkpoints flatten
        output and input axes to one each; a bias has no input. `order` is that of the last input
        axis."""
        out = self.out
        parts = self.parts or (None,)
        filled = [
            out if rows is None else (out[0] // rows.repeat, rows.count, *out[2:]) for rows in parts
        ]
        kept = [
            shape if rows is None else _stored(shape, 2, rows.order)
            for shape, rows in zip(filled, parts, strict=True)
        ]
        sizes = [math.prod(shape) for shape in kept]
        input_sizes = _stored(inp, -1, order)
        columns = (math.prod(input_sizes),) if inp else ()
        fused = len(names) == 1 < len(parts)
        turned = self.layout is Layout.IN_OUT and bool(inp)
        turned_plain = self.layout is Layout.OUT_IN_PACKED and bool(inp)
        start = 0
        if fused:
            names = names * len(parts)
        for index, (name, rows) in enumerate(zip(names, parts, strict=True)):
            stored = (sizes[index], *columns)
            steps: tuple[Step, ...] = (Transposed(),) if turned else ()
            if fused:
                stored = (sum(sizes), *columns)
                steps += (self._part(sizes, index, columns, kept[-1][-1]),)
            view = (*filled[index], *inp)
            if rows is not None and rows.order:
                steps += (Ordered((*kept[index], *input_sizes), 2, rows.order),)
            if order:
                steps += (Ordered((*filled[index], *input_sizes), len(view) - 1, order),)
            repeat = 1
            count = 0
            if rows is not None:
                repeat = rows.repeat
                count = rows.count
            if turned:
                source = stored[::-1]
            else:
                source = stored
            yield Piece(
                f"{name}.{leaf}",
                source,
                view,
                start,
                repeat,
                steps=steps,
                turned_plain=turned_plain,
            )
            start += count

    def _part(self, sizes: list[int], index: int, columns: tuple[int, ...], head: int) -> Part:
        """Where part `index` lies in a tensor that holds all of them, of `sizes` rows each and
        `head` rows a head."""
        groups = {Layout.GROUPED: sizes[-1] // head, Layout.FOUR_BLOCKS: 4}.get(self.layout, 1)
        block_sizes = [size // groups for size in sizes]
        order = [*range(len(sizes))]
        if self.layout is Layout.FOUR_BLOCKS:
            order[1:] = 2, 1
        start = sum(block_sizes[before] for before in order[: order.index(index)])
        return Part((groups, sum(block_sizes), *columns), 1, start, start + block_sizes[index])


class OutputHead(Linear):
    """A linear map from hidden states to logits, whose rows are those of the vocabulary."""

    weight: HeadWeight

    def __init__(self, init: Init, vocab: int, width: int, axis: str | None, bias: bool = False):
        super().__init__(init, (vocab,), (width,), (axis, "embed"), bias)

    def hold(self, kinds: Sequence[WeightFormat | None], shards: int) -> None:
        (weight_format,) = kinds
        if weight_format is not None:
            shape = Shape(self.out, self.inp, self.axes, shards=shards, dtype=self.dtype)
            self.weight = held_head(weight_format, shape)


def reader_of(part: object) -> Linear | None:
    """The one map that reads the input of an attention or a feed-forward, and nothing else does;
    None where there is no such map."""
    return getattr(part, "reader", None)


@dataclass(frozen=True)
class Tensors:
    """The checkpoint tensors of a linear map, see `weight.protocol.Fill`."""

    linear: Linear
    names: tuple[str, ...]

    def __call__(self, leaf: str, columns: int | None = None) -> tuple[Piece, ...]:
        linear = self.linear
        if columns is None:
            return tuple(linear.pieces(leaf, self.names, linear.inp, linear.order))
        return tuple(linear.pieces(leaf, self.names, (columns,), ()))

    def each(self, leaf: str, columns: int = 1) -> tuple[Piece, ...]:
        names = (f"{name}.{leaf}" for name in self.names)
        shape = (1, columns)
        return tuple(Piece(name, shape, shape, row=row) for row, name in enumerate(names))


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
