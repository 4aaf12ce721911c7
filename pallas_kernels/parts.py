"""Products that are yet to be added up and scaled, by whatever reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
        """The product: shares are added in order in float32, scaled, and rounded once."""
        T, O = self.shape  # noqa: E741
        total = jnp.sum(self.sums[:, :T, :O].astype(jnp.float32), axis=0)
        if self.scales:
            of_rows, of_columns = self.scales
            total = total * of_rows[:T, None] * of_columns
        return total.astype(self.dtype)


type Product = Array | Parts


def whole(product: Product) -> Array:
    """The product as one array."""
    return product.whole if isinstance(product, Parts) else product
