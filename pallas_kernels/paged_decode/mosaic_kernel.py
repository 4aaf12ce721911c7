"""The Hopper kernel of paged decode: splits x KV heads thread blocks, each a producer and one or two
consumer warpgroups, in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import PageTable, flags_buffer
from pallas_kernels.paged_decode import mosaic_narrow as narrow
from pallas_kernels.paged_decode.mosaic_flags import await_flag, raise_flag
from pallas_kernels.paged_decode.mosaic_flash import (
    ROWS,
    TILE,
    Carry,
    Spec,
    fold,
    part_scores,
    scores_of,
    start,
    zero_tail,
)
from pallas_kernels.paged_decode.plan import ROW_FIELDS, SPLIT_FIELDS, DecodePlan

# 8 x 64 elements over a warpgroup: a warp two rows, a thread 8 bytes of one.
QUERY_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def attend(
    spec: Spec,
    q: Array,
    pools: tuple[Array, ...],
    rows: tuple[Array, ...],
    plan: DecodePlan,
    sinks: Array | None,
) -> Array:
    """Runs every split's share and returns `o_BNH`. q is `[B * N, H]`, at least `spec.group` rows;
    `pools` are pages of keys and of values, and their scales if they have some; `rows` are the page
    table, its first page, and the lengths.

    The interpreter sees no flags and would report what owners read of their followers' parts as
    races. There the kernel runs twice: once without merging, and again with the parts of the first
    run as inputs.
    """
    splits = plan.splits_SF.shape[0]

    def launch(phase: str, splits_SF: Any, *parts: Array) -> tuple[Array, Array, Array]:
        more = parts if sinks is None else (sinks, *parts)
        return _launch(spec, splits, phase, (q, *pools, *rows, plan.rows_B4, splits_SF, *more))

    if spec.interpret is None:
        return launch("both", flags_buffer(plan.splits_SF))[0]
    _, *parts = launch("parts", plan.splits_SF[...])
    return launch("merge", plan.splits_SF[...], *parts)[0]


def _launch(
    spec: Spec, splits: int, phase: str, given: tuple[Array, ...]
) -> tuple[Array, Array, Array]:
    """Returns `o_BNH` and the parts: outputs `[K, parts * group, H]` and log2-sum-exps. `given`
    ends with sinks if the model has them, then with the parts to merge if `phase` is "merge"; with
    "parts" nothing is merged; with "both" it is this launch's own parts."""
    H, G, group, stages, queries = (
        spec.H,
        spec.G,
        spec.group,
        spec.tuning.stages,
        spec.tuning.queries,
    )
    columns = [pl.ds(c * spec.width, spec.width) for c in range(H // spec.width)]

    pools = 2 if spec.kv_dtype is None else 3

    def decode_attend(q_ref, *refs, **sm):  # type: ignore[no-untyped-def]
        pool_refs = refs[:pools]
        table_ref, page_ref, lengths_ref, rows_ref, splits_ref, *rest = refs[pools:]
        *more, o_ref, parts_o, parts_lse = rest
        if phase == "merge":
            *sinks_ref, merge_o, merge_lse = more
        else:
            sinks_ref, merge_o, merge_lse = more, parts_o, parts_lse
        # Blocks start in the order of the grid. A row's followers have higher splits than its owner,
        # which waits for them: they start first.
        split, h, wg = (
            splits - 1 - lax.axis_index("split"),
            lax.axis_index("head"),
            lax.axis_index("wg"),
        )
        low, high, r0, r1, *first_row, home, followers = (
            splits_ref[split, i] for i in range(SPLIT_FIELDS)
        )
        chunks = (
            jnp.int32(0)
            if phase == "parts"
            else lax.div(followers * group + ROWS - 1, jnp.int32(ROWS))
        )
        first_part = (split + 1) * group

        def each_row(step: Callable[..., Array]) -> Array:
            """`step(row, fields, rows in use before it)` over the share; the next row's fields are
            read while this one is worked on."""

            def advance(r: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
                following = [rows_ref[jnp.minimum(r + 1, spec.B - 1), i] for i in range(ROW_FIELDS)]
                begin, end, length, zero, n = carry
                fields = begin, end, length, zero, jnp.maximum(low, begin), jnp.minimum(high, end)
                step(r, fields, n)
                return (*following, n + (end > begin).astype(jnp.int32))

            return lax.fori_loop(r0, r1, advance, (*first_row, jnp.int32(0)))[-1]

        ring = _ring(spec, low, high)

        @pl.when(wg == 1)
        def _producer() -> None:
            plgpu.set_max_registers(40, action="decrease")
            table = PageTable(table_ref, page_ref[0])

            def row(r, fields, n):  # type: ignore[no-untyped-def]
                _, _, length, zero, begin, end = fields
                last_page = lax.div(length - 1, jnp.int32(spec.C))

                @pl.loop(begin, end)
                def _tile(t):  # type: ignore[no-untyped-def]
                    # Before the wait, so that they come during it
                    pages = pages_of(spec, table, r, (t - zero) * TILE, last_page)
                    at = _take(sm["free"], t - low, stages)
                    (copy_tile if spec.kv_dtype is None else narrow.copy_tile)(
                        spec, pool_refs, pages, h, sm, at
                    )

                    @pl.when(t == begin)  # after the copies, so that they do not wait for this load
                    def _() -> None:
                        slot = lax.rem(n, jnp.int32(queries))
                        pl.when(n >= queries)(lambda: plgpu.barrier_wait(sm["q_free"].at[slot]))
                        copy_queries(spec, q_ref, spec.first_query(r, h)[0], sm["q"].at[slot])
                        plgpu.barrier_arrive(sm["q_full"].at[slot])

            rows = each_row(row)
            if phase == "both":
                with jax.named_scope("wait for flags"):
                    pl.when(followers > 0)(
                        lambda: await_flag(splits_ref.at[split, SPLIT_FIELDS + h], followers)
                    )

            @pl.loop(0, chunks)
            def _parts(c):  # type: ignore[no-untyped-def]
                at = _take(sm[ring.free], ring.entry(c), ring.slots)
                _copy_parts(spec, ring, (merge_o, merge_lse), (h, first_part + c * ROWS), sm, at)

            # Every arrival is waited for, so that the barriers end in the phase they began in.
            _drain(sm["free"], ring.entry(chunks) if spec.kv_dtype is None else high - low, stages)
            if spec.kv_dtype is not None:
                _drain(sm["part_free"], chunks, ring.slots)
            _drain(sm["q_free"], rows, queries)

        @pl.when(wg == 0)
        def _consumer() -> None:
            plgpu.set_max_registers(232, action="increase")
            sinks_G = [sinks_ref[0][h * G + i] for i in range(G)] if sinks_ref else None

            def store(r, begin):  # type: ignore[no-untyped-def]
                for c, column in enumerate(columns):
                    plgpu.copy_smem_to_gmem(
                        sm["o"].at[c, pl.ds(begin, G)], o_ref.at[r, pl.ds(h * G, G), column]
                    )

            _zero_dead_rows(spec, split, splits, lengths_ref, sm["o"], store)

            def row(r, fields, n):  # type: ignore[no-untyped-def]
                row_begin, row_end, length, zero, begin, end = fields
                slot = lax.rem(n, jnp.int32(queries))
                ours = row_begin >= low
                own = spec.first_query(r, h)[1]

                def step(t, carry):  # type: ignore[no-untyped-def]
                    return fold_tile(
                        spec,
                        sm,
                        slot,
                        lax.rem(t - low, jnp.int32(stages)),
                        (t - zero) * TILE,
                        length,
                        carry,
                    )

                def merge(c, carry):  # type: ignore[no-untyped-def]
                    at = lax.rem(ring.entry(c), jnp.int32(ring.slots))
                    return _fold_parts(spec, ring, sm, at, followers - c * (ROWS // group), carry)

                @pl.when(end > begin)
                def _() -> None:
                    plgpu.barrier_wait(sm["q_full"].at[slot])
                    if spec.kv_dtype is None:
                        carry = lax.fori_loop(begin, end, step, start(H, sinks_G, own, ours))
                    else:
                        share = (begin, end, low, zero, length)
                        carry = narrow.attend(
                            spec, sm, slot, share, own, lambda: start(H, sinks_G, own, ours)
                        )
                    plgpu.barrier_arrive(sm["q_free"].at[slot])
                    merges = jnp.where(jnp.logical_and(ours, row_end > high), chunks, 0)
                    with jax.named_scope("merge"):
                        acc, top, total = lax.fori_loop(0, merges, merge, carry)
                    query = (
                        plgpu.broadcasted_iota(jnp.int32, acc.shape, 0, layout=plgpu.Layout.WGMMA)
                        - own
                    )
                    # The others are neighbours' queries, perhaps NaN
                    mine = jnp.logical_and(query >= 0, query < G)
                    acc = jnp.where(
                        mine, acc / lax.broadcast_in_dim(total, acc.shape, [0]), 0.0
                    ).astype(spec.dtype)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for c in range(len(columns)):
                        sm["o"].at[c][...] = acc[:, c * spec.width : (c + 1) * spec.width]
                    sm["lse_out"][...] = top + jnp.log2(total)
                    plgpu.commit_smem()
                    pl.when(ours)(lambda: store(r, own))

                    @pl.when(jnp.logical_not(ours))
                    def _() -> None:
                        part = pl.ds(pl.multiple_of(split * group, group), group)
                        plgpu.copy_smem_to_gmem(
                            sm["lse_out"].at[pl.ds(0, group)], parts_lse.at[h, part]
                        )
                        for c, column in enumerate(columns):
                            plgpu.copy_smem_to_gmem(
                                sm["o"].at[c, pl.ds(0, group)], parts_o.at[h, part, column]
                            )
                        with jax.named_scope("wait for parts to leave"):
                            plgpu.wait_smem_to_gmem(0)
                        if phase == "both":
                            raise_flag(splits_ref.at[home, SPLIT_FIELDS + h])

            each_row(row)
            with jax.named_scope("wait for output to leave"):
                plgpu.wait_smem_to_gmem(0)

        if spec.tuning.consumers > 1:
            pl.when(wg == 2)(lambda: narrow.second_consumer(spec, sm, each_row, h, low))

    parts = splits * group + ROWS  # the last owner reads whole tiles of ROWS rows
    out = (
        jax.ShapeDtypeStruct((spec.B, spec.K * G, H), spec.dtype),
        jax.ShapeDtypeStruct((spec.K, parts, H), spec.dtype),
        jax.ShapeDtypeStruct((spec.K, parts), jnp.float32),
    )
    threads = 1 + spec.tuning.consumers
    grid = {
        "grid": (splits, spec.K),
        "grid_names": ("split", "head"),
        "num_threads": threads,
        "thread_name": "wg",
    }
    run = plgpu.kernel(
        decode_attend, out_type=out, scratch_types=_scratch(spec), **grid, **spec.options
    )
    return run(*given)


def _take(free: Any, i: Array, slots: int) -> Array:
    """The slot of a ring's entry `i`, once it is free."""
    at = lax.rem(i, jnp.int32(slots))
    pl.when(i >= slots)(lambda: plgpu.barrier_wait(free.at[at]))
    return at


def _drain(free: Any, n: Array, slots: int) -> None:
    """Waits until the last of `n` entries of a ring are free."""

    @pl.loop(jnp.maximum(0, n - slots), n)
    def _(i):  # type: ignore[no-untyped-def]
        plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(slots))])


def _scratch(spec: Spec) -> dict[str, Any]:
    """Shared memory and barriers of one block."""
    stages, queries = spec.tuning.stages, spec.tuning.queries
    scratch = {
        "o": plgpu.SMEM((spec.H // spec.width, ROWS, spec.width), spec.dtype),
        "lse_out": plgpu.SMEM((ROWS,), jnp.float32),
        "q_full": plgpu.Barrier(num_barriers=queries),
        "q_free": plgpu.Barrier(num_arrivals=spec.tuning.consumers, num_barriers=queries),
        "free": plgpu.Barrier(num_barriers=stages),
    }
    if spec.kv_dtype is not None:
        scratch |= narrow.scratch(spec)
    else:
        scratch |= {
            "q": plgpu.SMEM((queries, ROWS, spec.H), spec.dtype, transforms=spec.tiled),
            "k": plgpu.SMEM((stages, TILE, spec.H), spec.dtype, transforms=spec.tiled),
            "v": plgpu.SMEM((stages, TILE, spec.H), spec.dtype, transforms=spec.tiled),
            "lse_in": plgpu.SMEM((stages, ROWS), jnp.float32),
            "k_full": plgpu.Barrier(num_arrivals=spec.copies, num_barriers=stages),
            "v_full": plgpu.Barrier(num_arrivals=spec.copies, num_barriers=stages),
            "lse_full": plgpu.Barrier(num_barriers=stages),
        }
    if spec.interpret is not None:
        scratch["p"] = plgpu.SMEM((ROWS, TILE), spec.dtype, transforms=spec.tiled)
    return scratch


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
    spec: Spec, pools: tuple[Any, ...], pages: list[Any], h: Array, sm: dict[str, Any], at: Array
) -> None:
    """TMA copies of one K and one V tile of head `h`."""
    for pages_ref, name in zip(pools, ("k", "v"), strict=True):
        dst, barrier = sm[name].at[at], sm[f"{name}_full"].at[at]
        for j, (page, within) in enumerate(pages):
            src = (
                pages_ref.at[page, h]
                if within is None
                else pages_ref.at[page, h, pl.ds(pl.multiple_of(within, TILE), TILE)]
            )
            plgpu.copy_gmem_to_smem(
                src, dst if spec.copies == 1 else dst.at[pl.ds(j * spec.C, spec.C)], barrier
            )


class _Ring(NamedTuple):
    """Where parts of other splits go: a buffer of so many slots and its barriers, of which `high -
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


def _ring(spec: Spec, low: Array, high: Array) -> _Ring:
    """Parts follow the share's tiles where they look like values; pages of 8 bits leave them a ring
    of their own."""
    if spec.kv_dtype is None:
        return _Ring("v", "v_full", "free", spec.tuning.stages, low, high)
    return _Ring("parts", "part_full", "part_free", spec.parts, low, low)


def _copy_parts(
    spec: Spec,
    ring: _Ring,
    parts: tuple[Any, Any],
    place: tuple[Array, Array],
    sm: dict[str, Any],
    at: Array,
) -> None:
    """TMA copies of `ROWS` rows of parts of head `h` from `first` on: outputs where values go, in
    as many copies as those take, and log2-sum-exps."""
    (outputs, lse), (h, first) = parts, place
    plgpu.copy_gmem_to_smem(
        lse.at[h, pl.ds(first, ROWS)], sm["lse_in"].at[at], sm["lse_full"].at[at]
    )
    piece = ROWS // spec.copies
    for j in range(spec.copies):
        source = pl.ds(pl.multiple_of(first, spec.group) + j * piece, piece)
        plgpu.copy_gmem_to_smem(
            outputs.at[h, source],
            sm[ring.values].at[at, pl.ds(j * piece, piece)],
            sm[ring.full].at[at],
        )


def copy_queries(spec: Spec, q_ref: Any, first: Array, dst: Any) -> None:
    """Rows `first` to `first + group` of q into the first rows of a tile. By registers: tiled TMA
    copies begin at multiples of 8 rows."""
    rows = plgpu.load(q_ref.at[pl.ds(first, spec.group)], layout=QUERY_LAYOUT, optimized=False)
    dst.at[pl.ds(0, spec.group)][...] = rows
    plgpu.commit_smem()


def fold_tile(
    spec: Spec,
    sm: dict[str, Any],
    slot: Array,
    at: Array,
    first: Array,
    length: Array,
    carry: Carry,
) -> Carry:
    """One step over the keys and values in entry `at` of the ring, whose first token is at position
    `first`; queries of buffer `slot`."""

    def add(scores: Array) -> Carry:
        zero_tail(sm["v"].at[at], spec.H, length - first)
        return fold(spec, carry, scores, sm["v"].at[at], sm.get("p"))

    return step_over(
        sm, at, lambda: scores_of(spec, sm["q"].at[slot], sm["k"].at[at], first, length), add
    )


def step_over(
    sm: dict[str, Any], at: Array, scores: Callable[[], Array], add: Callable[[Array], Carry]
) -> Carry:
    """`scores()` once the keys in entry `at` of the ring are there, then `add(them)` once the
    values are; the entry is free afterwards."""
    with jax.named_scope("wait for keys"):  # scopes are what the kernel's own profiler shows
        plgpu.barrier_wait(sm["k_full"].at[at])
    with jax.named_scope("scores"):
        found = scores()
    with jax.named_scope("wait for values"):
        plgpu.barrier_wait(sm["v_full"].at[at])
    with jax.named_scope("fold"):
        carry = add(found)
        plgpu.barrier_arrive(sm["free"].at[at])
    return carry


def _fold_parts(
    spec: Spec, ring: _Ring, sm: dict[str, Any], at: Array, parts: Array, carry: Carry
) -> Carry:
    """One step over the parts in entry `at` of the ring, of which the first `parts` count."""
    plgpu.barrier_wait(sm["lse_full"].at[at])
    lse = plgpu.load(sm["lse_in"].at[at], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    plgpu.barrier_wait(sm[ring.full].at[at])
    zero_tail(sm[ring.values].at[at], spec.H, parts * spec.group)
    carry = fold(
        spec, carry, part_scores(spec.group, lse, parts), sm[ring.values].at[at], sm.get("p")
    )
    plgpu.barrier_arrive(sm[ring.free].at[at])
    return carry


def _zero_dead_rows(
    spec: Spec,
    split: Array,
    splits: int,
    lengths_ref: Any,
    o: Any,
    store: Callable[[Array, int], None],
) -> None:
    """Every `splits`-th row from `split` on gets zeros where its length is 0; the lengths are read at
    once, while the first tile comes."""
    rows = [split + i * splits for i in range(-(-spec.B // splits))]
    dead = [
        jnp.logical_and(row < spec.B, lengths_ref[jnp.minimum(row, spec.B - 1)] == 0)
        for row in rows
    ]
    some = dead[0]
    for more in dead[1:]:
        some = jnp.logical_or(some, more)

    @pl.when(some)
    def _() -> None:
        zeros = plgpu.layout_cast(jnp.full(o.shape[1:], 0.0, spec.dtype), plgpu.Layout.WGMMA)
        for c in range(o.shape[0]):
            o.at[c][...] = zeros
        plgpu.commit_smem()
        for row, is_dead in zip(rows, dead, strict=True):
            pl.when(is_dead)(lambda row=row: store(row, 0))
