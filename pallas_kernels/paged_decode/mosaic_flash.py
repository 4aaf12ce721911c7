"""Sizes of the Hopper kernel of paged decode, and its steps of online softmax on the tensor
cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_flash
from pallas_kernels.mosaic_flash import (
    LOG2E,
    NEVER,
    ROWS,
    Carry,
    PagedSpec,
    add_product,
    product,
    weights_operand,
)

TILE = 64  # tokens of one K or V slot of the ring; parts come as tiles too, so it is ROWS


class Tuning(NamedTuple):
    """Sizes that change speed alone. The grid has at most `blocks` blocks: splits x KV heads."""

    stages: int = 3  # slots of the ring of K and V tiles
    queries: int = 2  # query buffers
    blocks: int = 132
    min_tiles: int = 2  # smallest share of one block
    # Tiles that a block reads in the time of a merge by flags. Where shares of whole rows are no
    # longer than equal ones and these, rows are not split
    merge: int = 0
    # Blocks that share a row and merge through distributed shared memory; 0: equal shares of all
    # rows, merged by flags
    cluster: int = 0
    swapped: bool = False  # keys for rows of the products, not queries; with clusters alone
    # Warpgroups that take a block's tiles in turn; 2 over 8-bit pages alone, with an even number of
    # stages
    consumers: int = 1


@dataclass(frozen=True, kw_only=True)
class Spec(PagedSpec):
    """What one compiled kernel is specialised to.

    K and G are those of thread blocks: a KV head with more query heads than a block takes has
    several blocks, which read the same pages.

    Attributes:
        B: rows of the batch; N: query heads.
        group: G padded to 8, 16, 32 or 64.
        tiles: blocks of a KV head.
    """

    B: int
    N: int
    group: int
    tiles: int
    tuning: Tuning

    @property
    def parts(self) -> int:
        """Slots of the ring of parts, where keys and values have one of their own."""
        if self.H > 128:
            return 1
        return 2

    def kv_head(self, h: Array) -> Array:
        """The KV head of block `h`."""
        if self.tiles == 1:
            return h
        return lax.div(h, jnp.int32(self.tiles))

    @property
    def overlap(self) -> int:
        """Query heads that the last two tiles of a KV head share, where tiles do not divide its
        heads: both compute them, and the last but one stores them."""
        return (self.K * self.G - self.N) * self.tiles // self.K

    def is_last(self, h: Array) -> Array:
        """Whether block `h` is the last of its KV head."""
        return lax.rem(h, jnp.int32(self.tiles)) == self.tiles - 1

    def first_head(self, h: Array) -> Array:
        """First query head of block `h`."""
        if not self.overlap:
            return h * self.G
        before = self.kv_head(h) + self.is_last(h).astype(jnp.int32)
        return h * self.G - before * self.overlap

    def first_query(self, b: Array, h: Array) -> tuple[Array, Array]:
        """First of the `group` rows of q `[B * N, H]` that a block reads, and where among them its
        own G begin (0 but at the end)."""
        if self.overlap:
            first_own = b * self.N + self.first_head(h)
        else:
            first_own = (b * self.K + h) * self.G
        first = jnp.minimum(first_own, max(self.B * self.N - self.group, 0))
        return first, first_own - first

    @property
    def copies(self) -> int:
        """TMA copies of one tile: pages smaller than it come one by one."""
        return max(1, TILE // self.C)


class Tiles(NamedTuple):
    """The tiles of one row that a block takes.

    Attributes:
        entry: of the block's ring: that of the first tile; the others' follow.
        count: how many they are.
        first: position of the first tile's first token.
        stride: tokens from the beginning of a tile to that of the next.
        length: of the row, in tokens.
    """

    entry: Array
    count: Array
    first: Array
    stride: int
    length: Array

    def position(self, i: Array) -> Array:
        """Position of the first token of tile `i`."""
        return self.first + i * self.stride


def start(H: int, sinks: list[Array] | None, first_row: Array, begins: Array) -> Carry:
    """Accumulator, running maximum (log2 domain) and running sum before any tile.

    The split that `begins` a row counts the sinks of its queries, which lie in the tile from
    `first_row` on; a sink is a key with no value.
    """
    carry = mosaic_flash.start(H)
    if sinks is None:
        return carry
    acc, top, total = carry
    query = (
        plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        - first_row
    )
    for i, sink in enumerate(sinks):
        here = jnp.logical_and(query == i, begins)
        top = jnp.where(here, jnp.maximum(sink * LOG2E, NEVER), top)
        total = jnp.where(here, 1.0, total)
    return acc, top, total


def scores_of(spec: Spec, q: Any, k: Any, first: Array, length: Array) -> Array:
    """q·Kᵀ in the log2 domain, soft-capped, -inf where unseen; float32 `[ROWS, tile]`. The tile's
    first token is at position `first`."""
    return visible(spec, product(q, k.T, (ROWS, TILE), lambda: None), 1, first, length)


def visible(spec: Spec, scores: Array, axis: int, first: Array, length: Array) -> Array:
    """Scores in the log2 domain, soft-capped, -inf where unseen. Tokens lie along `axis`, from
    position `first` on."""
    if spec.softcap is None:
        scores = scores * (spec.scale * LOG2E)
    else:
        scores = jnp.tanh(scores * (spec.scale / spec.softcap)) * (spec.softcap * LOG2E)
    token = plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=plgpu.Layout.WGMMA) + first
    seen = token < length
    if spec.window is not None:
        seen = jnp.logical_and(seen, token >= length - spec.window)
    return jnp.where(seen, scores, -jnp.inf)


def part_scores(group: int, lse: Array, parts: Array) -> Array:
    """Scores of a tile of parts as keys: row j is part j // group's output of query j % group, seen
    by that query alone, if the part is one of the first `parts`."""
    query = plgpu.broadcasted_iota(jnp.int32, (ROWS, ROWS), 0, layout=plgpu.Layout.WGMMA)
    key = plgpu.broadcasted_iota(jnp.int32, (ROWS, ROWS), 1, layout=plgpu.Layout.WGMMA)
    visible = jnp.logical_and(
        lax.bitwise_and(key, jnp.int32(group - 1)) == query, key < parts * group
    )
    return jnp.where(visible, lax.broadcast_in_dim(lse, (ROWS, ROWS), [1]), -jnp.inf)


def zero_tail(v: Any, H: int, count: Array) -> None:
    """Zeroes the values from token `count` of a tile on: they get weight 0, but 0 · NaN is NaN and
    a page may hold anything."""

    @pl.when(count < TILE)
    def _() -> None:
        token = plgpu.broadcasted_iota(jnp.int32, (TILE, H), 0, layout=plgpu.Layout.WGMMA)
        values = plgpu.load(v, layout=plgpu.Layout.WGMMA)
        v[...] = jnp.where(token < count, values, jnp.zeros_like(values))
        plgpu.commit_smem()


def fold(spec: Spec, carry: Carry, scores: Array, v: Any, p_sm: Any) -> Carry:
    """One step of online softmax: scores `[ROWS, tile]` in the log2 domain against the values in
    shared memory."""
    acc, top, total = carry
    new_top = jnp.maximum(top, scores.max(axis=1))
    decay = jnp.exp2(top - new_top)
    p = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    total = total * decay + p.sum(axis=1)
    acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
    p16 = weights_operand(p.astype(spec.dtype), p_sm)
    return add_product(acc, p16, v, spec.interpret), new_top, total
