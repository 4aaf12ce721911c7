"""The Hopper kernel of paged extend: splits x KV heads thread blocks, each a producer and one or two
compute warpgroups, in one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import PageTable, flags_buffer
from pallas_kernels.paged_decode.mosaic_flags import await_flag, raise_flag
from pallas_kernels.paged_extend import mosaic_narrow as narrow
from pallas_kernels.paged_extend.mosaic_flash import (
    ROWS,
    Spec,
    Tuning,
    add_sinks,
    finish,
    fold,
    merge,
    start,
)
from pallas_kernels.paged_extend.plan import ITEM_FIELDS, SPLIT_FIELDS, ExtendPlan

__all__ = ["ROWS", "Spec", "Tuning", "attend"]


class _Unit(NamedTuple):
    """One query tile of some heads, and the split's share of its key tiles; `n` tiles and `m` units
    with keys came before in this split."""

    at: Array  # first token
    low: Array  # own tokens: low to high
    high: Array
    row: Array
    position: Array  # of the first token
    keys: Array  # 0: the tokens get zeros
    head: Array  # first query head
    begin: Array  # key tiles: begin to end
    end: Array
    ours: Array  # the unit belongs to this split
    merges: Array  # its end does not: so many tiles of parts
    n: Array
    m: Array


def attend(
    spec: Spec,
    q: Array,
    pools: tuple[Array, ...],
    table: tuple[Array, Array],
    plan: ExtendPlan,
    sinks: Array | None,
) -> Array:
    """Runs every split's share and returns `o_TNH`; `pools` are pages of keys and of values, and
    their scales if they have some; `table` is the page table and its first page.

    The interpreter sees no flags and would report what owners read of their followers' parts as
    races. There the kernel runs twice: once without merging, and again with the parts of the first
    run as inputs.
    """
    splits = plan.splits_SF.shape[0]

    def launch(phase: str, splits_SF: Any, *parts: Array) -> tuple[Array, Array, Array]:
        more = parts if sinks is None else (sinks, *parts)
        given = (q, *pools, *table, plan.items_I8, splits_SF, *more)
        return _launch(spec, splits, phase, given)

    if spec.interpret is None:
        return launch("both", flags_buffer(plan.splits_SF))[0]
    _, *parts = launch("parts", plan.splits_SF[...])
    return launch("merge", plan.splits_SF[...], *parts)[0]


def _launch(
    spec: Spec, splits: int, phase: str, given: tuple[Array, ...]
) -> tuple[Array, Array, Array]:
    """Returns `o_TNH` and the parts: outputs `[K, splits, rows, H]` and log2-sum-exps. `given` ends
    with sinks if the model has them, then with the parts to merge if `phase` is "merge"; with
    "parts" nothing is merged; with "both" it is this launch's own parts."""
    groups, size, H = spec.tuning.groups, spec.size, spec.H
    pools = 2 if spec.kv_dtype is None else 3

    def extend_attend(q_ref, *refs, **sm):  # type: ignore[no-untyped-def]
        pool_refs, (table_ref, page_ref, items_ref, splits_ref, *rest) = refs[:pools], refs[pools:]
        *more, o_ref, parts_o, parts_lse = rest
        if phase == "merge":
            *sinks_ref, merge_o, merge_lse = more
        else:
            sinks_ref, merge_o, merge_lse = more, parts_o, parts_lse
        # Blocks start in the order of the grid. Owners wait for their followers, which have higher
        # splits: those start first.
        split, h, wg = (
            splits - 1 - lax.axis_index("split"),
            lax.axis_index("head"),
            lax.axis_index("wg"),
        )
        low, high, u0, u1, home, followers, *first_item = (
            splits_ref[split, i] for i in range(SPLIT_FIELDS)
        )

        def each_unit(step: Callable[[Array, _Unit], None]) -> tuple[Array, Array]:
            """`step` for every unit of the share; the next one's fields are read meanwhile. Returns
            how many tiles and units had keys."""

            def advance(u: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
                n, m, *fields = carry
                item = jnp.minimum(lax.div(u + 1, jnp.int32(spec.units)), items_ref.shape[0] - 1)
                following = [items_ref[item, i] for i in range(ITEM_FIELDS)]
                at, own, own_end, row, position, keys, first, line = fields
                last = lax.div(keys + (size - 1), jnp.int32(size))
                tiles = jnp.maximum(last - first, 1)
                share = lax.rem(u, jnp.int32(spec.units))
                there = line + share * tiles  # first tile of the unit in the line
                begin = first + jnp.maximum(low - there, 0)
                end = jnp.minimum(first + high - there, last)
                ours = there >= low
                merges = jnp.where(jnp.logical_and(ours, there + tiles > high), followers, 0)
                head = h * spec.G + share * spec.share
                step(
                    u,
                    _Unit(
                        at, own, own_end, row, position, keys, head, begin, end, ours, merges, n, m
                    ),
                )
                return (
                    n + jnp.maximum(end - begin, 0),
                    m + (keys > 0).astype(jnp.int32),
                    *following,
                )

            n, m, *_ = lax.fori_loop(u0, u1, advance, (jnp.int32(0), jnp.int32(0), *first_item))
            return n, m

        @pl.when(wg == groups)
        def _producer() -> None:
            plgpu.set_max_registers(spec.registers[0], action="decrease")
            table = PageTable(table_ref, page_ref[0])
            n, m = each_unit(lambda u, unit: _produce(spec, unit, q_ref, pool_refs, table, h, sm))
            parts = jnp.int32(0) if phase == "parts" else followers
            if phase == "both":
                pl.when(parts > 0)(
                    lambda: await_flag(splits_ref.at[split, SPLIT_FIELDS + h], parts * groups)
                )

            @pl.loop(0, parts)
            def _parts(c):  # type: ignore[no-untyped-def]
                at = _take(spec, sm["v_free"], n + c)
                plgpu.copy_gmem_to_smem(
                    merge_lse.at[h, split + 1 + c], sm["lse_in"].at[at], sm["lse_full"].at[at]
                )
                piece = size // spec.copies
                for j in range(spec.copies):
                    rows = pl.ds(j * piece, piece)
                    plgpu.copy_gmem_to_smem(
                        merge_o.at[h, split + 1 + c, rows],
                        sm["v"].at[at, rows],
                        sm["v_full"].at[at],
                    )

            # Every arrival is waited for, so that the barriers end in the phase they began in.
            _drain(spec, sm["k_free"], n)
            _drain(spec, sm["v_free"], n + parts)
            pl.when(m > 0)(lambda: plgpu.barrier_wait(sm["q_free"]))

        @pl.when(wg < groups)
        def _consumer() -> None:
            plgpu.set_max_registers(spec.registers[1], action="increase")

            def turn() -> None:
                if groups == 2:
                    plgpu.barrier_arrive(sm["turn"])
                    plgpu.barrier_wait(sm["turn"])

            def step(u, unit):  # type: ignore[no-untyped-def]
                pl.when(unit.keys > 0)(lambda: _take_queries(spec, sm, wg))
                carry = _attend_tiles(spec, sm, wg, unit, turn)
                pl.when(jnp.logical_or(wg == 0, u < u1 - 1))(turn)

                def add(c, carry):  # type: ignore[no-untyped-def]
                    at = lax.rem(unit.n + unit.end - unit.begin + c, jnp.int32(spec.tuning.stages))
                    own = pl.ds(pl.multiple_of(wg * ROWS, ROWS), ROWS)
                    plgpu.barrier_wait(sm["lse_full"].at[at])
                    lse = plgpu.load(
                        sm["lse_in"].at[at, wg],
                        layout=plgpu.Layout.WGMMA.reduce(1),
                        optimized=False,
                    )
                    plgpu.barrier_wait(sm["v_full"].at[at])
                    carry = merge(
                        carry, plgpu.load(sm["v"].at[at, own], layout=plgpu.Layout.WGMMA), lse
                    )
                    plgpu.commit_smem()  # plain reads before the next copy into the slot
                    plgpu.barrier_arrive(sm["v_free"].at[at])
                    return carry

                carry = lax.fori_loop(
                    0, jnp.int32(0) if phase == "parts" else unit.merges, add, carry
                )
                if sinks_ref:
                    carry = add_sinks(
                        carry, [sinks_ref[0][unit.head + i] for i in range(spec.share)], unit.ours
                    )
                out, lse = finish(carry)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for c in range(H // spec.width):
                    sm["o"].at[wg, c][...] = out[:, c * spec.width : (c + 1) * spec.width].astype(
                        spec.dtype
                    )
                sm["lse_out"].at[wg][...] = lse
                plgpu.commit_smem()
                pl.when(unit.ours)(lambda: _store(spec, sm["o"].at[wg], o_ref, unit, wg))

                @pl.when(jnp.logical_not(unit.ours))
                def _() -> None:
                    plgpu.copy_smem_to_gmem(sm["lse_out"].at[wg], parts_lse.at[h, split, wg])
                    for c in range(H // spec.width):
                        dst = parts_o.at[
                            h,
                            split,
                            pl.ds(pl.multiple_of(wg * ROWS, ROWS), ROWS),
                            pl.ds(c * spec.width, spec.width),
                        ]
                        plgpu.copy_smem_to_gmem(sm["o"].at[wg, c], dst)
                    plgpu.wait_smem_to_gmem(0)
                    if phase == "both":
                        raise_flag(splits_ref.at[home, SPLIT_FIELDS + h])

            pl.when(jnp.logical_and(wg == 1, u1 > u0))(turn)
            each_unit(step)
            plgpu.wait_smem_to_gmem(0)

    out = (
        jax.ShapeDtypeStruct((spec.T, spec.K * spec.G, H), spec.dtype),
        jax.ShapeDtypeStruct((spec.K, splits, size, H), spec.dtype),
        jax.ShapeDtypeStruct((spec.K, splits, groups, ROWS), jnp.float32),
    )
    grid = {
        "grid": (splits, spec.K),
        "grid_names": ("split", "head"),
        "num_threads": groups + 1,
        "thread_name": "wg",
    }
    run = plgpu.kernel(
        extend_attend, out_type=out, scratch_types=_scratch(spec), **grid, **spec.options
    )
    return run(*given)


def _scratch(spec: Spec) -> dict[str, Any]:
    """Shared memory and barriers of one block."""
    groups, stages, columns = spec.tuning.groups, spec.tuning.stages, spec.H // spec.width
    scratch = {
        "q_in": plgpu.SMEM((groups, columns, ROWS, spec.width), spec.dtype),
        "o": plgpu.SMEM((groups, columns, ROWS, spec.width), spec.dtype),
        "q": plgpu.SMEM((groups, ROWS, spec.H), spec.dtype, transforms=spec.tiled),
        "k": plgpu.SMEM((stages, spec.size, spec.H), spec.dtype, transforms=spec.tiled),
        "v": plgpu.SMEM((stages, spec.size, spec.H), spec.dtype, transforms=spec.tiled),
        "lse_in": plgpu.SMEM((stages, groups, ROWS), jnp.float32),
        "lse_out": plgpu.SMEM((groups, ROWS), jnp.float32),
        "q_full": plgpu.Barrier(
            num_arrivals=columns * (1 if spec.boxes else spec.tokens), num_barriers=groups
        ),
        "q_free": plgpu.Barrier(num_arrivals=groups),
        "k_full": plgpu.Barrier(num_arrivals=spec.copies, num_barriers=stages),
        "v_full": plgpu.Barrier(num_arrivals=spec.copies, num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        "lse_full": plgpu.Barrier(num_barriers=stages),
        "tail": plgpu.Barrier(num_arrivals=spec.copies),
        "turn": plgpu.Barrier(num_arrivals=groups),
    }
    if spec.kv_dtype is not None:
        scratch |= narrow.scratch(spec)
    if spec.interpret is not None:
        scratch["p"] = plgpu.SMEM((groups, ROWS, spec.size), spec.dtype, transforms=spec.tiled)
    return scratch


def _take(spec: Spec, free: Any, i: Array) -> Array:
    """The slot of the ring's entry `i`, once it is free."""
    at = lax.rem(i, jnp.int32(spec.tuning.stages))
    pl.when(i >= spec.tuning.stages)(lambda: plgpu.barrier_wait(free.at[at]))
    return at


def _drain(spec: Spec, free: Any, n: Array) -> None:
    """Waits until the last of `n` entries of a ring are free."""

    @pl.loop(jnp.maximum(0, n - spec.tuning.stages), n)
    def _(i):  # type: ignore[no-untyped-def]
        plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(spec.tuning.stages))])


def _produce(
    spec: Spec,
    unit: _Unit,
    q_ref: Any,
    pools: tuple[Any, Any],
    table: PageTable,
    h: Array,
    sm: dict[str, Any],
) -> None:
    """Copies a unit's queries, and its keys and values through the ring."""
    size, C = spec.size, spec.C
    last_page = lax.div(unit.keys - 1, jnp.int32(C))

    def places(t: Array) -> Iterator[tuple[Any, ...]]:
        """Page, head, first token in the page (None: the page is whole) and tokens of each copy of
        a tile.
        """
        if size < C:
            page = table[unit.row, lax.div(t * size, jnp.int32(C))]
            yield page, h, pl.multiple_of(lax.rem(t * size, jnp.int32(C)), size), size
        for j in range(size // C):  # pages past the last that is seen repeat it
            yield table[unit.row, jnp.minimum(t * (size // C) + j, last_page)], h, None, C

    def copy(ref: Any, t: Array, dst: Any, barrier: Any) -> None:
        for j, (page, head, within, tokens) in enumerate(places(t)):
            src = (
                ref.at[page, head] if within is None else ref.at[page, head, pl.ds(within, tokens)]
            )
            plgpu.copy_gmem_to_smem(src, dst if size < C else dst.at[pl.ds(j * C, C)], barrier)

    def take(name: str, t: Array) -> Array:
        return _take(spec, sm[f"{name}_free"], unit.n + t - unit.begin)

    @pl.when(unit.keys > 0)
    def _() -> None:
        pl.when(unit.m > 0)(lambda: plgpu.barrier_wait(sm["q_free"]))
        _copy_queries(spec, unit, q_ref, sm)

    if spec.kv_dtype is not None:
        narrow.produce(spec, (unit.begin, unit.end, unit.keys), pools, places, take, sm)
        return
    k_ref, v_ref = pools

    @pl.loop(unit.begin, unit.end)
    def _(t):  # type: ignore[no-untyped-def]
        i = unit.n + t - unit.begin
        at = _take(spec, sm["k_free"], i)
        copy(k_ref, t, sm["k"].at[at], sm["k_full"].at[at])
        _take(spec, sm["v_free"], i)
        whole = (t + 1) * size <= unit.keys

        @pl.when(whole)
        def _() -> None:
            copy(v_ref, t, sm["v"].at[at], sm["v_full"].at[at])

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            copy(v_ref, t, sm["v"].at[at], sm["tail"])
            plgpu.barrier_wait(sm["tail"])
            _zero_tail(sm["v"].at[at], size, spec.H, unit.keys - t * size)
            for _ in range(spec.copies):
                plgpu.barrier_arrive(sm["v_full"].at[at])


def _copy_queries(spec: Spec, unit: _Unit, q_ref: Any, sm: dict[str, Any]) -> None:
    """Queries into plain buffers: a box of tokens of one head, or each token's heads, since tokens
    are not all that a tile takes."""
    for wg in range(spec.tuning.groups):
        for c in range(spec.H // spec.width):
            column, dst = pl.ds(c * spec.width, spec.width), sm["q_in"].at[wg, c]
            if spec.boxes:
                plgpu.copy_gmem_to_smem(
                    q_ref.at[pl.ds(unit.at + wg * ROWS, ROWS), unit.head, column],
                    dst,
                    sm["q_full"].at[wg],
                )
                continue

            @pl.loop(0, spec.tokens)
            def _(j, wg=wg, column=column, dst=dst):  # type: ignore[no-untyped-def]
                token = jnp.minimum(unit.at + wg * spec.tokens + j, spec.T - 1)
                rows = dst.at[pl.ds(j * spec.share, spec.share)]
                plgpu.copy_gmem_to_smem(
                    q_ref.at[token, pl.ds(unit.head, spec.share), column], rows, sm["q_full"].at[wg]
                )


def _zero_tail(v: Any, size: int, H: int, count: Array) -> None:
    """Zeroes the values from token `count` on: they get weight 0, but 0 · NaN is NaN and a page may
    hold anything."""
    columns = H // 64

    @pl.loop(0, (size // 64) * columns)
    def _(i):  # type: ignore[no-untyped-def]
        # Small pieces, since the producer has few registers; a loop, since layout inference is slow
        # on many pieces.
        base = pl.multiple_of(lax.div(i, jnp.int32(columns)) * 64, 64)
        piece = v.at[
            pl.ds(base, 64), pl.ds(pl.multiple_of(lax.rem(i, jnp.int32(columns)) * 64, 64), 64)
        ]
        token = plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=plgpu.Layout.WGMMA)
        values = plgpu.load(piece, layout=plgpu.Layout.WGMMA)
        piece[...] = jnp.where(token < count - base, values, jnp.zeros_like(values))

    plgpu.commit_smem()


def _take_queries(spec: Spec, sm: dict[str, Any], wg: Array) -> None:
    """Tiled copies begin at multiples of 8 tokens and queries at any: so they pass through plain
    buffers."""
    plgpu.barrier_wait(sm["q_full"].at[wg])
    for c in range(spec.H // spec.width):
        rows = plgpu.load(sm["q_in"].at[wg, c], layout=plgpu.Layout.WGMMA, optimized=False)
        sm["q"].at[wg, :, pl.ds(c * spec.width, spec.width)][...] = rows
    plgpu.commit_smem()
    plgpu.barrier_arrive(sm["q_free"])


def _attend_tiles(
    spec: Spec, sm: dict[str, Any], wg: Array, unit: _Unit, turn: Callable[[], None]
) -> tuple[Array, Array, Array]:
    """Flash attention of one warpgroup over the share of a unit.

    All warpgroups take the same tiles: those before the first own query of the block need no mask,
    the others get one.
    """
    stages = jnp.int32(spec.tuning.stages)

    def step(t, carry, masked):  # type: ignore[no-untyped-def]
        at = lax.rem(unit.n + t - unit.begin, stages)
        plgpu.barrier_wait(sm["k_full"].at[at])

        def multiply(scores_ref):  # type: ignore[no-untyped-def]
            plgpu.wgmma(scores_ref, sm["q"].at[wg], sm["k"].at[at].T)
            turn()
            return scores_ref[...]

        scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, spec.size), jnp.float32))
        plgpu.barrier_arrive(sm["k_free"].at[at])

        def ready() -> Any:
            turn()
            plgpu.barrier_wait(sm["v_full"].at[at])
            return sm["v"].at[at]

        query = unit.position + wg * spec.tokens - t * spec.size if masked else None
        carry = fold(
            spec, carry, scores, query, ready, None if spec.interpret is None else sm["p"].at[wg]
        )
        plgpu.barrier_arrive(sm["v_free"].at[at])
        return carry

    middle = unit.begin
    carry = start(spec.H)
    if spec.window is None:
        middle = jnp.clip(
            lax.div(unit.position + unit.low - unit.at + 1, jnp.int32(spec.size)),
            unit.begin,
            unit.end,
        )
        carry = lax.fori_loop(unit.begin, middle, lambda t, c: step(t, c, False), carry)
    return lax.fori_loop(middle, unit.end, lambda t, c: step(t, c, True), carry)


def _store(spec: Spec, out: Any, o_ref: Any, unit: _Unit, wg: Array) -> None:
    """Writes own tokens alone: one after the other with their heads, or as boxes of tokens of one
    head, whose sizes are powers of two."""
    own = jnp.maximum(unit.low - unit.at - wg * spec.tokens, 0)
    count = jnp.minimum(unit.high - unit.at - wg * spec.tokens, spec.tokens) - own
    first = unit.at + wg * spec.tokens
    columns = [pl.ds(c * spec.width, spec.width) for c in range(spec.H // spec.width)]

    if not spec.boxes:

        @pl.loop(own, own + count)
        def _(j):  # type: ignore[no-untyped-def]
            for c, column in enumerate(columns):
                rows = out.at[c, pl.ds(j * spec.share, spec.share)]
                plgpu.copy_smem_to_gmem(
                    rows, o_ref.at[first + j, pl.ds(unit.head, spec.share), column]
                )

        return

    def store(begin: Array | int, size: int) -> None:
        for c, column in enumerate(columns):
            plgpu.copy_smem_to_gmem(
                out.at[c, pl.ds(begin, size)],
                o_ref.at[pl.ds(first + begin, size), unit.head, column],
            )

    pl.when(count == ROWS)(lambda: store(0, ROWS))

    @pl.when(jnp.logical_and(count > 0, count < ROWS))
    def _() -> None:
        for size in (32, 16, 8, 4, 2, 1):
            begin = own + lax.bitwise_and(count, jnp.int32(ROWS - 2 * size))
            pl.when(lax.bitwise_and(count, jnp.int32(size)) != 0)(
                lambda size=size, begin=begin: store(begin, size)
            )
