"""Rows of a layer's fused projection, and what turns them into queries, keys and values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.parts import Parts, Product, whole


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadRows:
    """A product of T tokens with a fused weight, before bias, norm and rotation: query heads, then
    key heads, then value heads.

    The rows are `[T, C, H]`, or `[T, X, C, H]` for X shards one after another, each with heads of
    all three kinds.
    """

    qkv: Product  # [T, ..., C, H]
    cos: Array  # float32 [T, H/2]
    sin: Array  # float32 [T, H/2]
    bias: Array | None  # [..., C, H]
    # [H] each: weights of a root-mean-square norm of query heads and of key heads
    norms: tuple[Array, Array] | None
    eps: float = field(metadata={"static": True})  # of the norms
    queries: int = field(metadata={"static": True})  # query heads among the C
    # [K, 2], of each head's keys and values in 8 bits; None: each token's own
    kv_scales: Array | None = None
    # Numbers of a head that the norms' mean is over; None: all. The others are zeros
    dim: int | None = field(default=None, metadata={"static": True})

    @property
    def keys(self) -> int:
        """Key heads, and value heads, among the C."""
        return (self.qkv.shape[-2] - self.queries) // 2

    @property
    def of_one_shard(self) -> HeadRows:
        """`[T, C, H]` of `[T, 1, C, H]`."""
        qkv = self.qkv
        bias = None
        if self.bias is not None:
            bias = self.bias[0]
        if isinstance(qkv, Parts):
            shard_qkv = qkv.shaped(*qkv.shape[2:])
        else:
            shard_qkv = whole(qkv)[:, 0]
        return dataclasses.replace(self, qkv=shard_qkv, bias=bias)


def rotated(rows: HeadRows) -> tuple[Array, Array, Array]:
    """Queries, keys and values `[T, ..., heads, H]`: bias, norm and rotation of the pairs (i, i +
    H/2) in float32, rounded once."""
    q, k, v = (y.astype(rows.qkv.dtype) for y in exactly_rotated(rows))
    return q, k, v


def exactly_rotated(rows: HeadRows) -> tuple[Array, Array, Array]:
    """`rotated` before it is rounded: float32."""
    x = whole(rows.qkv).astype(jnp.float32)
    if rows.bias is not None:
        x = x + rows.bias.astype(jnp.float32)
    q, k, v = jnp.split(x, (rows.queries, rows.queries + rows.keys), axis=-2)
    if rows.norms is not None:
        q, k = (_normed(y, weight, rows) for y, weight in zip((q, k), rows.norms, strict=True))
    lead = (rows.cos.shape[0],) + (1,) * (x.ndim - 2)
    cos, sin = (angle.reshape(*lead, -1) for angle in (rows.cos, rows.sin))
    return _turned(q, cos, sin), _turned(k, cos, sin), v


def _normed(x: Array, weight_H: Array, rows: HeadRows) -> Array:
    if rows.dim is None:
        mean = jnp.mean(x * x, axis=-1, keepdims=True)
    else:
        mean = jnp.sum(x * x, axis=-1, keepdims=True) / rows.dim
    return x * lax.rsqrt(mean + rows.eps) * weight_H.astype(jnp.float32)


def _turned(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def turned(x: Array, cos: Array, sin: Array) -> Array:
    """The pairs (i, i + H/2) of the last axis, turned in float32 and rounded once."""
    return _turned(x.astype(jnp.float32), cos, sin).astype(x.dtype)
