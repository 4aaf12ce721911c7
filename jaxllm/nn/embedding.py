"""Token embeddings, each called with the tokens, their positions and the context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.linear import Init, Linear, Stored
from jaxllm.nn.norm import Norm
from jaxllm.nn.rules import Piece, Rule
from jaxllm.nn.weight.dense import Dense
from jaxllm.nn.weight.protocol import Shape, Table
from jaxllm.nn.weight.table import held_table
from jaxllm.quantisation import WeightFormat


class Embedding(nnx.Module):
    """Token table [V, D], also the output head of tied models.

    `axis` is the logical name of the vocabulary: "vocab" where the table is split, as that of a
    tied model; None where each device has all of it, which saves a sum.
    """

    def __init__(self, init: Init, vocab: int, width: int, axis: str | None):
        self.weight: Table = init.normal((vocab, width), (axis, "embed"), Dense)
        self.vocab = vocab
        self.width = width
        self.axis = axis
        self.dtype = init.dtype

    def hold(self, weight_format: WeightFormat, shards: int) -> None:
        """Have an empty table of this format, over `shards` tensor shards, in place of plain
        numbers."""
        axes = self.axis, "embed"
        shape = Shape((self.vocab,), (self.width,), axes, shards=shards, dtype=self.dtype)
        self.weight = held_table(weight_format, shape)

    def __call__(self, token_T: Array, position_T: Array, context: RowContext) -> Array:
        return self.weight.looked_up(token_T, context, self.vocab)

    def rules(self, name: str) -> Iterator[Rule]:
        yield from self.weight.rules("weight", _Tensor(name, self.vocab, self.width))


@dataclass(frozen=True)
class _Tensor:
    """The checkpoint tensor of a table, see `weight.protocol.Fill`."""

    name: str
    vocab: int
    width: int

    def __call__(self, leaf: str, columns: int | None = None) -> tuple[Piece, ...]:
        if columns is None:
            columns = self.width
        shape = (self.vocab, columns)
        return (Piece(f"{self.name}.{leaf}", shape, shape),)

    def each(self, leaf: str, columns: int = 1) -> tuple[Piece, ...]:
        return (Piece(f"{self.name}.{leaf}", (1, columns), (1, columns)),)


class LogitsBias(Stored):
    """What a model whose table is its head adds to the logits, [V]."""

    def __init__(self, init: Init, vocab: int, axis: str | None):
        self.weight = init.full((vocab,), (axis,), 0.0)

    def rules(self, name: str) -> Iterator[Rule]:
        shape = self.weight.get_value().shape
        yield Rule("weight", (Piece(f"{name}.bias", shape, shape),))


class ScaledEmbedding(Embedding):
    """Token embeddings times a factor; the product is rounded once."""

    def __init__(self, init: Init, vocab: int, width: int, axis: str | None, factor: float):
        super().__init__(init, vocab, width, axis)
        self.factor = factor

    def __call__(self, token_T: Array, position_T: Array, context: RowContext) -> Array:
        x_TD = super().__call__(token_T, position_T, context)
        return (x_TD.astype(jnp.float32) * self.factor).astype(x_TD.dtype)


class NormedEmbedding(Embedding):
    """The norm of token embeddings."""

    def __init__(self, init: Init, vocab: int, width: int, axis: str | None, norm: Norm):
        super().__init__(init, vocab, width, axis)
        self.norm = norm

    def __call__(self, token_T: Array, position_T: Array, context: RowContext) -> Array:
        return self.norm(super().__call__(token_T, position_T, context))


class PositionTable(Stored):
    """A learned vector for each of `length` positions, [L, D]."""

    def __init__(self, init: Init, length: int, width: int):
        self.weight = init.normal((length, width), (None, "embed"))


class PositionedEmbedding(Embedding):
    """Token embeddings plus learned position embeddings, of at most `length` positions.

    The first position's is entry `first` of its table. Where tokens have narrower vectors than the
    residual stream, `project` maps them to it.
    """

    def __init__(
        self,
        init: Init,
        vocab: int,
        width: int,
        axis: str | None,
        length: int,
        *,
        first: int = 0,
        project: Linear | None = None,
    ):
        table_width = width
        if project is not None:
            table_width = project.inp[0]
        super().__init__(init, vocab, table_width, axis)
        self.positions = PositionTable(init, first + length, width)
        self.project = project
        self.first = first

    def __call__(self, token_T: Array, position_T: Array, context: RowContext) -> Array:
        x_TD = super().__call__(token_T, position_T, context)
        if self.project is not None:
            x_TD = self.project(x_TD, context)
        return x_TD + self.positions.weight[...][position_T + self.first]


class EncoderEmbedding(Embedding):
    """Token embeddings, plus learned ones of `positions` positions and of `types` types of text,
    normed. An encoder may have none of either.

    The first position's is entry `first` of its table.
    """

    def __init__(
        self,
        init: Init,
        vocab: int,
        width: int,
        *,
        norm: Norm,
        positions: int = 0,
        first: int = 0,
        types: int = 0,
    ):
        super().__init__(init, vocab, width, None)
        self.positions = PositionTable(init, positions, width) if positions else None
        self.types = PositionTable(init, types, width) if types else None
        self.norm = norm
        self.first = first

    def __call__(
        self,
        token_T: Array,
        position_T: Array,
        context: RowContext,
        second_T: Array | None = None,
    ) -> Array:
        """`second_T` is 1 for tokens of the second text of a pair."""
        x_TD = super().__call__(token_T, position_T, context)
        if self.types is not None:
            table = self.types.weight[...]
            single = second_T is None or table.shape[0] == 1
            if single:
                x_TD = x_TD + table[0]
            else:
                x_TD = x_TD + table[second_T]
        if self.positions is not None:
            x_TD = x_TD + self.positions.weight[...][position_T + self.first]
        return self.norm(x_TD)


def vocab_axis(vocab: int, shards: int) -> str | None:
    """Logical axis of a vocabulary dimension; None (replicated) where it does not divide."""
    if vocab % shards == 0:
        return "vocab"
    return None
