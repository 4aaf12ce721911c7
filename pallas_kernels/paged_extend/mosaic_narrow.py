"""How the Hopper kernel of paged extend reads pages of 8-bit floats: its producer fills the ring of
K and V tiles by widening them.

Tiles are copied as they lie, keys and values in turn, and the producer's lanes bring them to 16
bits, scaled, while the compute warpgroups work on the tiles before. Prompts are bound by products,
so nothing else of the kernel changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.lanes import Machine, byte_tiled, plain, run
from pallas_kernels.mosaic_gpu import TILED
from pallas_kernels.paged_extend.mosaic_flash import Spec
from pallas_kernels.quantised import SCALE_DTYPE

AT_ONCE = 16  # words that a lane loads before it widens them
SLOTS = 3  # tiles on their way; odd, so that a slot's next tile is of the other kind


def scratch(spec: Spec) -> dict[str, Any]:
    """Shared memory and barriers of one block that are for 8-bit pages."""
    return {
        "raw": plgpu.SMEM((SLOTS, spec.size, spec.H), spec.kv_dtype, transforms=byte_tiled(spec.H)),
        "raw_scales": plgpu.SMEM((SLOTS, 1, spec.size), SCALE_DTYPE),
        "raw_full": plgpu.Barrier(num_arrivals=2 * spec.copies, num_barriers=SLOTS),
    }


def produce(
    spec: Spec,
    tiles: tuple[Array, Array, Array],
    pools: tuple[Any, ...],
    places: Callable[..., Any],
    take: Callable[..., Array],
    sm: dict[str, Any],
) -> None:
    """Widen the keys and values of a unit's tiles into the ring.

    `tiles` are (first, end, keys of the unit); `places(t)` gives for tile t (page, head, first
    token in it, tokens) of each copy, and `take(name, t)` the slot of that ring for it, once it is
    free.
    """
    begin, end, keys = tiles
    count = 2 * (end - begin)

    def fetch(j: Array | int, side: int) -> None:
        """The j-th copy of the unit, of keys or of values."""

        @pl.when(j < count)
        def _() -> None:
            slot = lax.rem(jnp.int32(j), jnp.int32(SLOTS))
            for i, (page, h, within, size) in enumerate(
                places(begin + lax.div(jnp.int32(j), jnp.int32(2)))
            ):
                to = pl.ds(i * size, size)
                here = slice(None) if within is None else pl.ds(within, size)
                plgpu.copy_gmem_to_smem(
                    pools[side].at[page, h, here], sm["raw"].at[slot, to], sm["raw_full"].at[slot]
                )
                plgpu.copy_gmem_to_smem(
                    pools[2].at[page, h, side, here],
                    sm["raw_scales"].at[slot, 0, to],
                    sm["raw_full"].at[slot],
                )

    for j in range(SLOTS):
        fetch(j, j % 2)

    @pl.loop(begin, end)
    def _(t: Array) -> None:
        for side, name in enumerate(("k", "v")):
            j = 2 * (t - begin) + side
            slot = lax.rem(j, jnp.int32(SLOTS))
            entry = take(name, t)
            plgpu.barrier_wait(sm["raw_full"].at[slot])
            _widen(spec, sm, slot, sm[name].at[entry], keys - t * spec.size)
            plgpu.commit_smem()
            for _ in range(spec.copies):
                plgpu.barrier_arrive(sm[f"{name}_full"].at[entry])
            fetch(j + SLOTS, (side + SLOTS) % 2)


def _widen(spec: Spec, sm: dict[str, Any], slot: Array, to: Any, count: Array) -> None:
    def program(m: Machine, refs: list[Any], scalars: list[Any], _: list[Any]) -> list[Any]:
        target, source, scales = (
            plain(ref, width)
            for ref, width in zip(refs, (2 * spec.H, spec.H, spec.size), strict=True)
        )
        widen(m, spec, (source, scales, target), scalars[0])
        return []

    refs = [
        (to, TILED),
        (sm["raw"].at[slot], byte_tiled(spec.H)),
        (sm["raw_scales"].at[slot], ()),
    ]
    run(program, spec.interpret, 0, refs=refs, scalars=(count,))


def widen(m: Machine, spec: Spec, arrays: tuple[Any, Any, Any], count: Any) -> None:
    """Lane program: the tile `source` times its tokens' `scales` in 16 bits to `target`; zeros from
    token `count` on, since what is masked later is multiplied by 0, and 0 · NaN is NaN. A lane
    takes 4 numbers of a row; of the 8 rows of a piece a warp has two that lie 4 apart, whose
    swizzled halves are different banks."""
    source, scales, target = arrays
    piece = min(spec.H, 128)
    row = m.add(m.warp, m.times(m.bits(m.g, 2, 1), 4))
    chunk = m.bits(m.g, 0, 2)
    narrow = [
        m.offset(spec.H, row, m.times(m.c, 4), m.add(chunk, column % piece // 16), column // piece)
        for column in range(0, spec.H, 64)
    ]
    there = m.add(m.times(chunk, 2), m.bits(m.c, 1, 1))
    wide = [
        m.offset(2 * spec.H, row, m.times(m.bits(m.c, 0, 1), 8), there, i)
        for i in range(spec.H // 64)
    ]
    rows = min(max(1, AT_ONCE * 64 // spec.H), spec.size // 8)
    for first in range(0, spec.size // 8, rows):
        loaded = []  # before anything is stored, since no load is moved before a store
        for down in range(first, first + rows):
            mine = m.below(m.add(row, 8 * down), count)
            factor = m.select(mine, m.scale(scales, 0, row, 8 * down), 0.0)
            loaded += [
                (down, to, factor, m.select(mine, m.load(source, offset, down), 0))
                for offset, to in zip(narrow, wide, strict=True)
            ]
        for down, to, factor, word in loaded:
            numbers = [x for pair in m.floats(word, str(spec.kv_dtype)) for x in m.halves(pair)]
            m.store(
                target, to, [m.fmul(x, factor) for x in numbers], jnp.dtype(spec.dtype).name, down
            )
