"""The weights of a mixture's experts in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
from jax import Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scale", "input_scale"),
    meta_fields=("group", "inputs"),
)
@dataclass(frozen=True)
class ScaledExperts:
    """The weights of all experts, see `scaled_matmul`.

    Attributes:
      values: `[E, O, I]`.
      scale: `[E, O, G]`.
      group: columns that share a scale.
      inputs: how x is rounded.
      input_scale: float32 `[E]`, of inputs that are "given".
    """

    values: Array
    scale: Array
    group: int
    inputs: str
    input_scale: Array | None = None
