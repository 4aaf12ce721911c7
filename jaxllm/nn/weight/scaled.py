"""Numbers of 8 bits, fp8 or int8, times scales of rows or of groups of columns."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.rules import Rounded, Rule
from jaxllm.nn.weight.parameters import contract
from jaxllm.nn.weight.protocol import Fill, Shape
from jaxllm.quantisation import WeightFormat
from jaxllm.quantisation.weight_format import OFFSETS
from pallas_kernels import scaled_matmul as op
from pallas_kernels.grouped_matmul import Gating, Groups
from pallas_kernels.parts import Product, whole
from pallas_kernels.target import Target

LARGEST_INPUT = 16.0
DTYPES = {"fp8": jnp.float8_e4m3fn, "int8": jnp.int8}


class Scaled(nnx.Module):
    """A weight as numbers `values` `[*out, K]` and `scale` `[*out, G]`, where K are the inputs in
    the checkpoint's order. See `weight.protocol.Weight`, and `HeadWeight` for `[V, D]`.

    Scales of whole tensors and of blocks of rows are repeated for each row, so that rows of several
    checkpoint matrices may follow each other in any order. Where groups have offsets, these times
    the sums of a group's inputs are added to products.
    """

    def __init__(self, weight_format: WeightFormat, shape: Shape):
        columns = shape.columns
        self.group = weight_format.group or columns
        groups = -(-columns // self.group)
        # Groups that devices would cut keep all columns on each
        divides = columns % self.group == 0 and groups % shape.shards == 0
        by_columns = None
        if divides:
            by_columns = shape.inp_axis
        values = jnp.zeros((*shape.out, columns), DTYPES[weight_format.numbers])
        scale = jnp.zeros((*shape.out, groups), _scale_dtype(weight_format, shape))
        rows = shape.axes[: len(shape.out)]
        whole_rows = groups == 1
        self.values = nnx.Param(values, axes=(*rows, shape.inp_axis if whole_rows else by_columns))
        of_scale = (*rows, None if whole_rows else by_columns)
        self.scale = nnx.Param(scale, axes=of_scale)
        added = weight_format.form == OFFSETS
        if added:
            self.offset = nnx.Param(scale.astype(shape.dtype), axes=of_scale)
        else:
            self.offset = None
        self.format = weight_format
        self.shape = shape
        # Those of parts that are alike, but for an expert's, see `_scales`
        ones = jnp.ones((shape.tensors, 1), jnp.float32)
        if weight_format.inputs == "given":
            self.input_scale = nnx.Param(ones, axes=(None, None))
        else:
            self.input_scale = None

    def rounding(self, tokens: int, context: RowContext) -> op.Rounding | None:
        weight_format = self.format
        grouped = self.scale.shape[-1] > 1
        if (
            weight_format.numbers != "fp8"
            or weight_format.inputs != "token"
            or grouped
            or self.shape.order
        ):
            return None
        if weight_format.bound is not None:  # kernels that round in passing know none
            return None
        return op.rounding_for(context.target, tokens, DTYPES[weight_format.numbers])

    def product(self, x: op.Inputs, dims: int, context: RowContext) -> Array:
        return self.shape.shaped(whole(self._parts(x, context)), context.collective)

    def part(self, x: op.Inputs, dims: int, context: RowContext) -> Product:
        return self.shape.parted(self._parts(x, context), context.collective)

    def sums(self, x_TD: Array, context: RowContext) -> Array:
        values = self.values[...]
        scale = self.scale[...]
        inputs = self.format.inputs
        backend = op.choose(context.target, x_TD, values, scale, self.group, inputs)
        how = {"group": self.group, "inputs": inputs, "backend": backend}
        return self.shape.shaped(_scaled_sums(x_TD, values, scale, **how), context.collective)

    def looked_up(self, token_T: Array, context: RowContext, vocab: int) -> Array:
        values = self.values[...]
        scale = self.scale[...]
        columns = self.shape.columns
        offset = None
        if self.offset is not None:
            offset = self.offset[...]

        def plain(place: Array) -> Array:
            rows = values[place].astype(jnp.float32) * op.spread(scale[place], self.group, columns)
            if offset is not None:
                rows = rows + op.spread(offset[place].astype(jnp.float32), self.group, columns)
            return rows.astype(self.shape.dtype)

        return context.collective.rows(plain, token_T, len(values), self.shape.out[0])

    def _parts(self, x: op.Inputs, context: RowContext) -> Product:
        values = self.values[...]
        scale = self.scale[...]
        inputs = self.format.inputs
        w_OI, scale_OG = (array.reshape(-1, array.shape[-1]) for array in (values, scale))
        x_TI = x
        if isinstance(x, Array):
            x_TI = self._bounded(self.shape.flat(x, w_OI.shape[1], context.collective))
        if scale_OG.shape[1] > 1:
            group = self.group
        else:
            group = min(self.group, w_OI.shape[1])
        backend = op.choose(context.target, x_TI, w_OI, scale_OG, group, inputs)
        input_scales = self._scales(backend)
        how = {"group": group, "inputs": inputs, "backend": backend}
        products = [
            _scaled_parts(x_TI, w_PI, scale_PG, input_scale=input_scale, **how)
            for w_PI, scale_PG, input_scale in zip(
                jnp.split(w_OI, len(input_scales)),
                jnp.split(scale_OG, len(input_scales)),
                input_scales,
                strict=True,
            )
        ]
        if len(products) == 1:
            product = products[0]
        else:
            product = jnp.concatenate([*map(whole, products)], axis=1)
        if self.offset is None:
            return product
        assert isinstance(x_TI, Array) and inputs == "plain"
        offset_OG = self.offset[...].reshape(scale_OG.shape)
        return _with_offsets(whole(product), x_TI, offset_OG, group)

    def _scales(self, backend: str) -> list[Array | None]:
        """The scales of inputs: one for each part, which is an equal share of the rows, or one for
        all. Parts of an expert may have unlike scales, which the reference takes; kernels take the
        largest."""
        if self.input_scale is None:
            return [None]
        scales = self.input_scale[...].reshape(-1)
        is_expert = len(self.shape.out) == 1
        if self.is_kernel(backend) or not is_expert:
            return [jnp.max(scales)]
        return [*scales]

    def grouped(
        self,
        x_PI: Array,
        groups: Groups,
        context: RowContext,
        bias_EO: Array | None,
        gating: Gating | None,
    ) -> Array | None:
        if self.offset is not None:
            return None
        input_scale = None
        if self.input_scale is not None:
            input_scale = jnp.max(self.input_scale[...], axis=(1, 2))
        weight = op.ScaledExperts(
            self.values[...], self.scale[...], self.group, self.format.inputs, input_scale
        )
        backend = op.find_grouped(context.target, x_PI, weight, groups, gating)
        if backend is None:
            return None
        x_PI = self._bounded(x_PI)
        return _grouped(x_PI, weight, groups, bias_EO, gating=gating, backend=backend)

    def _bounded(self, x: Array) -> Array:
        bound = self.format.bound
        if bound is None:
            return x
        return jnp.clip(x, -bound, bound)

    def takes_all(self, target: Target) -> bool:
        if self.offset is not None:
            return False
        sizes = self.shape.of_device
        gated = self.shape.tensors > 1
        return op.experts_fit(target, sizes, gated, self.format.group, self.format.inputs)

    def gated(
        self, x_TD: op.Inputs, gating: Gating, context: RowContext, rounding: op.Rounding | None
    ) -> op.Inputs | None:
        if rounding is None or len(self.values) > 1 or not op.gates(context.target, gating):
            return None
        product = self._parts(x_TD, context)
        backend = op.choose_gated_rows(context.target, product, rounding, gating)
        return _gated_rows(product, rounding=rounding, gating=gating, backend=backend)

    def rules(self, path: str, fill: Fill) -> Iterator[Rule]:
        columns = self.shape.columns
        if self.format.rounded:
            shape = (*self.shape.out, columns)
            yield Rule(path, fill("weight", columns), rounded=Rounded(self.format, shape))
            return
        yield Rule(f"{path}.values", fill("weight.values", columns))
        yield Rule(f"{path}.scale", fill("weight.scale", self.scale.shape[-1]))
        if self.offset is not None:
            yield Rule(f"{path}.offset", fill("weight.offset", self.offset.shape[-1]))
        if self.input_scale is not None:
            yield Rule(f"{path}.input_scale", fill.each("weight.input_scale"))

    @staticmethod
    def is_table(weight_format: WeightFormat) -> bool:
        """Whether rows of this format are looked up."""
        return weight_format.inputs == "plain" and weight_format.ordered

    @staticmethod
    def is_head(weight_format: WeightFormat, columns: int) -> bool:
        """Whether a head of `columns` columns may have this format: its sums are float32, in
        Hopper's kernel, too."""
        multiplies = Scaled.is_table(weight_format) and weight_format.form != OFFSETS
        return multiplies and op.takes_plain(columns, weight_format.group)

    @staticmethod
    def backend(weight_format: WeightFormat, target: Target) -> str:
        columns = (weight_format.group or 1) * op.GROUP
        x_TI = jax.ShapeDtypeStruct((1, columns), jnp.bfloat16)
        w_OI = jax.ShapeDtypeStruct((op.GROUP, columns), DTYPES[weight_format.numbers])
        groups = columns // (weight_format.group or columns)
        scale_OG = jax.ShapeDtypeStruct((op.GROUP, groups), jnp.float32)
        return op.choose(
            target, x_TI, w_OI, scale_OG, weight_format.group or columns, weight_format.inputs
        )

    @staticmethod
    def is_kernel(backend: str) -> bool:
        return not op.BACKENDS.runs_anywhere(backend)

    @staticmethod
    def workspace(weight_format: WeightFormat, stream: int, product: int) -> int:
        # Products of int8 numbers, and those with plain inputs, are added up in 32 bits
        if weight_format.numbers == "int8" or weight_format.inputs == "plain":
            return 4 * stream + 5 * product
        return 3 * stream + 2 * product

    @staticmethod
    def rounded(weight_format: WeightFormat, plain: Array) -> dict[str, Array]:
        """The parameters of a plain weight `[*out, K]`; a scale of inputs and offsets, which random
        weights alone lack, are those of inputs near one and zeros."""
        dtype = DTYPES[weight_format.numbers]
        values, scale = op.rounded(plain, dtype, weight_format.group or plain.shape[-1])
        input_scale = jnp.full((1, 1), LARGEST_INPUT / op.largest(dtype))
        offset = jnp.zeros_like(scale)
        return {"values": values, "scale": scale, "input_scale": input_scale, "offset": offset}


def _scale_dtype(weight_format: WeightFormat, shape: Shape) -> DTypeLike:
    """float32, or the format's own where the model computes in 16 bits. Scales of small groups are
    an eighth of the weight's bytes and more, and float16 rounds them 8 times finer than bfloat16
    the weights."""
    exact = jnp.dtype(shape.dtype).itemsize > jnp.dtype(jnp.float16).itemsize
    if exact:
        return jnp.float32
    return weight_format.scales


@functools.partial(jax.jit, static_argnames="group")
def _with_offsets(y_TO: Array, x_TI: Array, offset_OG: Array, group: int) -> Array:
    """y plus each offset times the sum of its group's inputs, in float32."""
    tokens, columns = x_TI.shape
    groups = offset_OG.shape[1]
    filled = jnp.pad(x_TI, ((0, 0), (0, groups * group - columns)))
    sum_TG = filled.reshape(tokens, groups, group).sum(axis=2, dtype=jnp.float32)
    added_TO = contract(sum_TG, offset_OG.astype(jnp.float32), 1)
    return (y_TO.astype(jnp.float32) + added_TO).astype(y_TO.dtype)


# Jitted, so that a kernel is lowered once, not for every layer
_gated_rows = jax.jit(op.gated_rows, static_argnames=("rounding", "gating", "backend"))
_grouped = jax.jit(op.grouped_scaled_matmul, static_argnames=("gating", "backend"))
_scaled_parts = jax.jit(op.scaled_parts, static_argnames=("group", "inputs", "backend"))
_scaled_sums = jax.jit(op.scaled_sums, static_argnames=("group", "inputs", "backend"))
