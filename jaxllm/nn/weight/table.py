"""Tables of tokens, whose rows are looked up: plain, or as the bytes of rows of 4 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.rules import Piece, Rule
from jaxllm.nn.weight.int4 import row_parts
from jaxllm.quantisation import WeightFormat
from jaxllm.quantisation.int4_rows import row_bytes
from jaxllm.quantisation.weight_format import OFFSETS, ZEROS
from pallas_kernels.int4_matmul.packed import MIDDLE, TABLES


class Table(nnx.Param):
    """Rows `[V, D]` of plain numbers."""

    def looked_up(self, token_T: Array, context: RowContext, vocab: int) -> Array:
        """The rows `[T, D]` of tokens."""
        return context.collective.rows(self[...], token_T, vocab)

    def rules(self, path: str, name: str) -> Iterator[Rule]:
        """The checkpoint tensor `{name}.weight` fills the table, which lies at `path`."""
        shape = self.get_value().shape
        yield Rule(path, (Piece(f"{name}.weight", shape, shape),))


class HeldTable(nnx.Module):
    """Rows as bytes `[V, B]`, see `quantisation.int4_rows`; all of them on each device. It has the
    methods of `Table`."""

    def __init__(self, kind: WeightFormat, vocab: int, width: int, dtype: DTypeLike):
        rows = jnp.zeros((vocab, row_bytes(kind, width)), jnp.uint8)
        self.rows = nnx.Param(rows, axes=(None, None))
        self.kind, self.width, self.dtype = kind, width, dtype

    def looked_up(self, token_T: Array, context: RowContext, vocab: int) -> Array:
        rows = context.collective.rows(self.rows[...], token_T, vocab)
        return plain_rows(self.kind, rows, self.width).astype(self.dtype)

    def rules(self, path: str, name: str) -> Iterator[Rule]:
        shape = self.rows.shape
        yield Rule(f"{path}.rows", (Piece(f"{name}.weight.rows", shape, shape),))


def takes(kind: WeightFormat | None) -> bool:
    """Whether a table can be held so."""
    return kind is not None and kind.ordered and kind.numbers in ("int4", *TABLES)


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
