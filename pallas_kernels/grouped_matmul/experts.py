"""The weights of a mixture's experts in 16 bits."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array


class Experts(NamedTuple):
    """Weights and biases of all experts: gate above up, and down."""

    gate_up_EOI: Array
    down_EDF: Array
    gate_up_bias_EO: Array | None = None
    down_bias_ED: Array | None = None
