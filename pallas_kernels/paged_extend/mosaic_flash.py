"""Sizes of the Hopper kernel of paged extend, and its own steps of online softmax on the tensor
cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_flash import LOG2E, NEVER, ROWS, Carry, PagedSpec


class Tuning(NamedTuple):
    """Sizes that change speed alone. The grid has at most `blocks` blocks: splits x KV heads."""

    stages: int = 2  # slots of the K and V rings
    groups: int = 2  # compute warpgroups; a key tile has as many tokens as they have rows
    blocks: int = 132
    min_tiles: int = 1  # smallest share of one block
    shared_up_to: int = 512  # tokens of a step up to which heads share a tile's rows


@dataclass(frozen=True, kw_only=True)
class Spec(PagedSpec):
    """What one compiled kernel is specialised to.

    Attributes:
        T: tokens of the step.
        F: width of values and outputs.
        share: query heads that share a tile.
        tokens_first: pages are [C, K, H], not [K, C, H].
    """

    T: int
    F: int
    share: int
    tuning: Tuning
    tokens_first: bool = False

    @property
    def size(self) -> int:
        """Keys of a tile, and query rows of a block: a part of an output then fits a slot of
        values."""
        return ROWS * self.tuning.groups

    @property
    def tokens(self) -> int:
        """Tokens of one warpgroup's tile."""
        return ROWS // self.share

    @property
    def units(self) -> int:
        """Units of an item."""
        return self.G // self.share

    @property
    def boxes(self) -> bool:
        """Whether a tile is one box of tokens of one head; the others are copied token by token."""
        return self.share == 1 and self.size <= self.T

    @property
    def copies(self) -> int:
        """Pages of one tile."""
        return max(1, self.size // self.C)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread: of the producer and of a compute warpgroup.

        Three warpgroups start with 168 each and may have 504 together: one that asks for more than
        the others gave back waits for ever. Widening of 8-bit pages needs some in the producer.
        """
        if self.kv_dtype is None:
            return (40, 232)
        return (88, 208)


def causal(spec: Spec, query: Array, scores: Array) -> Array:
    """Scores `[ROWS, size]`, -inf where a row's token does not see a key.

    `query` is the position of the first row's token less that of the first key.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    if spec.share > 1:
        row = lax.div(row, jnp.int32(spec.share))
    last = lax.broadcast_in_dim(row + query, scores.shape, [0])
    key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    seen = key <= last
    if spec.window is not None:
        seen = jnp.logical_and(seen, key > last - spec.window)
    return jnp.where(seen, scores, -jnp.inf)


def merge(carry: Carry, part: Array, lse: Array) -> Carry:
    """Adds a part: the output `[ROWS, H]` over other keys, and the log2 of their sum of weights."""
    acc, top, total = carry
    new_top = jnp.maximum(top, lse)
    decay = jnp.exp2(top - new_top)
    weight = jnp.exp2(lse - new_top)
    acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0]) + part.astype(
        jnp.float32
    ) * lax.broadcast_in_dim(weight, acc.shape, [0])
    return acc, new_top, total * decay + weight


def add_sinks(carry: Carry, sinks: list[Array], here: Array) -> Carry:
    """Counts the sinks of a tile's heads, keys with no value, if this is where the unit ends
    (`here`).
    """
    acc, top, total = carry
    logits = [jnp.where(here, jnp.maximum(sink * LOG2E, NEVER), NEVER) for sink in sinks]
    sink_of_row = jnp.full((ROWS,), logits[0])
    if len(logits) > 1:  # layout inference of JAX 0.12 does not end on a remainder by 1
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        head = lax.rem(row, jnp.int32(len(logits)))
        for i, logit in enumerate(logits):
            sink_of_row = jnp.where(head == i, logit, sink_of_row)
    new_top = jnp.maximum(top, sink_of_row)
    decay = jnp.exp2(top - new_top)
    weight = jnp.where(sink_of_row > NEVER, jnp.exp2(sink_of_row - new_top), 0.0)
    return acc * lax.broadcast_in_dim(decay, acc.shape, [0]), new_top, total * decay + weight
