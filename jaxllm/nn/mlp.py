"""Feed-forward blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.config import ConfigError
from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.linear import Init, Linear, Stored
from jaxllm.nn.rules import Piece, Rows, Rule
from pallas_kernels.gated_matmul import Gated, computes
from pallas_kernels.parts import Product
from pallas_kernels.scaled_matmul import Inputs

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "silu": jax.nn.silu,
        "swish": jax.nn.silu,
        "gelu": functools.partial(jax.nn.gelu, approximate=False),
        "gelu_new": jax.nn.gelu,
        "gelu_pytorch_tanh": jax.nn.gelu,
        "gelu_python": functools.partial(jax.nn.gelu, approximate=False),
        "gelu_fast": jax.nn.gelu,
        "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
        "relu": jax.nn.relu,
        "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    }
)


def is_fused(activation: str) -> bool:
    """Whether kernels compute this one of `ACTIVATIONS` with the products of gate and up."""
    return computes(Gated(ACTIVATIONS[activation]))


def workspace(activation: str, stream: int, product: int) -> int:
    """As of `nn.weight.protocol.Held`, of plain weights: with products of gate and up apart, where
    no kernel makes that of both."""
    if is_fused(activation):
        return 4 * stream + product
    return 5 * stream + 2 * product


type FeedForward = Callable[[Any, RowContext], Product]  # of tokens, or what its reader takes


def check_inner(inner: int, shards: int) -> None:
    """Raises ConfigError where a feed-forward's inner width does not divide over the devices."""
    if inner % shards:
        raise ConfigError(
            f"a feed-forward of width {inner} does not divide over {shards} tensor shards; "
            "choose another tensor_parallel_size"
        )


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) · up(x)).

    `gate_up` is [X, 2, F/X, D]: the gate rows of each shard, then its up rows.
    """

    def __init__(
        self, init: Init, width: int, inner: int, shards: int, activation: str, bias: bool = False
    ):
        check_inner(inner, shards)
        axes = ("shard", None, None, "embed")
        out = (shards, 2, inner // shards)
        parts = (Rows(1), Rows(1))
        self.gate_up = Linear(init, out, (width,), axes, bias, parts=parts)
        self.down = Linear(init, (width,), (inner,), ("embed", "mlp"), bias)
        self.gating = Gated(ACTIVATIONS[activation])

    @property
    def reader(self) -> Linear:
        """See `linear.reader_of`."""
        return self.gate_up

    def __call__(self, x_TD: Inputs, context: RowContext) -> Product:
        gated = self.gate_up.gated(x_TD, self.gating, context, self.down)
        if gated is None:
            both = self.gate_up(x_TD, context)
            gated = self.gating(both[:, :, 0], both[:, :, 1]).reshape(x_TD.shape[0], -1)
        return self.down.part(gated, context)


class MLP(nnx.Module):
    """down(activation(up(x)))."""

    def __init__(self, init: Init, width: int, inner: int, activation: str, bias: bool = False):
        self.up = Linear(init, (inner,), (width,), ("mlp", "embed"), bias)
        self.down = Linear(init, (width,), (inner,), ("embed", "mlp"), bias)
        self.activation = ACTIVATIONS[activation]

    @property
    def reader(self) -> Linear:
        """See `linear.reader_of`."""
        return self.up

    def __call__(self, x_TD: Inputs, context: RowContext) -> Product:
        return self.down.part(self.activation(self.up(x_TD, context)), context)


class XIELU(Stored):
    """p·x² + beta·x where x is positive, else n·(e^min(x, eps) - 1 - x) + beta·x; p is
    softplus(alpha_p), n is beta + softplus(alpha_n).

    See https://arxiv.org/abs/2411.13010. `weight` [4, 1] has what a layer learned, then constants.
    """

    def __init__(self, init: Init):
        self.weight = replace(init, dtype=jnp.float32).full((4, 1), (None, None), 0.5)

    def __call__(self, x: Array) -> Array:
        alpha_p, alpha_n, beta, eps = self.weight[...][:, 0]
        x32 = x.astype(jnp.float32)
        above = jax.nn.softplus(alpha_p) * x32 * x32
        below = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(jnp.minimum(x32, eps)) - x32)
        return (jnp.where(x32 > 0, above, below) + beta * x32).astype(x.dtype)

    def rules(self, name: str) -> Iterator[Rule]:
        shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
        pieces = (
            Piece(f"{name}.{leaf}", shape, (1, 1), row=row)
            for row, (leaf, shape) in enumerate(shapes.items())
        )
        yield Rule("weight", tuple(pieces))
