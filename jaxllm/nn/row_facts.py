"""What is known of each row of a forward beside its hidden state: its token, its position, and what
else an engine brings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import jax
from jax import Array

TOKEN = "token"
POSITION = "position"


@jax.tree_util.register_pytree_node_class
class RowFacts:
    """Facts of T rows by name, each `[T, …]`.

    They are picked with the rows, and made in each stage's own programs: stages hand on hidden
    states alone. A fact is picked when it is read, so one that no block reads costs no program
    anything.
    """

    def __init__(self, columns: Mapping[str, Array], row_R: Array | None = None):
        """Facts of all rows that the `columns` have, or of the rows `row_R` of these."""
        self._columns = dict(columns)
        self._row_R = row_R

    @property
    def token_T(self) -> Array:
        """The token of each row (int32)."""
        return self[TOKEN]

    @property
    def position_T(self) -> Array:
        """The position of each row in its sequence (int32)."""
        return self[POSITION]

    def rows(self, row_R: Array) -> RowFacts:
        """The facts of these rows alone."""
        if self._row_R is not None:
            row_R = self._row_R[row_R]
        return RowFacts(self._columns, row_R)

    def __getitem__(self, name: str) -> Array:
        """Raises KeyError for a fact that this forward's caller does not bring."""
        column = self._columns[name]
        if self._row_R is None:
            return column
        return column[self._row_R]

    def tree_flatten(self) -> tuple[tuple[dict[str, Array], Array | None], None]:
        """For JAX."""
        return (self._columns, self._row_R), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[dict[str, Array], Array | None]) -> Self:
        """For JAX."""
        return cls(*children)


NO_FACTS = RowFacts({})


def facts_of(token_T: Array, position_T: Array, **others: Array) -> RowFacts:
    """The facts of rows, with `others` by name."""
    return RowFacts({TOKEN: token_T, POSITION: position_T, **others})
