"""What the Hopper kernel of paged decode does differently where pages hold 8-bit floats: its shared
memory, its copies, and its attention.

Tiles are copied unchanged, together with their scales, and the lane programs of `mosaic_lanes` work
on them. At the end of a row's share the four warps' outputs are merged like the parts of other
blocks. Blocks that meet by flags and those of a cluster both attend so.

A warp's step is a chain of loads, products and shuffles in which each waits for the one before. A
second warpgroup may therefore take every other tile (`second_consumer`). Its warps leave their
outputs beside those of the first, which merges them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.lanes import Machine, byte_tiled, plain, run, sync
from pallas_kernels.mosaic_flash import ROWS, Carry
from pallas_kernels.mosaic_gpu import TILED, registers_of
from pallas_kernels.paged_decode import mosaic_lanes as lanes
from pallas_kernels.paged_decode.mosaic_flash import (
    TILE,
    Spec,
    Tiles,
    fold,
    part_scores,
    zero_tail,
)
from pallas_kernels.paged_decode.mosaic_peers import PAD
from pallas_kernels.quantised import SCALE_DTYPE


def scratch(spec: Spec) -> dict[str, Any]:
    """Shared memory and barriers of one block that are for 8-bit pages."""
    stages = spec.tuning.stages
    return {
        "q": plgpu.SMEM((spec.tuning.queries, spec.group, spec.H), spec.dtype),
        "k": plgpu.SMEM((stages, TILE, spec.H), spec.kv_dtype, transforms=byte_tiled(spec.H)),
        "v": plgpu.SMEM((stages, TILE, spec.H), spec.kv_dtype, transforms=byte_tiled(spec.H)),
        "scales": plgpu.SMEM((stages, 2, TILE), SCALE_DTYPE),
        "k_full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "v_full": plgpu.Barrier(num_barriers=stages),
        "warps_full": plgpu.Barrier(),
        "warps_free": plgpu.Barrier(),
    }


def parts_scratch(spec: Spec) -> dict[str, Any]:
    """What warps leave, and the ring of parts of other blocks."""
    parts = spec.parts
    return {
        "warps": plgpu.SMEM((ROWS, spec.H), spec.dtype, transforms=TILED),
        "warps_lse": plgpu.SMEM((ROWS,), jnp.float32),
        "parts": plgpu.SMEM((parts, ROWS, spec.H), spec.dtype, transforms=TILED),
        "lse_in": plgpu.SMEM((parts, ROWS), jnp.float32),
        "part_full": plgpu.Barrier(num_barriers=parts),
        "part_free": plgpu.Barrier(num_barriers=parts),
        "lse_full": plgpu.Barrier(num_barriers=parts),
    }


def sums_scratch(spec: Spec) -> dict[str, Any]:
    """What warps leave where the blocks of a cluster merge: sums, maxima and totals."""
    rows = lanes.WARPS * spec.tuning.consumers * spec.group
    return {
        "sums": plgpu.SMEM((rows, spec.H + PAD), jnp.float32),
        "tops": plgpu.SMEM((rows, 2), jnp.float32),
    }


def copy_tile(
    spec: Spec, pools: tuple[Any, ...], pages: list[Any], h: Array, sm: dict[str, Any], entry: Array
) -> None:
    """TMA copies of keys, scales and values of one tile of head `h`."""
    (page, within), *_ = pages
    if within is None:
        here = (slice(None),)
    else:
        here = (pl.ds(pl.multiple_of(within, TILE), TILE),)
    k_ref, v_ref, scales_ref = (pool.at[page, h] for pool in pools)
    plgpu.copy_gmem_to_smem(k_ref.at[here], sm["k"].at[entry], sm["k_full"].at[entry])
    plgpu.copy_gmem_to_smem(
        scales_ref.at[(slice(None), *here)], sm["scales"].at[entry], sm["k_full"].at[entry]
    )
    plgpu.copy_gmem_to_smem(v_ref.at[here], sm["v"].at[entry], sm["v_full"].at[entry])


def attend(
    spec: Spec,
    sm: dict[str, Any],
    slot: Array,
    tiles: Tiles,
    first_row: Array,
    carry: Callable[[], Carry],
) -> Carry:
    """A row's tiles by the warps of all consumers, and their outputs merged into `carry()`."""
    state = _take_tiles(spec, sm, slot, tiles, 0)
    _finish(spec, sm, first_row, state, 0)
    warps = lanes.WARPS * spec.tuning.consumers
    plgpu.commit_smem()
    if spec.tuning.consumers > 1:
        plgpu.barrier_wait(sm["warps_full"])
    zero_tail(sm["warps"], spec.H, jnp.int32(warps * spec.group))
    lse = plgpu.load(sm["warps_lse"], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    merged = fold(
        spec, carry(), part_scores(spec.group, lse, jnp.int32(warps)), sm["warps"], sm.get("p")
    )
    if spec.tuning.consumers > 1:
        plgpu.barrier_arrive(sm["warps_free"])
    return merged


def gather(
    spec: Spec,
    sm: dict[str, Any],
    slot: Array,
    tiles: Tiles,
    sinks: tuple[list[Array] | None, Array, Array],
    kept: tuple[Any, Any, Any],
) -> None:
    """A row's tiles by the warps of all consumers, and their sums, maxima and totals together into
    `kept`. `sinks` are logits, the row of the first one's query, and whether they count."""

    @pl.when(tiles.count > 0)
    def _some() -> None:
        _leave(spec, sm, _take_tiles(spec, sm, slot, tiles, 0), 0)
        sync(spec.interpret)
        if spec.tuning.consumers > 1:
            plgpu.barrier_wait(sm["warps_full"])
        logits, first_row, counts = sinks

        def program(m: Machine, refs: list[Any], scalars: list[Any], _: list[Any]) -> list[Any]:
            lane_sinks = scalars[2:], scalars[0], scalars[1]
            lanes.gather(m, spec, tuple(refs[:2]), tuple(refs[2:]), lane_sinks)
            return []

        scalars = (first_row, counts.astype(jnp.int32), *(logits or ()))
        words = (sm["sums"], sm["tops"], *kept)
        run(program, spec.interpret, 0, words=words, scalars=scalars)
        if spec.tuning.consumers > 1:
            sync(spec.interpret)
            plgpu.barrier_arrive(sm["warps_free"])

    @pl.when(tiles.count == 0)
    def _none() -> None:
        def program(m: Machine, refs: list[Any], *_: Any) -> list[Any]:
            lanes.clear(m, spec, tuple(refs))
            return []

        run(program, spec.interpret, 0, words=kept)


def second_consumer(
    spec: Spec, sm: dict[str, Any], each_row: Callable[..., Array], h: Array
) -> None:
    """All that the second consumer of block `h` does: its part of every row with tiles.
    `each_row(step)` runs `step(row, tiles, such rows before it)` and returns their number."""
    plgpu.set_max_registers(registers_of(spec.tuning.consumers), action="increase")

    def row(r: Array, tiles: Tiles, n: Array) -> None:
        slot = lax.rem(n, jnp.int32(spec.tuning.queries))

        @pl.when(tiles.count > 0)
        def work() -> None:
            plgpu.barrier_wait(sm["q_full"].at[slot])
            state = _take_tiles(spec, sm, slot, tiles, 1)
            pl.when(n > 0)(lambda: plgpu.barrier_wait(sm["warps_free"]))
            if "sums" in sm:
                _leave(spec, sm, state, 1)
                sync(spec.interpret)
            else:
                _finish(spec, sm, spec.first_query(r, h)[1], state, 1)
                plgpu.commit_smem()
            plgpu.barrier_arrive(sm["warps_full"])
            plgpu.barrier_arrive(sm["q_free"].at[slot])

    pl.when(each_row(row) > 0)(lambda: plgpu.barrier_wait(sm["warps_free"]))


def _take_tiles(spec: Spec, sm: dict[str, Any], slot: Array, tiles: Tiles, consumer: int) -> Array:
    """One consumer's tiles of a row: those that lie in its slots of the ring."""
    consumers = jnp.int32(spec.tuning.consumers)
    row = _read_row(spec, sm, slot)
    first = lax.rem(tiles.entry + consumer, consumers)

    def step(i: Array, state: Array) -> Array:
        t = first + i * consumers
        entry = lax.rem(tiles.entry + t, jnp.int32(spec.tuning.stages))
        plgpu.barrier_wait(sm["k_full"].at[entry])
        plgpu.barrier_wait(sm["v_full"].at[entry])
        state = _fold(spec, sm, entry, (tiles.position(t), tiles.length), row, state)
        # All warps have read before the next copy into the slot. To the copy engine a barrier alone
        # does not say so
        plgpu.commit_smem()
        plgpu.barrier_arrive(sm["free"].at[entry])
        return state

    return lax.fori_loop(
        jnp.int32(0), lax.div(tiles.count - first + consumers - 1, consumers), step, _begin(spec)
    )


def _begin(spec: Spec) -> Array:
    size = lanes.State.size(spec.H, spec.group)
    return run(lambda m, *_: lanes.begin(m, spec).registers, spec.interpret, size)


def _read_row(spec: Spec, sm: dict[str, Any], slot: Array) -> Array:
    return run(
        lambda m, refs, *_: lanes.read_row(m, spec, plain(refs[0], spec.H)),
        spec.interpret,
        lanes.constants(spec),
        refs=[(sm["q"].at[slot], ())],
    )


def _fold(
    spec: Spec,
    sm: dict[str, Any],
    entry: Array,
    place: tuple[Array, Array],
    row: Array,
    state: Array,
) -> Array:
    count = row.shape[1]

    def program(m: Machine, refs: list[Any], scalars: list[Any], registers: list[Any]) -> list[Any]:
        k, v = (plain(ref, spec.H) for ref in refs[:2])
        tile = lanes.Tile(k, v, plain(refs[2], TILE))
        before = lanes.State.of(registers[count:], spec.H, spec.group)
        return lanes.fold(
            m, spec, tile, (scalars[0], scalars[1]), registers[:count], before
        ).registers

    tiled = byte_tiled(spec.H)
    refs = [(sm["k"].at[entry], tiled), (sm["v"].at[entry], tiled), (sm["scales"].at[entry], ())]
    return run(
        program, spec.interpret, state.shape[1], refs=refs, scalars=place, arrays=(row, state)
    )


def _leave(spec: Spec, sm: dict[str, Any], state: Array, consumer: int) -> None:
    def program(m: Machine, refs: list[Any], _: list[Any], registers: list[Any]) -> list[Any]:
        lanes.leave(m, spec, tuple(refs), lanes.State.of(registers, spec.H, spec.group))
        return []

    rows = lanes.WARPS * spec.group
    words = [sm[name].at[pl.ds(consumer * rows, rows)] for name in ("sums", "tops")]
    run(program, spec.interpret, 0, words=words, arrays=(state,))


def _finish(spec: Spec, sm: dict[str, Any], first_row: Array, state: Array, consumer: int) -> None:
    def program(m: Machine, refs: list[Any], scalars: list[Any], registers: list[Any]) -> list[Any]:
        to = (plain(refs[0], 2 * spec.H), plain(refs[1], rows))
        lanes.finish(m, spec, to, scalars[0], lanes.State.of(registers, spec.H, spec.group))
        return []

    rows = ROWS // spec.tuning.consumers
    mine = pl.ds(consumer * rows, rows)
    refs = [(sm["warps"].at[mine], TILED), (sm["warps_lse"].at[mine], ())]
    run(program, spec.interpret, 0, refs=refs, scalars=(first_row,), arrays=(state,))
