"""What a linear map asks of its weight, whatever numbers it is held in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jaxllm.cache.collective import Collective
from jaxllm.mesh import is_split
from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.rules import Piece, Rule
from jaxllm.nn.weight.parameters import Axes
from jaxllm.quantisation import WeightFormat
from pallas_kernels.grouped_matmul import Gating, Groups
from pallas_kernels.parts import Parts, Product, whole
from pallas_kernels.scaled_matmul import Inputs, Rounding
from pallas_kernels.target import Target


class Fill(Protocol):
    """Which checkpoint tensors fill an array with a weight's output axes."""

    def __call__(self, leaf: str, columns: int | None = None) -> tuple[Piece, ...]:
        """Pieces of the tensors `{name}.{leaf}`, `[out, in]`; or, given `columns`, of such with as
        many columns, for an array `[*out, columns]`."""

    def each(self, leaf: str, columns: int = 1) -> tuple[Piece, ...]:
        """Pieces of the tensors `{name}.{leaf}`, `[1, columns]`, for an array
        `[tensors, columns]`; of experts, `[E, tensors, columns]`."""


class Weight(Protocol):
    """The weight `[*out, *inp]` of a linear map, or `[E, out, inp]` of one for each expert.

    A scheme is a file of this room with a class of this protocol: a parameter, or a module of
    several.
    """

    def rounding(self, tokens: int, context: RowContext) -> Rounding | None:
        """The rounding of inputs that `product` takes in place of `tokens` plain ones; None where
        it takes plain ones alone."""

    def product(self, x: Inputs, dims: int, context: RowContext) -> Array:
        """`[T, *inp]` → `[T, *out]`: the last `dims` axes are contracted."""

    def part(self, x: Inputs, dims: int, context: RowContext) -> Product:
        """The same product, in parts where that saves a launch, for a reader that adds them up."""

    def gated(
        self, x_TD: Inputs, gating: Gating, context: RowContext, rounding: Rounding | None
    ) -> Inputs | None:
        """gating(gate(x), up(x)) `[T, X·F]` of a weight `[X, 2, F, D]`, plain or as `rounding` has
        it; None where XLA's activation of the product is as fast."""

    def rules(self, path: str, fill: Fill) -> Iterator[Rule]:
        """The rules that fill the parameters, which lie at `path` in the map."""


class Table(Protocol):
    """Rows `[V, D]` of tokens."""

    def looked_up(self, token_T: Array, context: RowContext, vocab: int) -> Array:
        """The rows `[T, D]` of tokens, of V = `vocab`."""

    def rules(self, path: str, fill: Fill) -> Iterator[Rule]:
        """The rules that fill the parameters, which lie at `path` in the table."""


class HeadWeight(Weight, Table, Protocol):
    """The weight `[V, D]` of an output head, which may be the table of tokens, too."""

    def sums(self, x_TD: Array, context: RowContext) -> Array:
        """`[T, D]` → `[T, V]` in float32, as they are summed: rounded logits would make likely
        tokens equal. Of this device's own share of V where it is split; more may follow."""


class ExpertWeight(Protocol):
    """The weight `[E, out, inp]` of a linear map for each expert."""

    def grouped(
        self,
        x_PI: Array,
        groups: Groups,
        context: RowContext,
        bias_EO: Array | None,
        gating: Gating | None,
    ) -> Array:
        """Each row times the weight of its expert, see `RowContext.grouped_product`."""

    def rules(self, path: str, fill: Fill) -> Iterator[Rule]:
        """The rules that fill the parameters, which lie at `path` in the map."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a linear map.

    Attributes:
        out: output axes.
        inp: input axes of the activations.
        axes: logical names of both.
        order: the checkpoint's number of each entry along the last input axis, -1 for zeros; ()
            keeps them.
        shards: tensor shards.
        tensors: of the checkpoint that fill the map.
        dtype: that the model computes in.
    """

    out: tuple[int, ...]
    inp: tuple[int, ...]
    axes: Axes
    order: tuple[int, ...] = ()
    shards: int = 1
    tensors: int = 1
    dtype: DTypeLike = jnp.float32

    @property
    def columns(self) -> int:
        """Inputs that the checkpoint knows."""
        if self.order:
            last = sum(entry >= 0 for entry in self.order)
        else:
            last = self.inp[-1]
        return math.prod(self.inp[:-1]) * last

    @property
    def out_axis(self) -> int | None:
        """The output axis that is split over devices."""
        split = (i for i in range(len(self.out)) if is_split(self.axes[i]))
        return next(split, None)

    @property
    def inp_axis(self) -> str | None:
        """The logical name of the inputs' first axis, by which they are split."""
        return self.axes[len(self.out)]

    @property
    def of_device(self) -> tuple[int, int]:
        """Rows and columns on a device, where both divide."""
        rows = math.prod(self.out)
        if self.out_axis is not None:
            rows = rows // self.shards
        columns = self.columns
        if is_split(self.inp_axis):
            columns = columns // self.shards
        return rows, columns

    def flat(self, x: Array, columns: int, collective: Collective) -> Array:
        """`[T, *inp]` → `[T, columns]`, in the checkpoint's order. Of a weight that each device
        holds with all columns, other devices' inputs are zero."""
        if self.order:
            stored = np.argsort(self.order, stable=True)
            x = x[..., stored[-sum(entry >= 0 for entry in self.order) :]]
        x_TI = x.reshape(x.shape[0], -1)
        if x_TI.shape[1] == columns:
            return x_TI
        return collective.placed(x_TI, columns)

    def shaped(self, y_TO: Array, collective: Collective) -> Array:
        """`[T, rows]` → `[T, *out]`: of all rows of a split map this device's alone."""
        T, held = y_TO.shape
        out = list(self.out)
        axis = self.out_axis
        if axis is None or held == math.prod(out):
            y = y_TO.reshape(T, *out)
            if axis is None:
                return y
            return collective.own(y, 1 + axis)
        out[axis] //= math.prod(out) // held
        return y_TO.reshape(T, *out)

    def parted(self, y_TO: Product, collective: Collective) -> Product:
        """`shaped`, of what may be in parts: they stay apart where a device has all outputs."""
        if isinstance(y_TO, Parts) and (self.out_axis is None or self.shards == 1):
            return y_TO.shaped(*self.out)
        return self.shaped(whole(y_TO), collective)


class Held(Weight, Protocol):
    """A weight in few bits. One of its parameters is `values`. If it has the axes of the plain
    weight `[*out, columns]`, it is split over devices as that would be."""

    def __init__(self, weight_format: WeightFormat, shape: Shape): ...

    def grouped(
        self,
        x_PI: Array,
        groups: Groups,
        context: RowContext,
        bias_EO: Array | None,
        gating: Gating | None,
    ) -> Array | None:
        """`ExpertWeight.grouped`, where an axis of experts comes before the others of all
        parameters; None where no kernel computes that."""

    def takes_all(self, target: Target) -> bool:
        """Whether a kernel of the target computes this map of all experts at once, in the sizes
        that a device has."""

    @staticmethod
    def backend(weight_format: WeightFormat, target: Target) -> str:
        """The back end of products with such weights of usual sizes on a target."""

    @staticmethod
    def is_kernel(backend: str) -> bool:
        """Whether a back end of these products is more than plain JAX."""

    @staticmethod
    def workspace(weight_format: WeightFormat, stream: int, product: int) -> int:
        """Values that a feed-forward holds of each of many tokens at once where Hopper's kernels
        multiply, at most: of a residual stream, and of the product of gate and up."""

    @staticmethod
    def rounded(weight_format: WeightFormat, plain: Array) -> dict[str, Array]:
        """The parameters, by their names, of a weight of plain numbers `[*out, columns]`; of the
        bytes that its rule asks for if the format is not `rounded`."""
