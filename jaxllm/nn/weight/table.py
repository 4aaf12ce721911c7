"""Tables of tokens in few bits, whose rows are looked up; those of 4 bits are the bytes of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.rules import Ordered, Piece, Rule
from jaxllm.nn.weight.int4 import row_parts
from jaxllm.nn.weight.protocol import Fill, Shape
from jaxllm.nn.weight.scaled import DTYPES, Scaled
from jaxllm.quantisation import WeightFormat
from jaxllm.quantisation.int4_rows import row_bytes
from jaxllm.quantisation.weight_format import INT4, OFFSETS, ZEROS
from pallas_kernels.int4_matmul.packed import MIDDLE, ROWS, TABLES

COPIED_ROWS = 8  # that kernels of 8-bit weights copy at once


class HeldTable(nnx.Module):
    """Rows as bytes `[V, B]`, see `quantisation.int4_rows`; all of them on each device. See
    `weight.protocol.Table`."""

    def __init__(self, weight_format: WeightFormat, vocab: int, width: int, dtype: DTypeLike):
        rows = jnp.zeros((vocab, row_bytes(weight_format, width)), jnp.uint8)
        self.rows = nnx.Param(rows, axes=(None, None))
        self.format = weight_format
        self.width = width
        self.dtype = dtype

    def looked_up(self, token_T: Array, context: RowContext, vocab: int) -> Array:
        return plain_rows(self.format, self.rows[...][token_T], self.width).astype(self.dtype)

    def rules(self, path: str, fill: Fill) -> Iterator[Rule]:
        yield Rule(f"{path}.rows", fill("weight.rows", self.rows.shape[1]))


def held_table(weight_format: WeightFormat, shape: Shape) -> Scaled | HeldTable:
    """An empty table of this format; one of 8 bits may be a head."""
    if weight_format.numbers in DTYPES:
        return held_head(weight_format, shape)
    (vocab,) = shape.out
    (width,) = shape.inp
    return HeldTable(weight_format, vocab, width, shape.dtype)


def held_head(weight_format: WeightFormat, shape: Shape) -> Scaled:
    """An empty head of this format, which may be the table, too. Where each device has all rows,
    zeros follow them up to whole blocks of the kernel's: their logits are to be cut off."""
    (vocab,) = shape.out
    split = shape.shards > 1 and shape.out_axis is not None
    if not split:
        return Scaled(weight_format, replace(shape, out=(vocab + -vocab % ROWS,)))
    uneven = vocab // shape.shards % COPIED_ROWS
    if uneven:
        return SharedHead(weight_format, shape)
    return Scaled(weight_format, shape)


class SharedHead(Scaled):
    """A head of 8 bits whose rows devices share. Each share is filled up to whole blocks of the
    kernel's, which takes no other; the logits of what is added are cut off."""

    def __init__(self, weight_format: WeightFormat, shape: Shape):
        (vocab,) = shape.out
        self.share = vocab // shape.shards
        self.held = self.share + -self.share % ROWS
        super().__init__(weight_format, replace(shape, out=(self.held * shape.shards,)))

    def sums(self, x_TD: Array, context: RowContext) -> Array:
        y_TO = super().sums(x_TD, context)
        # A device has one share, or all where none is named
        shares = y_TO.reshape(len(y_TO), -1, self.held)[..., : self.share]
        return shares.reshape(len(y_TO), -1)

    def looked_up(self, token_T: Array, context: RowContext, vocab: int) -> Array:
        place_T = token_T // self.share * self.held + token_T % self.share
        return super().looked_up(place_T, context, vocab)

    def rules(self, path: str, fill: Fill) -> Iterator[Rule]:
        yield from super().rules(path, FilledUp(fill, self.share, self.held))


@dataclass(frozen=True)
class FilledUp:
    """The pieces that fill shares of `held` rows with `share` rows of the checkpoint each, of which
    the last is repeated. See `weight.protocol.Fill`."""

    all: Fill
    share: int
    held: int

    def __call__(self, leaf: str, columns: int | None = None) -> tuple[Piece, ...]:
        return tuple(map(self._filled_up, self.all(leaf, columns)))

    def each(self, leaf: str, columns: int = 1) -> tuple[Piece, ...]:
        return self.all.each(leaf, columns)

    def _filled_up(self, piece: Piece) -> Piece:
        firsts = range(0, piece.view[0], self.share)
        order = tuple(
            first + min(row, self.share - 1) for first in firsts for row in range(self.held)
        )
        step = Ordered(piece.view, 0, order)
        return replace(piece, view=(len(order), *piece.view[1:]), steps=(*piece.steps, step))


def takes(weight_format: WeightFormat) -> bool:
    """Whether a table that is no head can have this format."""
    if weight_format.numbers in DTYPES:
        return Scaled.is_table(weight_format)
    return (
        weight_format.ordered
        and weight_format.inputs == "plain"
        and weight_format.numbers in (INT4, *TABLES)
    )


def takes_head(weight_format: WeightFormat, columns: int) -> bool:
    """Whether a head of `columns` columns, which may be the table, too, can have this format."""
    return weight_format.numbers in DTYPES and Scaled.is_head(weight_format, columns)


def plain_rows(weight_format: WeightFormat, rows: Array, columns: int) -> Array:
    """The numbers `[T, columns]` that the bytes of rows stand for, float32."""
    numbers, scales, others = row_parts(weight_format, rows, columns)

    def spread(values: Array) -> Any:
        return jnp.repeat(values, weight_format.group or columns, axis=1)[:, :columns]

    if weight_format.numbers in TABLES:
        return jnp.array(TABLES[weight_format.numbers], jnp.float32)[numbers] * spread(scales)
    exact = numbers.astype(jnp.float32)
    if weight_format.form == OFFSETS:
        return exact * spread(scales) + spread(others)
    return (exact - (spread(others) if weight_format.form == ZEROS else MIDDLE)) * spread(scales)
