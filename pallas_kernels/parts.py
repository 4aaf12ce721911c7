"""Products that are yet to be added up, scaled or normed, by whatever reads them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.norm import rms_norm
from pallas_kernels.target import HOPPER, Target


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parts:
    """A product `[T, *out]` in parts, so that no launch of its own adds them up. O outputs are in
    `out`.

    Attributes:
        sums: `[S, R, W]`, of shares of the columns; rows beyond T and columns beyond O are
            anything.
        scales: float32 factors of rows `[R]` and of columns `[O]`; () if there are none.
        shape: `(T, *out)`.
        dtype: of the product.
        done: `[R, O]`, of which the first `cut` columns of T rows are the product's, and `sums` has
            those after them; None: it has all.
        cut: columns that are done.
    """

    sums: Array
    scales: tuple[Array, ...]
    shape: tuple[int, ...] = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})
    done: Array | None = None
    cut: int = field(default=0, metadata={"static": True})

    def shaped(self, *out: int) -> Parts:
        """With other axes of outputs."""
        return dataclasses.replace(self, shape=(self.shape[0], *out))

    @property
    def whole(self) -> Array:
        """The product: shares are added in order in float32, scaled, and rounded to `dtype`, which
        `sums` may have been before."""
        T = self.shape[0]
        O = math.prod(self.shape[1:])
        total = jnp.sum(self.sums[:, :T, : O - self.cut].astype(jnp.float32), axis=0)
        if self.scales:
            of_rows, of_columns = self.scales
            total = total * of_rows[:T, None] * of_columns
        rest = total.astype(self.dtype)
        if self.done is not None:
            rest = jnp.concatenate([self.done[:T, : self.cut], rest], axis=1)
        return rest.reshape(self.shape)


# Products of few rows with long columns are made in shares: XLA would make some of its own, and add
# them up in one more launch. Measured: benchmarks/LOG.md
MEASURED_ON = HOPPER
SHARES = 4
MOST_ROWS = 1
FEWEST_COLUMNS = 8192
MOST_NUMBERS = 32 << 20  # of a weight; of larger ones an addition is a small part


def in_shares(x_TI: Array, w_OI: Array) -> Parts:
    """x · wᵀ in shares of the columns, float32."""
    T, I = x_TI.shape
    O = w_OI.shape[0]
    x_TSI, w_OSI = (array.reshape(-1, SHARES, I // SHARES) for array in (x_TI, w_OI))
    sums = lax.dot_general(
        x_TSI, w_OSI, (((2,), (2,)), ((1,), (1,))), preferred_element_type=jnp.float32
    )
    return Parts(sums, (), (T, O), x_TI.dtype)


def takes_shares(target: Target, x_TI: Array, outputs: int) -> bool:
    """Whether a product of these rows is faster in shares on a target."""
    rows, columns = x_TI.shape
    return (
        MEASURED_ON.met_by(target)
        and x_TI.dtype in (jnp.bfloat16, jnp.float16)
        and rows <= MOST_ROWS
        and columns >= FEWEST_COLUMNS
        and columns * outputs <= MOST_NUMBERS
        and columns % (8 * SHARES) == 0
    )


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NormedRows:
    """Rows `[T, D]` whose root-mean-square norm is meant.

    Attributes:
        y_TD: the rows.
        weight_D, eps: those of the norm.
    """

    y_TD: Array
    weight_D: Array
    eps: float = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.y_TD.shape

    @property
    def dtype(self) -> Any:
        return self.y_TD.dtype

    @property
    def whole(self) -> Array:
        """The norm."""
        return rms_norm(self.y_TD, self.weight_D, self.eps)


def added(
    dtype: Any, t: Array, load: Callable[[Any], Array], sums_ref: Any, *scale_refs: Any
) -> Array:
    """Row t of a `Parts` in a kernel, of `dtype`. `load` loads what is wanted of a row; all shares
    are loaded before the first is used."""
    rows = [load(sums_ref.at[share, t]).astype(jnp.float32) for share in range(sums_ref.shape[0])]
    total = functools.reduce(jnp.add, rows)
    if scale_refs:
        of_rows, of_columns = scale_refs
        total = total * of_rows[t] * load(of_columns)
    return total.astype(dtype)


type Product = Array | Parts | WeightedRows | NormedRows


def whole(product: Product) -> Array:
    """The product as one array."""
    if isinstance(product, Parts | WeightedRows | NormedRows):
        return product.whole
    return product
