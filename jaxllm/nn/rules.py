"""The rule table: which checkpoint tensors fill which parameter. Imports no jax.

Modules that hold parameters yield their own rules (`rules` of Linear, Embedding and RMSNorm);
`Decoder.rules` gathers them under the names of a family.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor that fills a parameter, or a part of it.

    `arranged` turns the stored tensor into the piece. Its entries along the first axis are then
    repeated, and the result fills parameter[row : row + rows, start : start + view[1]], or all of a
    parameter that has one piece. A further step (slice, permutation, transpose, a named transform)
    becomes a field here and a line in `arranged`.

    Attributes:
        name: of the checkpoint tensor.
        source: its shape.
        view: the shape that it is seen as, with the parameter's number of axes.
        start: first index along the parameter's second axis.
        repeat: entries of the parameter that each entry of the first axis fills.
        row: first index along the parameter's first axis.
    """

    name: str
    source: tuple[int, ...]
    view: tuple[int, ...]
    start: int = 0
    repeat: int = 1
    row: int = 0

    @property
    def rows(self) -> int:
        """Entries of the parameter's first axis that the piece fills."""
        return self.view[0] * self.repeat

    def arranged(self, tensor: Any) -> Any:
        """The stored tensor (of NumPy or JAX) as a view of shape `view`."""
        return tensor.reshape(self.view)


@dataclass(frozen=True)
class Rule:
    """One parameter and the pieces that fill it completely.

    Attributes:
        parameter: its dotted path in the model.
        pieces: in the order of their `start`.
        others: pieces of the other forms in which checkpoints may hold the same parameter.
    """

    parameter: str
    pieces: tuple[Piece, ...]
    others: tuple[tuple[Piece, ...], ...] = ()

    def for_tensors(self, names: Container[str]) -> Rule:
        """The rule with the one form that a checkpoint with these tensors holds; the first form
        where it holds none."""
        forms = (self.pieces, *self.others)
        held = next((form for form in forms if any(p.name in names for p in form)), self.pieces)
        return Rule(self.parameter, held)


@dataclass(frozen=True)
class Rows:
    """The part of a fused linear map that one checkpoint matrix fills.

    Attributes:
        count: entries along the second output axis, on each shard.
        repeat: shards that hold a copy of the same entries.
    """

    count: int
    repeat: int = 1
