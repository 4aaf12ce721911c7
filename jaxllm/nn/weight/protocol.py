"""What a linear map asks of its weight, whatever numbers it is held in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from jax import Array

from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.rules import Piece, Rule
from pallas_kernels.grouped_matmul import Gating, Groups


class Fill(Protocol):
    """Which checkpoint tensors fill an array with a weight's output axes."""

    def __call__(self, leaf: str, columns: int | None = None) -> tuple[Piece, ...]:
        """Pieces of the tensors `{name}.{leaf}`, `[out, in]`; or, given `columns`, of such with as
        many columns, for an array `[*out, columns]`."""


class Weight(Protocol):
    """The weight `[*out, *inp]` of a linear map, or `[E, out, inp]` of one for each expert.

    A scheme is a file of this room with a class of this protocol: a parameter, or a module of
    several. The methods that it has no use for, it need not have.
    """

    def product(self, x: Array, dims: int, context: RowContext) -> Array:
        """`[T, *inp]` → `[T, *out]`: the last `dims` axes are contracted."""

    def gated(self, x_TD: Array, context: RowContext) -> Array | None:
        """silu(gate(x)) · up(x) `[T, X·F]` of a weight `[X, 2, F, D]` in one pass; None where two
        products are faster."""

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
        """What fills the parameters, which lie at `path` in the map."""
