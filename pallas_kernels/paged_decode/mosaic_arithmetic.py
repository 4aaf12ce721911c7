"""How a block of a cluster attends to its tiles of a row: how their numbers reach registers, and
what is computed there. 16-bit pages have two versions, 8-bit pages one.

With keys for rows scores are K·qᵀ, `[TILE, group]`, so that nothing is computed for queries that
are not there. The carry is transposed too: weighted values `[H, group]`, the running maximum
`[group]`, and the weights' sums by token, `[TILE, group]`. Tensor cores take rows by 64, so the
weighted values come in blocks of them, of which the last two overlap where 64 does not divide H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_flash import LOG2E, NEVER, ROWS, Carry, add_product, product
from pallas_kernels.mosaic_gpu import tiled
from pallas_kernels.paged_decode import mosaic_narrow as narrow
from pallas_kernels.paged_decode.mosaic_flash import TILE, Spec, Tiles, start, visible, zero_tail
from pallas_kernels.paged_decode.mosaic_peers import PAD, keep_columns, keep_group
from pallas_kernels.paged_decode.mosaic_ring import copy_tile, fold_tile, step_over

WGMMA = plgpu.Layout.WGMMA

# Of a row's queries: their sinks, where they lie in the tile of queries, and whether this block
# counts the sinks
type Queries = tuple[list[Array] | None, Array, Array]


class Arithmetic(NamedTuple):
    """One version.

    Attributes:
        pools: arrays of a pool: pages of keys and of values, and perhaps their scales.
        scratch: shared memory and barriers of tiles and queries.
        copy_tile: as `mosaic_ring.copy_tile`.
        attend: of (spec, shared memory, buffer of queries, `Tiles`, `Queries`, which of two
            buffers): leaves weighted values, maxima and sums of the queries in that buffer, where
            `mosaic_peers.merge_peers` finds them; values in "acc" where the kernel is interpreted.
            There may be no tile, and then no queries.
        shape: of those values where the kernel is interpreted.
        queries: of those maxima and sums.
    """

    pools: int
    scratch: Callable[[Spec], dict[str, Any]]
    copy_tile: Callable[..., None]
    attend: Callable[[Spec, dict[str, Any], Array, Tiles, Queries, Array], None]
    shape: Callable[[Spec], tuple[int, int]]
    queries: Callable[[Spec], int]


def arithmetic_of(spec: Spec) -> Arithmetic:
    """The version for these pages and sizes."""
    if spec.kv_dtype is not None:
        return NARROW
    if spec.tuning.swapped:
        return KEYS_FOR_ROWS
    return QUERIES_FOR_ROWS


def _scratch_of_16_bits(spec: Spec) -> dict[str, Any]:
    stages = spec.tuning.stages
    queries = spec.tuning.queries
    swapped = spec.tuning.swapped
    rows = spec.group if swapped else ROWS
    scratch = {
        "q": plgpu.SMEM((queries, rows, spec.H), spec.dtype, transforms=tiled(spec.H)),
        "k": plgpu.SMEM((stages, TILE, spec.H), spec.dtype, transforms=tiled(spec.H)),
        "v": plgpu.SMEM((stages, TILE, spec.H), spec.dtype, transforms=tiled(spec.H)),
        "k_full": plgpu.Barrier(num_arrivals=spec.copies, num_barriers=stages),
        "v_full": plgpu.Barrier(num_arrivals=spec.copies, num_barriers=stages),
    }
    if swapped or spec.interpret is not None:
        scratch["p"] = plgpu.SMEM((rows, TILE), spec.dtype, transforms=tiled(spec.H))
    return scratch


def _scratch_of_8_bits(spec: Spec) -> dict[str, Any]:
    return narrow.scratch(spec) | narrow.sums_scratch(spec)


def _keep(spec: Spec, sm: dict[str, Any], carry: Any, buffer: Array) -> None:
    acc, top, total = carry
    with jax.named_scope("keep"):
        if not spec.tuning.swapped and spec.interpret is not None:
            sm["acc"][...] = acc
        elif not spec.tuning.swapped:
            keep_group(acc, sm["o"], buffer)
        else:
            _keep_blocks(spec, sm, acc, buffer)
        for name, x in (("top", top), ("total", total)):
            sm[name].at[buffer, pl.ds(0, x.shape[0])][...] = x


def _keep_blocks(spec: Spec, sm: dict[str, Any], acc: list[Array], buffer: Array) -> None:
    for (first, rows), block in zip(_spans(spec.H), acc, strict=True):
        if spec.interpret is not None:
            sm["acc"].at[pl.ds(first, rows)][...] = block
        else:
            keep_columns(block, sm["o"], buffer, first)


def _queries_for_rows(
    spec: Spec, sm: dict[str, Any], slot: Array, tiles: Tiles, queries: Queries, buffer: Array
) -> None:
    def step(i: Array, carry: Carry) -> Carry:
        entry = lax.rem(tiles.entry + i, jnp.int32(spec.tuning.stages))
        return fold_tile(spec, sm, slot, entry, tiles.position(i), tiles.length, carry)

    _keep(spec, sm, lax.fori_loop(0, tiles.count, step, start(spec.H, *queries)), buffer)


def _keys_for_rows(
    spec: Spec, sm: dict[str, Any], slot: Array, tiles: Tiles, queries: Queries, buffer: Array
) -> None:
    def step(i: Array, carry: Any) -> Any:
        entry = lax.rem(tiles.entry + i, jnp.int32(spec.tuning.stages))
        first = tiles.position(i)
        keys = sm["k"].at[entry]
        values = sm["v"].at[entry]
        return step_over(
            *(sm, entry),
            lambda: _scores_swapped(spec, sm["q"].at[slot], keys, first, tiles.length),
            lambda scores: _fold_swapped(
                spec, carry, scores, values, tiles.length - first, sm["p"]
            ),
        )

    acc, top, sums = lax.fori_loop(0, tiles.count, step, _start_swapped(spec, *queries))
    _keep(spec, sm, (acc, top, sums.sum(axis=0)), buffer)


def _spans(H: int) -> list[tuple[int, int]]:
    """(first row, rows) of the blocks of weighted values that products take of H rows."""
    if H % ROWS:
        return [(min(first, H - ROWS), ROWS) for first in range(0, H, ROWS)]
    return [(0, H)]


def _start_swapped(spec: Spec, sinks: list[Array] | None, first_row: Array, begins: Array) -> Any:
    """The carry before any tile; as `mosaic_flash.start`."""
    acc = [
        plgpu.layout_cast(jnp.full((rows, spec.group), 0.0, jnp.float32), WGMMA)
        for _, rows in _spans(spec.H)
    ]
    top = plgpu.layout_cast(jnp.full((spec.group,), NEVER, jnp.float32), WGMMA.reduce(0))
    sums = plgpu.layout_cast(jnp.full((TILE, spec.group), 0.0, jnp.float32), WGMMA)
    if sinks is None:
        return acc, top, sums
    query = plgpu.broadcasted_iota(jnp.int32, (TILE, spec.group), 1, layout=WGMMA) - first_row
    token = plgpu.broadcasted_iota(jnp.int32, (TILE, spec.group), 0, layout=WGMMA)
    tops = plgpu.layout_cast(jnp.full((TILE, spec.group), NEVER, jnp.float32), WGMMA)
    for i, sink in enumerate(sinks):
        here = jnp.logical_and(query == i, begins)
        tops = jnp.where(here, jnp.maximum(sink * LOG2E, NEVER), tops)
        sums = jnp.where(jnp.logical_and(here, token == 0), 1.0, sums)
    return acc, tops.max(axis=0), sums


def _scores_swapped(spec: Spec, q: Any, k: Any, first: Array, length: Array) -> Array:
    """K·qᵀ in the log2 domain, soft-capped, -inf where unseen; float32 `[TILE, group]`. The tile's
    first token is at position `first`."""
    scores = product(k, q.T, (TILE, spec.group), lambda: None)
    return visible(spec, scores, 0, first, length)


def _fold_swapped(spec: Spec, carry: Any, scores: Array, v: Any, count: Array, p_sm: Any) -> Any:
    """One step over a tile of which the first `count` tokens are there; the weights go to the
    tensor cores by `p_sm` `[group, TILE]`."""
    acc, top, sums = carry
    new_top = jnp.maximum(top, scores.max(axis=0))
    decay = jnp.exp2(top - new_top)
    p = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [1]))
    p_sm.T[...] = p.astype(spec.dtype)
    sums = sums * lax.broadcast_in_dim(decay, sums.shape, [1]) + p
    acc = [block * lax.broadcast_in_dim(decay, block.shape, [1]) for block in acc]
    zero_tail(v, spec.H, count)
    plgpu.commit_smem()
    for i, (first, rows) in enumerate(_spans(spec.H)):
        columns = v if rows == spec.H else v.at[:, pl.ds(first, rows)]
        acc[i] = add_product(acc[i], columns.T, p_sm.T, spec.interpret)
    return acc, new_top, sums


def _in_8_bits(
    spec: Spec, sm: dict[str, Any], slot: Array, tiles: Tiles, queries: Queries, buffer: Array
) -> None:
    sums = sm["o"].at[buffer] if spec.interpret is None else sm["acc"]
    kept = sums, *(sm[name].at[buffer, pl.ds(0, spec.group)] for name in ("top", "total"))
    narrow.gather(spec, sm, slot, tiles, queries, kept)


QUERIES_FOR_ROWS = Arithmetic(
    *(2, _scratch_of_16_bits, copy_tile, _queries_for_rows),
    *(lambda spec: (ROWS, spec.H), lambda spec: ROWS),
)
KEYS_FOR_ROWS = Arithmetic(
    *(2, _scratch_of_16_bits, copy_tile, _keys_for_rows),
    *(lambda spec: (spec.H, spec.group), lambda spec: spec.group),
)
NARROW = Arithmetic(
    *(3, _scratch_of_8_bits, narrow.copy_tile, _in_8_bits),
    *(lambda spec: (spec.group, spec.H + PAD), lambda spec: spec.group),
)
