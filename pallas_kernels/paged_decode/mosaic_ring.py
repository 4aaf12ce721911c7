"""The rings of shared memory through which the Hopper kernel of paged decode reads tiles: the
copies into them, and the steps over what they hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_flash import ROWS, Carry
from pallas_kernels.mosaic_gpu import PageTable, take
from pallas_kernels.paged_decode.mosaic_flash import (
    TILE,
    Spec,
    fold,
    part_scores,
    scores_of,
    zero_tail,
)

MOST_QUERIES = 16  # that pass through the producer's few registers at once


def pages_of(spec: Spec, table: PageTable, row: Array, first: Array, last_page: Array) -> list[Any]:
    """Where the tile at token `first` lies: (page, first token in it) of each copy; pages past the
    row's last repeat the last."""
    C = jnp.int32(spec.C)
    if spec.copies == 1:
        within = lax.rem(first, C)
        return [(table[row, lax.div(first, C)], within if spec.C > TILE else None)]
    return [
        (table[row, jnp.minimum(lax.div(first, C) + j, last_page)], None)
        for j in range(spec.copies)
    ]


def copy_tile(
    spec: Spec, pools: tuple[Any, ...], pages: list[Any], h: Array, sm: dict[str, Any], entry: Array
) -> None:
    """TMA copies of one K and one V tile of head `h`."""
    for pages_ref, name in zip(pools, ("k", "v"), strict=True):
        dst = sm[name].at[entry]
        barrier = sm[f"{name}_full"].at[entry]
        for j, (page, within) in enumerate(pages):
            if within is None:
                src = pages_ref.at[page, h]
            else:
                src = pages_ref.at[page, h, pl.ds(pl.multiple_of(within, TILE), TILE)]
            plgpu.copy_gmem_to_smem(
                src, dst if spec.copies == 1 else dst.at[pl.ds(j * spec.C, spec.C)], barrier
            )


class PartsRing(NamedTuple):
    """The ring that takes parts of other splits: its buffer, its barriers and its slots. `high -
    low` entries were used before."""

    values: str
    full: str
    free: str
    slots: int
    low: Array
    high: Array

    def entry(self, c: Array) -> Array:
        """The ring's entry of the c-th tile of parts."""
        return self.high - self.low + c


def parts_ring(spec: Spec, low: Array, high: Array) -> PartsRing:
    """Parts follow the share's tiles where they look like values; pages of 8 bits leave them a ring
    of their own."""
    if spec.kv_dtype is None:
        return PartsRing("v", "v_full", "free", spec.tuning.stages, low, high)
    return PartsRing("parts", "part_full", "part_free", spec.parts, low, low)


def copy_parts(
    spec: Spec,
    ring: PartsRing,
    parts: tuple[Any, Any],
    place: tuple[Array, Array],
    sm: dict[str, Any],
    entry: Array,
) -> None:
    """TMA copies of `ROWS` rows of parts of head `h` from `first` on: outputs where values go, in
    as many copies as those take, and log2-sum-exps."""
    outputs, lse = parts
    h, first = place
    plgpu.copy_gmem_to_smem(
        lse.at[h, pl.ds(first, ROWS)], sm["lse_in"].at[entry], sm["lse_full"].at[entry]
    )
    piece = ROWS // spec.copies
    for j in range(spec.copies):
        source = pl.ds(pl.multiple_of(first, spec.group) + j * piece, piece)
        plgpu.copy_gmem_to_smem(
            outputs.at[h, source],
            sm[ring.values].at[entry, pl.ds(j * piece, piece)],
            sm[ring.full].at[entry],
        )


def query_layout(H: int) -> Any:
    """Eight rows of a piece of `tiled(H)` over a warpgroup: a warp two of them, a thread 8 bytes of
    one, or less of narrower pieces."""
    piece = math.gcd(H, 64)
    tiling = plgpu.Tiling(((8, piece), (2, piece), (piece // 16,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def copy_queries(spec: Spec, q_ref: Any, first: Array, dst: Any) -> None:
    """Rows `first` to `first + group` of q into the first rows of a tile. By registers: tiled TMA
    copies begin at multiples of 8 rows."""
    size = min(spec.group, MOST_QUERIES)
    layout = query_layout(spec.H)
    for row in range(0, spec.group, size):
        source = q_ref.at[pl.ds(first + row if row else first, size)]
        dst.at[pl.ds(row, size)][...] = plgpu.load(source, layout=layout, optimized=False)
    plgpu.commit_smem()


def send_queries(
    spec: Spec, q_ref: Any, row: Array, h: Array, n: Array, sm: dict[str, Any]
) -> None:
    """The queries of the n-th row in use into their ring, once a slot is free."""
    slot = take(sm["q_free"], n, spec.tuning.queries)
    copy_queries(spec, q_ref, spec.first_query(row, h)[0], sm["q"].at[slot])
    plgpu.barrier_arrive(sm["q_full"].at[slot])


def step_over(
    sm: dict[str, Any], entry: Array, scores: Callable[[], Array], add: Callable[[Array], Carry]
) -> Carry:
    """`scores()` once the keys in this `entry` of the ring are there, then `add(them)` once the
    values are; the entry is free afterwards."""
    with jax.named_scope("wait for keys"):  # scopes are what the kernel's own profiler shows
        plgpu.barrier_wait(sm["k_full"].at[entry])
    with jax.named_scope("scores"):
        tile_scores = scores()
    with jax.named_scope("wait for values"):
        plgpu.barrier_wait(sm["v_full"].at[entry])
    with jax.named_scope("fold"):
        carry = add(tile_scores)
        plgpu.barrier_arrive(sm["free"].at[entry])
    return carry


def fold_tile(
    spec: Spec,
    sm: dict[str, Any],
    slot: Array,
    entry: Array,
    first: Array,
    length: Array,
    carry: Carry,
) -> Carry:
    """One step over the keys and values in this `entry` of the ring, whose first token is at
    position `first`; queries of buffer `slot`."""

    def add(scores: Array) -> Carry:
        zero_tail(sm["v"].at[entry], spec.H, length - first)
        return fold(spec, carry, scores, sm["v"].at[entry], sm.get("p"))

    return step_over(
        sm, entry, lambda: scores_of(spec, sm["q"].at[slot], sm["k"].at[entry], first, length), add
    )


def fold_parts(
    spec: Spec, ring: PartsRing, sm: dict[str, Any], entry: Array, parts: Array, carry: Carry
) -> Carry:
    """One step over the parts in this `entry` of the ring, of which the first `parts` count."""
    plgpu.barrier_wait(sm["lse_full"].at[entry])
    lse = plgpu.load(sm["lse_in"].at[entry], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    plgpu.barrier_wait(sm[ring.full].at[entry])
    zero_tail(sm[ring.values].at[entry], spec.H, parts * spec.group)
    carry = fold(
        spec, carry, part_scores(spec.group, lse, parts), sm[ring.values].at[entry], sm.get("p")
    )
    plgpu.commit_smem()  # log-sums are read plainly, before the next copy into the slot
    plgpu.barrier_arrive(sm[ring.free].at[entry])
    return carry
