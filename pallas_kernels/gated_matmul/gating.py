"""activation(gate) · up: what a gated feed-forward makes of two products, and how kernels compute
it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import Array, lax

type Gating = Callable[[Array, Array], Array]  # of gate and up, float32, element by element


@dataclass(frozen=True)
class Gated:
    """activation(gate) · up."""

    activation: Callable[[Array], Array]

    def __call__(self, gate: Array, up: Array) -> Array:
        return self.activation(gate) * up


def _of_gelu(x: Array) -> Array:
    """(1 + tanh(u)) / 2 is σ(2u)."""
    return x * (math.sqrt(8 / math.pi) + math.sqrt(8 / math.pi) * 0.044715 * x * x)


# Activations that are x · σ(argument(x)), with their arguments
ARGUMENTS: Mapping[Callable[..., Array], Callable[[Array], Array]] = MappingProxyType(
    {jax.nn.silu: lambda x: x, jax.nn.gelu: _of_gelu}
)
# the latter by tanh
SILU = Gated(jax.nn.silu)
GELU = Gated(jax.nn.gelu)


def computes(gating: Gating) -> bool:
    """Whether kernels have the gating's functions."""
    return "erf" not in str(jax.make_jaxpr(gating)(0.0, 0.0))


def in_kernels(gating: Gating) -> Gating:
    """The same as kernels compute it, with a sigmoid where it has one: exact to float32, where
    their tanh is wrong by 5e-4, and without a division, which would take longer than the rest: it
    is the square of a reciprocal root."""
    argument = ARGUMENTS.get(gating.activation) if isinstance(gating, Gated) else None
    if argument is None:
        return gating
    return functools.partial(_by_sigmoid, argument)


def _by_sigmoid(argument: Callable[[Array], Array], gate: Array, up: Array) -> Array:
    root = lax.rsqrt(1.0 + jnp.exp(-argument(gate)))
    return gate * (root * root) * up
