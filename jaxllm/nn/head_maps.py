"""What some families do to heads between the projection and the context's rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.heads import Heads
from jaxllm.nn.linear import Init, Stored
from jaxllm.nn.norm import RMSNorm
from jaxllm.nn.rope import Rotation
from jaxllm.nn.rules import Ordered, Piece, Rule
from pallas_kernels.rope_write import HeadRows, rotated


class HeadMap(Protocol):
    """Changes rows of heads, and says which rotation is left to do."""

    def __call__(
        self, row_TXCH: Array, queries: int, rotation: Rotation, context: RowContext
    ) -> tuple[Array, Rotation]:
        """The C heads of each of this device's X shards, bias added: `queries` query heads, then
        key heads, then as many value heads."""


def _split(row_TXCH: Array, queries: int) -> list[Array]:
    keys = (row_TXCH.shape[2] - queries) // 2
    return jnp.split(row_TXCH, (queries, queries + keys), axis=2)


class HeadNorm(Stored):
    """A norm of query heads, or of key heads, with a weight for each dimension of each head."""

    def __init__(self, init: Init, heads: Heads, eps: float, *, keys: bool):
        if keys:
            count = heads.kv_per_shard
        else:
            count = heads.query_per_shard
        shape = (heads.shards, count, heads.stored_dim)
        self.weight = init.full(shape, ("shard", None, "head_dim"), 1.0)
        self.heads = heads
        self.eps = eps
        if keys:
            self.repeat = heads.repeat
        else:
            self.repeat = 1

    def __call__(self, x_TXCH: Array, context: RowContext) -> Array:
        raise NotImplementedError

    def rules(self, name: str) -> Iterator[Rule]:
        shards, count, stored = self.weight.get_value().shape
        dim = self.heads.dim
        rows = shards // self.repeat
        steps = (Ordered((rows, count, dim), 2, order),) if (order := self.heads.key_order) else ()
        source = self.source(rows * count, dim)
        view = (rows, count, stored)
        yield Rule("weight", (Piece(f"{name}.weight", source, view, 0, self.repeat, steps=steps),))

    def source(self, heads: int, dim: int) -> tuple[int, ...]:
        """The shape of the checkpoint tensor."""
        return heads, dim


class WholeRMSNorm(HeadNorm):
    """x / rms(x) · weight over all heads of a token at once."""

    def __call__(self, x_TXCH: Array, context: RowContext) -> Array:
        x = x_TXCH.astype(jnp.float32)
        shape = x_TXCH.shape
        # Copies of heads do not change the mean
        numbers = self.heads.shards * shape[2] * self.heads.dim
        squares = context.collective.sum(jnp.sum(x * x, axis=(1, 2, 3), keepdims=True))
        mean = squares / numbers
        scaled = x * lax.rsqrt(mean + self.eps) * self.weight[...].astype(jnp.float32)
        return scaled.astype(x_TXCH.dtype)

    def source(self, heads: int, dim: int) -> tuple[int, ...]:
        return (heads * dim,)


class HeadLayerNorm(HeadNorm):
    """(x - mean(x)) / deviation(x) · weight, head by head."""

    def __call__(self, x_TXCH: Array, context: RowContext) -> Array:
        weight = self.weight[...].astype(jnp.float32)
        return (self.standard(x_TXCH) * weight).astype(x_TXCH.dtype)

    def standard(self, x_TXCH: Array) -> Array:
        """(x - mean(x)) / deviation(x), in float32."""
        x = x_TXCH.astype(jnp.float32)
        dim = self.heads.dim
        order = self.heads.key_order
        centred = x - jnp.sum(x, axis=-1, keepdims=True) / dim
        if -1 in order:  # heads are stored with zeros between
            centred = centred * jnp.array([float(entry >= 0) for entry in order])
        return centred * lax.rsqrt(
            jnp.sum(centred * centred, axis=-1, keepdims=True) / dim + self.eps
        )


class NormedHeads(nnx.Module):
    """Norms of queries and of keys, before they turn."""

    def __init__(self, init: Init, heads: Heads, eps: float, norm_class: type[HeadNorm]):
        self.q_norm = norm_class(init, heads, eps, keys=False)
        self.k_norm = norm_class(init, heads, eps, keys=True)

    def __call__(
        self, row_TXCH: Array, queries: int, rotation: Rotation, context: RowContext
    ) -> tuple[Array, Rotation]:
        q, k, v = _split(row_TXCH, queries)
        return jnp.concatenate(
            [self.q_norm(q, context), self.k_norm(k, context), v], axis=2
        ), rotation


class TurnedNorms(nnx.Module):
    """Norms of each query head and of each key head, of width `dim`, after they have turned."""

    def __init__(self, dim: int, q_norm: RMSNorm, k_norm: RMSNorm):
        self.dim = dim
        self.q_norm = q_norm
        self.k_norm = k_norm

    def __call__(
        self, row_TXCH: Array, queries: int, rotation: Rotation, context: RowContext
    ) -> tuple[Array, Rotation]:
        cos_TF = rotation.cos_TF
        sin_TF = rotation.sin_TF
        wider = ((0, 0), (0, row_TXCH.shape[-1] // 2 - cos_TF.shape[1]))  # zeros do not turn
        turn = jnp.pad(cos_TF, wider), jnp.pad(sin_TF, wider)
        q, k, v = rotated(HeadRows(row_TXCH, *turn, None, None, 0.0, queries))
        q = self._normed(q, self.q_norm)
        k = self._normed(k, self.k_norm)
        still = Rotation(jnp.ones_like(cos_TF), jnp.zeros_like(sin_TF))
        return jnp.concatenate([q, k, v], axis=2), still

    def _normed(self, x_TXCH: Array, norm: RMSNorm) -> Array:
        x = x_TXCH.astype(jnp.float32)
        mean = jnp.sum(x * x, axis=-1, keepdims=True) / self.dim
        scaled = x * lax.rsqrt(mean + norm.eps) * norm.weight[...].astype(jnp.float32)
        return scaled.astype(x_TXCH.dtype)


@dataclass(frozen=True)
class ScaledQueries:
    """Queries times the factor of their token's position."""

    def __call__(
        self, row_TXCH: Array, queries: int, rotation: Rotation, context: RowContext
    ) -> tuple[Array, Rotation]:
        q, *others = _split(row_TXCH, queries)
        assert rotation.query_T is not None
        scaled = (q.astype(jnp.float32) * rotation.query_T[:, None, None, None]).astype(q.dtype)
        return jnp.concatenate([scaled, *others], axis=2), rotation


@dataclass(frozen=True)
class BiasedKeys:
    """Scores get what the rotation has for keys: in heads of width `dim` that are stored wider by
    two at least, a spare number of each half is 1 in queries. In keys the first is what is added,
    the second what the keys' type rounds off it."""

    dim: int

    def __call__(
        self, row_TXCH: Array, queries: int, rotation: Rotation, context: RowContext
    ) -> tuple[Array, Rotation]:
        q, k, v = _split(row_TXCH, queries)
        assert rotation.key_TN is not None and k.shape == q.shape
        own_TN = context.collective.own(rotation.key_TN, axis=1)
        bias = own_TN.reshape(q.shape[:3])
        coarse = bias.astype(k.dtype)
        fine = (bias - coarse.astype(bias.dtype)).astype(k.dtype)
        for spare, part in ((-(-self.dim // 2), coarse), (-1, fine)):
            q = q.at[..., spare].set(1)
            k = k.at[..., spare].set(part)
        return jnp.concatenate([q, k, v], axis=2), rotation


@dataclass(frozen=True)
class Clipped:
    """Queries, keys and values from -limit to limit."""

    limit: float

    def __call__(
        self, row_TXCH: Array, queries: int, rotation: Rotation, context: RowContext
    ) -> tuple[Array, Rotation]:
        return jnp.clip(row_TXCH, -self.limit, self.limit), rotation
