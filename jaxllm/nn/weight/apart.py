"""A weight whose parts are held in unlike formats, each as if it were a map of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.rules import Piece, Rule
from jaxllm.nn.weight.dense import Dense
from jaxllm.nn.weight.protocol import Fill, Shape, Weight
from jaxllm.nn.weight.schemes import held
from jaxllm.quantisation import WeightFormat
from pallas_kernels.gated_matmul import Gating
from pallas_kernels.parts import Product
from pallas_kernels.scaled_matmul import Inputs, Rounding

PART = 1  # the output axis along which parts follow each other


class Apart(nnx.Module):
    """The weights of parts `[X, rows, …, *inp]`, which follow each other along the second output
    axis. See `weight.protocol.Weight`."""

    def __init__(self, kinds: Sequence[WeightFormat | None], rows: Sequence[int], shape: Shape):
        """`kinds` of the parts, None for plain numbers, and the `rows` that each has."""
        self.parts: nnx.List[Weight] = nnx.List(
            _one(
                weight_format, replace(shape, out=(shape.out[0], count, *shape.out[2:]), tensors=1)
            )
            for weight_format, count in zip(kinds, rows, strict=True)
        )

    def rounding(self, tokens: int, context: RowContext) -> None:
        return None

    def product(self, x: Inputs, dims: int, context: RowContext) -> Array:
        products = [part.product(x, dims, context) for part in self.parts]
        return jnp.concatenate(products, axis=1 + PART)

    def part(self, x: Inputs, dims: int, context: RowContext) -> Product:
        return self.product(x, dims, context)

    def gated(
        self, x_TD: Inputs, gating: Gating, context: RowContext, rounding: Rounding | None
    ) -> None:
        return None

    def rules(self, path: str, fill: Fill) -> Iterator[Rule]:
        for index, part in enumerate(self.parts):
            yield from part.rules(f"{path}.parts.{index}", OnePart(fill, index))


@dataclass(frozen=True)
class OnePart:
    """The pieces that fill one part as if it were the only one; see `weight.protocol.Fill`."""

    all: Fill
    index: int

    def __call__(self, leaf: str, columns: int | None = None) -> tuple[Piece, ...]:
        return (replace(self.all(leaf, columns)[self.index], start=0),)

    def each(self, leaf: str, columns: int = 1) -> tuple[Piece, ...]:
        return (replace(self.all.each(leaf, columns)[self.index], row=0),)


def _one(weight_format: WeightFormat | None, shape: Shape) -> Weight:
    if weight_format is not None:
        return held(weight_format, shape)
    return Dense(jnp.zeros((*shape.out, *shape.inp), shape.dtype), axes=shape.axes)
