"""Tables of tokens in few bits, whose rows are looked up; those of 4 bits are the bytes of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.rules import Rule
from jaxllm.nn.weight.int4 import row_parts
from jaxllm.nn.weight.protocol import Fill, Shape
from jaxllm.nn.weight.scaled import DTYPES, Scaled
from jaxllm.quantisation import WeightFormat
from jaxllm.quantisation.int4_rows import row_bytes
from jaxllm.quantisation.weight_format import INT4, OFFSETS, ZEROS
from pallas_kernels.int4_matmul.packed import MIDDLE, ROWS, TABLES


class HeldTable(nnx.Module):
    """Rows as bytes `[V, B]`, see `quantisation.int4_rows`; all of them on each device. See
    `weight.protocol.Table`."""

    def __init__(self, kind: WeightFormat, vocab: int, width: int, dtype: DTypeLike):
        rows = jnp.zeros((vocab, row_bytes(kind, width)), jnp.uint8)
        self.rows = nnx.Param(rows, axes=(None, None))
        self.kind, self.width, self.dtype = kind, width, dtype

    def looked_up(self, token_T: Array, context: RowContext, vocab: int) -> Array:
        return plain_rows(self.kind, self.rows[...][token_T], self.width).astype(self.dtype)

    def rules(self, path: str, fill: Fill) -> Iterator[Rule]:
        yield Rule(f"{path}.rows", fill("weight.rows", self.rows.shape[1]))


def held_table(kind: WeightFormat, shape: Shape) -> Scaled | HeldTable:
    """An empty table of this format; one of 8 bits may be a head."""
    if kind.numbers in DTYPES:
        return held_head(kind, shape)
    (vocab,), (width,) = shape.out, shape.inp
    return HeldTable(kind, vocab, width, shape.dtype)


def held_head(kind: WeightFormat, shape: Shape) -> Scaled:
    """An empty head of this format, which may be the table, too. Where each device has all rows,
    zeros follow them up to whole blocks of the kernel's: their logits are to be cut off."""
    (vocab,) = shape.out
    split = shape.shards > 1 and shape.out_axis is not None
    return Scaled(kind, shape if split else replace(shape, out=(vocab + -vocab % ROWS,)))


def takes(kind: WeightFormat) -> bool:
    """Whether a table that is no head can be held so."""
    if kind.numbers in DTYPES:
        return Scaled.is_table(kind)
    return kind.ordered and kind.numbers in (INT4, *TABLES)


def takes_head(kind: WeightFormat, columns: int) -> bool:
    """Whether a head of so many columns, which may be the table, too, can be held so."""
    return kind.numbers in DTYPES and Scaled.is_head(kind, columns)


def plain_rows(kind: WeightFormat, rows: Array, columns: int) -> Array:
    """The numbers `[T, columns]` that the bytes of rows stand for, float32."""
    numbers, scales, others = row_parts(kind, rows, columns)

    def spread(values: Array) -> Any:
        return jnp.repeat(values, kind.group or columns, axis=1)[:, :columns]

    if kind.numbers in TABLES:
        return jnp.array(TABLES[kind.numbers], jnp.float32)[numbers] * spread(scales)
    exact = numbers.astype(jnp.float32)
    if kind.form == OFFSETS:
        return exact * spread(scales) + spread(others)
    return (exact - (spread(others) if kind.form == ZEROS else MIDDLE)) * spread(scales)
