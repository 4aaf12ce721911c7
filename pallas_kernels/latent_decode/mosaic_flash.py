"""Sizes of the Hopper kernel of latent decode, and its steps of online softmax on the tensor cores.

The first consumer, the leader, makes scores and weights. What the accumulators are to be scaled by,
and the weights, it leaves for the other in shared memory: an event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_flash import LOG2E, NEVER, ROWS, Carry, add_product
from pallas_kernels.mosaic_gpu import take

LSE = 2  # row of `sums`, after the factors
BLOCK = 64  # columns of a block of queries
BY_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What one compiled kernel is specialised to.

    Attributes:
        B, N: rows of the batch, query heads; heads: query heads of a block.
        W, V, C: numbers of a key, of a value, tokens of a page.
    """

    B: int
    N: int
    heads: int
    W: int
    V: int
    C: int
    dtype: Any
    scale: float
    interpret: Any

    @property
    def tiles(self) -> int:
        return self.N // self.heads

    @property
    def copies(self) -> int:
        """TMA copies of a tile: pages smaller than it come one by one."""
        return max(1, ROWS // self.C)

    def blocks(self, width: int) -> list[Any]:
        """The first `width` columns in blocks."""
        return [pl.ds(first, BLOCK) for first in range(0, width, BLOCK)]

    def columns(self, side: int) -> Any:
        """The columns of one consumer."""
        return pl.ds(side * self.V // 2, self.V // 2)


def start(spec: Spec) -> Carry:
    """The carry before any tile."""
    acc = jnp.full((ROWS, spec.V // 2), 0.0, jnp.float32)
    return (
        plgpu.layout_cast(acc, plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), NEVER, jnp.float32), BY_ROW),
        plgpu.layout_cast(jnp.full((ROWS,), 0.0, jnp.float32), BY_ROW),
    )


def _tell(sm: dict[str, Any], event: Array, factors: list[Array], weights: Array | None) -> None:
    """The leader leaves an event for the other consumer, which has heard the one before."""
    take(sm["heard"], event, 1)
    for i, factor in enumerate(factors):
        sm["sums"].at[i][...] = factor
    if weights is not None:
        sm["p"][...] = weights
    plgpu.commit_smem()
    plgpu.barrier_arrive(sm["told"].at[0])


def _hear(sm: dict[str, Any], count: int) -> list[Array]:
    """The factors of the next event."""
    plgpu.barrier_wait(sm["told"].at[0])
    return [plgpu.load(sm["sums"].at[i], layout=BY_ROW, optimized=False) for i in range(count)]


def fold(
    spec: Spec, sm: dict[str, Any], side: int, k: Any, place: tuple[Array, Array], carry: Carry
) -> Carry:
    """One step of online softmax over the tile `k`; `place` is the event's number, and the tokens
    that are there."""
    acc, top, total = carry
    event, count = place
    values = k.at[:, spec.columns(side)]
    if side == 1:
        (decay,) = _hear(sm, 1)
        acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
        acc = add_product(acc, sm["p"], values, spec.interpret)
        plgpu.barrier_arrive(sm["heard"].at[0])
        return acc, top, total
    scores = _scores(spec, sm["q"], k) * (spec.scale * LOG2E)
    token = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    scores = jnp.where(token < count, scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(axis=1))
    decay = jnp.exp2(top - new_top)
    p = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    total = total * decay + p.sum(axis=1)
    p16 = p.astype(spec.dtype)
    _tell(sm, event, [decay], p16)
    acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
    weight_tile = p16 if spec.interpret is None else sm["p"]
    return add_product(acc, weight_tile, values, spec.interpret), new_top, total


def _scores(spec: Spec, q: Any, k: Any) -> Array:
    """q·Kᵀ, block by block of columns."""

    def multiply(acc):  # type: ignore[no-untyped-def]
        for j, column in enumerate(spec.blocks(spec.W)):
            plgpu.wgmma(acc, q.at[j], k.at[:, column].T)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, ROWS), jnp.float32))


def merge(
    spec: Spec, sm: dict[str, Any], side: int, part: list[Any], event: Array, carry: Carry
) -> Carry:
    """The carry with a follower's part added, its outputs and log2-sum-exps. The leader has awaited
    the flag before it tells of the part."""
    acc, top, total = carry
    outputs, lse_ref = part
    if side == 1:
        decay, weight = _hear(sm, 2)
        plgpu.barrier_arrive(sm["heard"].at[0])
    else:
        lse = plgpu.load(lse_ref, layout=BY_ROW, optimized=False)
        new_top = jnp.maximum(top, lse)
        decay = jnp.exp2(top - new_top)
        weight = jnp.exp2(lse - new_top)
        _tell(sm, event, [decay, weight], None)
        top = new_top
        total = total * decay + weight
    part_columns = outputs.at[:, spec.columns(side)]
    values = plgpu.load(part_columns, layout=plgpu.Layout.WGMMA, optimized=False).astype(
        jnp.float32
    )
    acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
    return acc + values * lax.broadcast_in_dim(weight, acc.shape, [0]), top, total


def keep(spec: Spec, sm: dict[str, Any], side: int, event: Array, carry: Carry) -> None:
    """A row's normalised outputs into the buffer of its queries, which nobody needs any more."""
    acc, top, total = carry
    if side == 1:
        (factor,) = _hear(sm, 1)
        plgpu.barrier_arrive(sm["heard"].at[0])
    else:
        factor = 1 / total
        sm["sums"].at[LSE][...] = top + jnp.log2(total)
        _tell(sm, event, [factor], None)
    out = acc * lax.broadcast_in_dim(factor, acc.shape, [0])
    for j, column in enumerate(range(0, spec.V // 2, BLOCK)):
        block = side * spec.V // 2 // BLOCK + j
        sm["q"].at[block][...] = out[:, column : column + BLOCK].astype(spec.dtype)
    plgpu.commit_smem()
