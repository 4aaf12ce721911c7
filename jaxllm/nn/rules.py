"""The rule table: which checkpoint tensors fill which parameter. Imports no jax.

Modules that hold parameters yield their own rules (`rules` of Linear, Embedding and the norms);
`Decoder.rules` gathers them under the names of a family.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from jaxllm.quantisation import WeightFormat


@dataclass(frozen=True)
class Transposed:
    """A matrix stored as [in, out], or several as [number, in, out]."""

    def __call__(self, tensor: Any) -> Any:
        return tensor.swapaxes(-1, -2)


@dataclass(frozen=True)
class Part:
    """Entries `start` to `stop` along `axis` of a tensor seen as `shape`."""

    shape: tuple[int, ...]
    axis: int
    start: int
    stop: int

    def __call__(self, tensor: Any) -> Any:
        index = (slice(None),) * self.axis + (slice(self.start, self.stop),)
        return tensor.reshape(self.shape)[index]


@dataclass(frozen=True)
class Ordered:
    """Entry i along `axis` of a tensor seen as `shape` is the stored entry `order[i]`, zero for
    -1."""

    shape: tuple[int, ...]
    axis: int
    order: tuple[int, ...]

    def __call__(self, tensor: Any) -> Any:
        tensor = tensor.reshape(self.shape)
        order = np.array(self.order)
        if -1 in self.order:
            space = tensor.__array_namespace__()
            zero = space.zeros_like(tensor.take(np.array([0]), axis=self.axis))
            order = np.where(order < 0, self.shape[self.axis], order)
            tensor = space.concat([tensor, zero], axis=self.axis)
        return tensor.take(order, axis=self.axis)


@dataclass(frozen=True)
class Plus:
    """`value` added to every number, in float32."""

    value: float

    def __call__(self, tensor: Any) -> Any:
        return tensor.astype(np.float32) + np.float32(self.value)


type Step = Transposed | Part | Ordered | Plus


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor, or a part of it, that fills a parameter, or a part of it.

    `arranged` turns the stored tensor into the piece. Its entries along the first axis are then
    repeated, and the result fills parameter[row : row + rows, start : start + view[1]], or all of a
    parameter that has one piece.

    Attributes:
        name: of the checkpoint tensor.
        source: its shape.
        view: the shape that it is seen as in the end, with the parameter's number of axes.
        start: first index along the parameter's second axis.
        repeat: entries of the parameter that each entry of the first axis fills.
        row: first index along the parameter's first axis.
        steps: what is done to the stored tensor before, in this order.
        turned_plain: the tensor is stored transposed where the checkpoint does not pack it.
    """

    name: str
    source: tuple[int, ...]
    view: tuple[int, ...]
    start: int = 0
    repeat: int = 1
    row: int = 0
    steps: tuple[Step, ...] = ()
    turned_plain: bool = False

    def of_plain(self) -> Piece:
        """The piece where the checkpoint does not pack the tensor."""
        if not self.turned_plain:
            return self
        return replace(self, source=self.source[::-1], steps=(Transposed(), *self.steps))

    @property
    def rows(self) -> int:
        """Entries of the parameter's first axis that the piece fills."""
        return self.view[0] * self.repeat

    def arranged(self, tensor: Any) -> Any:
        """The stored tensor (of NumPy or JAX) as an array of shape `view`."""
        for step in self.steps:
            tensor = step(tensor)
        return tensor.reshape(self.view)

    @property
    def inputs(self) -> int:
        """Inputs of a stored matrix."""
        if Transposed() in self.steps:
            return self.source[0]
        return self.source[-1]

    @property
    def added(self) -> float:
        """The sum of the numbers that are added to every stored number."""
        return sum(step.value for step in self.steps if isinstance(step, Plus))


class Rounded(NamedTuple):
    """What the pieces of a rule fill, of which several parameters are made.

    Attributes:
        format: the format of these; if it is `rounded`, the pieces fill a plain weight, else the
            bytes of its rows.
        shape: of the plain weight or the bytes.
        experts: the first axis is that of experts, which are made one by one.
    """

    format: WeightFormat
    shape: tuple[int, ...]
    experts: bool = False


@dataclass(frozen=True)
class Rule:
    """One parameter and the pieces that fill it completely.

    Attributes:
        parameter: its dotted path in the model.
        pieces: in the order of their `start`.
        others: pieces of the other forms in which checkpoints may hold the same parameter.
        rounded: what the pieces fill, of which the parameters under the path are made. None: they
            fill the parameter itself.
    """

    parameter: str
    pieces: tuple[Piece, ...]
    others: tuple[tuple[Piece, ...], ...] = ()
    rounded: Rounded | None = None

    @property
    def forms(self) -> tuple[tuple[Piece, ...], ...]:
        """`pieces`, then the others."""
        return (self.pieces, *self.others)

    def for_tensors(self, names: Container[str]) -> Rule:
        """The rule with the one form that a checkpoint with these tensors holds; the first form
        where it holds none."""
        held = next(
            (form for form in self.forms if any(p.name in names for p in form)), self.pieces
        )
        return replace(self, pieces=held, others=())


@dataclass(frozen=True)
class Rows:
    """The part of a fused linear map that one checkpoint matrix fills.

    Attributes:
        count: entries along the second output axis, on each shard.
        repeat: shards that hold a copy of the same entries.
        order: the checkpoint's number of each entry along the third output axis, -1 for zeros; ()
            keeps them.
    """

    count: int
    repeat: int = 1
    order: tuple[int, ...] = ()


class Layout(Enum):
    """How a checkpoint stores the matrix of a linear map.

    Attributes:
        OUT_IN: [out, in]. If one tensor holds all parts of a fused map, one part follows another.
        IN_OUT: the same, transposed.
        OUT_IN_PACKED: [out, in] where the checkpoint packs the matrix, else transposed.
        GROUPED: [out, in], all parts in one tensor, group by group: the query heads of a key-value
            head, that key, that value.
        FOUR_BLOCKS: [out, in], queries, keys and values in one tensor of four blocks: a quarter of
            the queries, of the values, of the keys.
    """

    OUT_IN = "out, in"
    IN_OUT = "in, out"
    OUT_IN_PACKED = "out, in where packed"
    GROUPED = "groups, out, in"
    FOUR_BLOCKS = "4, out, in"
