"""Products that are yet to be added up and scaled, by whatever reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parts:
    """A product `[T, O]` in parts, so that no launch of its own adds them up.

    Attributes:
        sums: `[S, R, W]`, of shares of the columns; rows beyond T and columns beyond O are
            anything.
        scales: float32 factors of rows `[R]` and of columns `[O]`; () if there are none.
        shape: `(T, O)`.
        dtype: of the product.
    """

    sums: Array
    scales: tuple[Array, ...]
    shape: tuple[int, int] = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})

    @property
    def whole(self) -> Array:
        """The product: shares are added in order in float32, scaled, and rounded to `dtype`, which
        `sums` may have been before."""
        T, O = self.shape  # noqa: E741
        total = jnp.sum(self.sums[:, :T, :O].astype(jnp.float32), axis=0)
        if self.scales:
            of_rows, of_columns = self.scales
            total = total * of_rows[:T, None] * of_columns
        return total.astype(self.dtype)


class WeightedRows(NamedTuple):
    """Some rows for each token, `[T, D]` when they are added up.

    Attributes:
        y_PD: all rows.
        place_TK: those of each token.
        weight_TK: their weights (float32).
        own_TK: which of them count; None: all.
    """

    y_PD: Array
    place_TK: Array
    weight_TK: Array
    own_TK: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.place_TK.shape[0], self.y_PD.shape[1]

    @property
    def dtype(self) -> Any:
        return self.y_PD.dtype

    @property
    def total(self) -> Array:
        """Each token's rows times their weights, added up in float32."""
        y_TKD = self.y_PD[self.place_TK].astype(jnp.float32)
        if self.own_TK is not None:  # the others hold anything
            y_TKD = jnp.where(self.own_TK[:, :, None], y_TKD, 0.0)
        return jnp.sum(y_TKD * self.weight_TK[:, :, None], axis=1)

    @property
    def whole(self) -> Array:
        """The same, rounded."""
        return self.total.astype(self.dtype)


type Product = Array | Parts | WeightedRows


def whole(product: Product) -> Array:
    """The product as one array."""
    return product.whole if isinstance(product, Parts | WeightedRows) else product
