"""Where segments lie."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """Segments that lie one after another among T tokens.

    A token's segment is the tokens `first_T` to `end_T`, itself included. The end of a token of no
    segment is not after its first.
    """

    first_T: Array  # int32
    end_T: Array  # int32
    longest: int = field(metadata={"static": True})  # tokens of a segment at most
