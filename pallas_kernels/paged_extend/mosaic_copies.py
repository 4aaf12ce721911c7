"""The producer of the Hopper kernel of paged extend: copies of queries, and of keys and values
through rings of shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_flash import ROWS, zero_from
from pallas_kernels.mosaic_gpu import PageTable, take
from pallas_kernels.paged_extend import mosaic_narrow as narrow
from pallas_kernels.paged_extend.mosaic_flash import Spec
from pallas_kernels.paged_extend.plan import ITEM_FIELDS


class Unit(NamedTuple):
    """One query tile of some heads, and the split's share of its key tiles.

    Attributes:
        token: first token; low, high: first and end of the tile's own tokens.
        row, position: row of the page table, and sequence position of the first token.
        keys: keys that the last own query sees; 0: the tokens get zeros.
        head: first query head.
        begin, end: first and end key tile.
        ours: whether the unit belongs to this split.
        merges: parts that followers leave, if the unit's end lies beyond this split.
        n, m: key tiles, and units with keys, before this unit in the split.
    """

    token: Array
    low: Array
    high: Array
    row: Array
    position: Array
    keys: Array
    head: Array
    begin: Array
    end: Array
    ours: Array
    merges: Array
    n: Array
    m: Array


class Share(NamedTuple):
    """One thread block's share of the plan: tiles low to high of the line, units u0 to u1, the
    fields of the first item, and the followers of the last unit."""

    spec: Spec
    h: Array
    low: Array
    high: Array
    u0: Array
    u1: Array
    first_item: tuple[Array, ...]
    followers: Array
    items_ref: Any

    def each_unit(self, step: Callable[[Array, Unit], None]) -> tuple[Array, Array]:
        """Run `step` for every unit of the share. The next unit's fields are read meanwhile.

        Returns the number of key tiles, and of units with keys.
        """
        spec = self.spec
        low = self.low
        high = self.high
        items_ref = self.items_ref
        size = jnp.int32(spec.size)

        def advance(u: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            n, m, *fields = carry
            item = jnp.minimum(lax.div(u + 1, jnp.int32(spec.units)), items_ref.shape[0] - 1)
            following = [items_ref[item, i] for i in range(ITEM_FIELDS)]
            token, first_own, end_own, row, position, keys, first, line = fields
            last = lax.div(keys + (spec.size - 1), size)
            tiles = jnp.maximum(last - first, 1)
            share = lax.rem(u, jnp.int32(spec.units))
            there = line + share * tiles  # first tile of the unit in the line
            begin = first + jnp.maximum(low - there, 0)
            end = jnp.minimum(first + high - there, last)
            ours = there >= low
            merges = jnp.where(jnp.logical_and(ours, there + tiles > high), self.followers, 0)
            head = self.h * spec.G + share * spec.share
            tokens = token, first_own, end_own, row, position, keys
            step(u, Unit(*tokens, head, begin, end, ours, merges, n, m))
            return (
                n + jnp.maximum(end - begin, 0),
                m + (keys > 0).astype(jnp.int32),
                *following,
            )

        none = jnp.int32(0), jnp.int32(0)
        n, m, *_ = lax.fori_loop(self.u0, self.u1, advance, (*none, *self.first_item))
        return n, m


def produce(
    spec: Spec,
    unit: Unit,
    q_ref: Any,
    pools: tuple[Any, Any],
    table: PageTable,
    h: Array,
    sm: dict[str, Any],
) -> None:
    """Copies a unit's queries, and its keys and values through the ring."""
    size = spec.size
    C = spec.C
    last_page = lax.div(unit.keys - 1, jnp.int32(C))

    def places(t: Array) -> Iterator[tuple[Any, ...]]:
        """Page, head, first token in the page (None: the whole page) and tokens of each copy of
        a tile.
        """
        if size < C:
            page = table[unit.row, lax.div(t * size, jnp.int32(C))]
            yield page, h, pl.multiple_of(lax.rem(t * size, jnp.int32(C)), size), size
        for j in range(size // C):  # pages past the last that is seen repeat it
            yield table[unit.row, jnp.minimum(t * (size // C) + j, last_page)], h, None, C

    def copy(ref: Any, t: Array, dst: Any, barrier: Any) -> None:
        for j, (page, head, within, tokens) in enumerate(places(t)):
            span = slice(None) if within is None else pl.ds(within, tokens)
            if spec.tokens_first:
                src = ref.at[page, span, head]
            else:
                src = ref.at[page, head, span]
            plgpu.copy_gmem_to_smem(src, dst if size < C else dst.at[pl.ds(j * C, C)], barrier)

    def slot(name: str, t: Array) -> Array:
        return take(sm[f"{name}_free"], unit.n + t - unit.begin, spec.tuning.stages)

    @pl.when(unit.keys > 0)
    def _() -> None:
        pl.when(unit.m > 0)(lambda: plgpu.barrier_wait(sm["q_free"]))
        _copy_queries(spec, unit, q_ref, sm)

    if spec.kv_dtype is not None:
        narrow.produce(spec, (unit.begin, unit.end, unit.keys), pools, places, slot, sm)
        return
    k_ref, v_ref = pools

    @pl.loop(unit.begin, unit.end)
    def _(t):  # type: ignore[no-untyped-def]
        entry = slot("k", t)
        copy(k_ref, t, sm["k"].at[entry], sm["k_full"].at[entry])
        slot("v", t)
        full = (t + 1) * size <= unit.keys

        @pl.when(full)
        def _() -> None:
            copy(v_ref, t, sm["v"].at[entry], sm["v_full"].at[entry])

        @pl.when(jnp.logical_not(full))
        def _() -> None:
            copy(v_ref, t, sm["v"].at[entry], sm["tail"])
            plgpu.barrier_wait(sm["tail"])
            zero_from(sm["v"].at[entry], size, spec.F, unit.keys - t * size)
            for _ in range(spec.copies):
                plgpu.barrier_arrive(sm["v_full"].at[entry])


def copy_part(
    spec: Spec,
    parts: tuple[Any, Any],
    place: tuple[Array, Array],
    sm: dict[str, Any],
    slot: Array,
) -> None:
    """TMA copies of the part that a follower left at `place` (KV head, split): its outputs go where
    values go, in as many copies as those take."""
    outputs, lse = (ref.at[place] for ref in parts)
    plgpu.copy_gmem_to_smem(lse, sm["lse_in"].at[slot], sm["lse_full"].at[slot])
    piece = spec.size // spec.copies
    for j in range(spec.copies):
        rows = pl.ds(j * piece, piece)
        plgpu.copy_gmem_to_smem(outputs.at[rows], sm["v"].at[slot, rows], sm["v_full"].at[slot])


def _copy_queries(spec: Spec, unit: Unit, q_ref: Any, sm: dict[str, Any]) -> None:
    """Queries into plain buffers: a box of tokens of one head, or each token's heads, since tokens
    are not all that a tile takes."""
    for wg in range(spec.tuning.groups):
        for c, column in enumerate(spec.columns):
            dst = sm["q_in"].at[wg, c]
            if spec.boxes:
                plgpu.copy_gmem_to_smem(
                    q_ref.at[pl.ds(unit.token + wg * ROWS, ROWS), unit.head, column],
                    dst,
                    sm["q_full"].at[wg],
                )
                continue

            @pl.loop(0, spec.tokens)
            def _(j, wg=wg, column=column, dst=dst):  # type: ignore[no-untyped-def]
                token = jnp.minimum(unit.token + wg * spec.tokens + j, spec.T - 1)
                rows = dst.at[pl.ds(j * spec.share, spec.share)]
                plgpu.copy_gmem_to_smem(
                    q_ref.at[token, pl.ds(unit.head, spec.share), column],
                    rows,
                    sm["q_full"].at[wg],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # others are tensor copies
                )
