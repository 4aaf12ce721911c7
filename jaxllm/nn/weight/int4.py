"""Numbers of 4 bits, integers or what a table says, in groups of columns."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.rules import Rounded, Rule
from jaxllm.nn.weight.protocol import Fill, Shape
from jaxllm.nn.weight.scaled import DTYPES
from jaxllm.quantisation import WeightFormat
from jaxllm.quantisation.int4_rows import columns_of, groups_of, row_bytes
from jaxllm.quantisation.weight_format import INT4, OFFSETS, SYMMETRIC
from pallas_kernels import int4_matmul as op
from pallas_kernels.grouped_matmul import Gating, Groups
from pallas_kernels.int4_matmul.packed import CHUNK, ROWS, SLOT, WORDS, values_of, words_of
from pallas_kernels.int4_matmul.rounding import nearest, rounded
from pallas_kernels.parts import Product, whole
from pallas_kernels.scaled_matmul import Inputs, Rounding, in_steps
from pallas_kernels.target import Target


class Int4(nnx.Module):
    """A weight as `pallas_kernels.int4_matmul` takes it: words in `values`, `scales`, and zero
    points or offsets in `others`. See `weight.protocol.Weight`.

    The pieces of a checkpoint fill the bytes of its rows (`quantisation.int4_rows`), or its plain
    weight; words are made of these on the devices. Inputs that are rounded to 8 bits are multiplied
    as numbers of their own type, and products with the tokens' scales.
    """

    def __init__(self, weight_format: WeightFormat, shape: Shape):
        columns = shape.columns
        rows = math.prod(shape.out)
        blocks = -(-rows // ROWS)
        chunks = -(-columns // SLOT) * (SLOT // CHUNK)
        groups = -(-chunks * CHUNK // _group(weight_format, columns))
        # Blocks of rows are those of the first axis where each shard has whole ones; columns are
        # split where each shard has whole slots and groups
        divides = (rows // shape.shards) % ROWS == 0 and shape.out[0] % shape.shards == 0
        first = None
        if divides:
            first = shape.axes[0]
        shard_columns = columns // shape.shards
        one_group = weight_format.group is None
        divides = columns % (SLOT * shape.shards) == 0 and (
            one_group or shard_columns % (weight_format.group or 1) == 0
        )
        second = None
        if divides:
            second = shape.inp_axis
        values = jnp.zeros((blocks, chunks, *WORDS), jnp.int32)
        scales = jnp.zeros((blocks, groups, ROWS), shape.dtype)
        of_scales = (first, None if one_group else second, None)
        self.values = nnx.Param(values, axes=(first, second, None, None))
        self.scales = nnx.Param(scales, axes=of_scales)
        if weight_format.form == SYMMETRIC:
            self.others = None
        else:
            self.others = nnx.Param(scales, axes=of_scales)
        self.format = weight_format
        self.shape = shape
        self._parts = blocks, chunks

    def rounding(self, tokens: int, context: RowContext) -> None:
        return None

    def product(self, x: Inputs, dims: int, context: RowContext) -> Array:
        return self.shape.shaped(whole(self._product(x, context)), context.collective)

    def part(self, x: Inputs, dims: int, context: RowContext) -> Product:
        return self.shape.parted(self._product(x, context), context.collective)

    def _product(self, x: Inputs, context: RowContext) -> Product:
        assert isinstance(x, Array)  # no rounding is asked for
        x_TI, weight = self._factors(x, context)
        backend = op.choose(context.target, x_TI, weight)
        if self.format.inputs == "plain":
            return _int4_parts(x_TI, weight, backend=backend)
        assert self.format.inputs == "token" and self.format.input_numbers is not None
        steps_TI, scale_T1 = in_steps(x_TI, DTYPES[self.format.input_numbers])
        y_TO = whole(_int4_parts(steps_TI, weight, backend=backend))
        return (y_TO * scale_T1).astype(x_TI.dtype)

    def gated(
        self, x_TD: Inputs, gating: Gating, context: RowContext, rounding: Rounding | None
    ) -> Array | None:
        if self.format.inputs != "plain":
            return None
        assert isinstance(x_TD, Array)
        x_TI, weight = self._factors(x_TD, context)
        one_shard = weight.rows * self.shape.shards == math.prod(self.shape.out)
        backend = op.find_dense(context.target, x_TI, weight)
        if not one_shard or backend is None:
            return None
        plain = _dense(x_TI, weight, backend=backend)
        return context.gated_product(x_TI, plain.reshape(1, 2, -1, plain.shape[1]), gating)

    def _factors(self, x: Array, context: RowContext) -> tuple[Array, op.Int4]:
        values = self.values[...]
        shape = self.shape
        # A device has all rows or its share of them, and all columns or its share
        blocks, chunks = (a // b for a, b in zip(self._parts, values.shape[:2], strict=True))
        rows = math.prod(shape.out) // blocks
        columns = shape.columns // chunks
        return shape.flat(x, columns, context.collective), self._weight(rows, columns)

    def grouped(
        self,
        x_PI: Array,
        groups: Groups,
        context: RowContext,
        bias_EO: Array | None,
        gating: Gating | None,
    ) -> Array | None:
        shape = self.shape
        parts = self.values[...].shape[1:3]
        if parts != self._parts or self.format.inputs != "plain":  # or rows are shared out
            return None
        weight = self._weight(math.prod(shape.out), shape.columns)
        backend = op.find_grouped(context.target, x_PI, weight)
        if backend is None:
            return None
        return _grouped(x_PI, weight, groups, bias_EO, gating=gating, backend=backend)

    def takes_all(self, target: Target) -> bool:
        sizes = math.prod(self.shape.out), self.shape.columns
        fits = self.format.inputs == "plain" and self.shape.of_device == sizes
        return fits and bool(op.GROUPED.suited(target))

    def _weight(self, rows: int, columns: int) -> op.Int4:
        zeros = None
        offsets = None
        if self.others is not None:
            if self.format.form == OFFSETS:
                offsets = self.others[...]
            else:
                zeros = self.others[...]
        return op.Int4(
            self.values[...],
            self.scales[...],
            zeros,
            offsets,
            rows=rows,
            group=_group(self.format, columns),
            table=_table(self.format),
        )

    def rules(self, path: str, fill: Fill) -> Iterator[Rule]:
        weight_format = self.format
        columns = self.shape.columns
        if weight_format.rounded:
            size = columns
        else:
            size = row_bytes(weight_format, columns)
        leaf = "weight.rows"
        if weight_format.rounded:
            leaf = "weight"
        yield Rule(path, fill(leaf, size), rounded=Rounded(weight_format, (*self.shape.out, size)))

    @staticmethod
    def backend(weight_format: WeightFormat, target: Target) -> str:
        return op.BACKENDS.suited(target)[0]

    @staticmethod
    def is_kernel(backend: str) -> bool:
        return not op.BACKENDS.runs_anywhere(backend)

    @staticmethod
    def workspace(weight_format: WeightFormat, stream: int, product: int) -> int:
        return 3 * stream + 3 * product

    @staticmethod
    def rounded(weight_format: WeightFormat, plain: Array) -> dict[str, Array]:
        """The parameters of a plain weight `[*out, K]`, or of the bytes of its rows."""
        rows = plain.reshape(-1, plain.shape[-1])
        if weight_format.rounded:
            columns = rows.shape[1]
        else:
            columns = columns_of(weight_format, rows.shape[1])
        group = _group(weight_format, columns)
        if weight_format.rounded and (table := _table(weight_format)):
            numbers, scales = nearest(rows, group, plain.dtype, table)
        elif weight_format.rounded:
            numbers, scales, others = rounded(rows, group, plain.dtype)
        else:
            numbers, scales, others = row_parts(weight_format, rows, columns)
        made = {"values": words_of(numbers), "scales": values_of(scales, columns, group)}
        if weight_format.form != SYMMETRIC:
            made["others"] = values_of(others, columns, group)
        return made


def _group(weight_format: WeightFormat, columns: int) -> int:
    """Columns of a group; one that holds all fills slots of the kernel."""
    if weight_format.group is None:
        return columns + -columns % SLOT
    return weight_format.group


def _table(weight_format: WeightFormat) -> str | None:
    if weight_format.numbers == INT4:
        return None
    return weight_format.numbers


def row_parts(weight_format: WeightFormat, rows: Array, columns: int) -> tuple[Array, Array, Array]:
    """Numbers, scales and zero points or offsets in the bytes of rows."""
    groups = groups_of(weight_format, columns)
    half = -(-columns // 2)
    numbers = jnp.stack([rows[:, :half] & 15, rows[:, :half] >> 4], axis=-1)

    def floats(first: int) -> Array:
        words = rows[:, first : first + 4 * groups].reshape(len(rows), groups, 4)
        return lax.bitcast_convert_type(words, jnp.float32)

    others = rows[:, half + 4 * groups :].astype(jnp.float32)
    return (
        numbers.reshape(len(rows), -1)[:, :columns],
        floats(half),
        floats(half + 4 * groups) if weight_format.form == OFFSETS else others,
    )


# Jitted, so that a kernel is lowered once, not for every layer
_grouped = jax.jit(op.grouped_int4_matmul, static_argnames=("gating", "backend"))
_dense = jax.jit(op.dense, static_argnames="backend")
_int4_parts = jax.jit(op.int4_parts, static_argnames=("backend",))
