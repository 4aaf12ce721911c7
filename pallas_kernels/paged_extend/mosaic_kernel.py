"""The Hopper kernel of paged extend: splits x KV heads thread blocks in one launch, each with a
producer and one or two compute warpgroups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_flash import ROWS, Carry, finish, fold, merged, product, start
from pallas_kernels.mosaic_gpu import (
    TILED,
    PageTable,
    await_flag,
    drain,
    launch,
    plain,
    raise_flag,
    rows_apart,
    store_rows,
    take,
    tiled,
)
from pallas_kernels.paged_extend import mosaic_narrow as narrow
from pallas_kernels.paged_extend.mosaic_copies import Share, Unit, copy_part, produce
from pallas_kernels.paged_extend.mosaic_flash import Spec, add_sinks, causal, merge
from pallas_kernels.paged_extend.plan import SPLIT_FIELDS, ExtendPlan


def attend(
    spec: Spec,
    q: Array,
    pools: tuple[Array, ...],
    table: tuple[Array, Array],
    plan: ExtendPlan,
    sinks: Array | None,
) -> Array:
    """Run the share of every split and return `o_TNF`.

    `pools` are the pages of keys and of values, and their scales if they have some; `table` is the
    page table and its first page.
    """
    splits = plan.splits_SF.shape[0]

    def launch(phase: str, splits_SF: Any, *parts: Array) -> tuple[Array, Array, Array]:
        if sinks is None:
            more = parts
        else:
            more = (sinks.astype(jnp.float32), *parts)
        operands = (q, *pools, *table, plan.items_I8, splits_SF, *more)
        return _launch(spec, splits, phase, operands)

    return merged(spec.interpret, launch, plan.splits_SF)


def _launch(
    spec: Spec, splits: int, phase: str, operands: tuple[Array, ...]
) -> tuple[Array, Array, Array]:
    """Returns `o_TNF` and the parts: outputs `[K, splits, rows, F]` and log2-sum-exps.

    `operands` ends with sinks if the model has them, then with the parts to merge if `phase` is
    "merge". In phase "parts" nothing is merged; in phase "both" this launch merges its own parts.
    """
    groups = spec.tuning.groups
    stages = spec.tuning.stages
    pools = 2 if spec.kv_dtype is None else 3

    def extend_attend(q_ref, *refs, **sm):  # type: ignore[no-untyped-def]
        pool_refs = refs[:pools]
        table_ref, page_ref, items_ref, splits_ref, *rest = refs[pools:]
        *more, o_ref, parts_o, parts_lse = rest
        if phase == "merge":
            *sinks_ref, merge_o, merge_lse = more
        else:
            sinks_ref = more
            merge_o = parts_o
            merge_lse = parts_lse
        # Blocks start in the order of the grid. Owners wait for their followers, which have higher
        # splits: those start first.
        split = splits - 1 - lax.axis_index("split")
        h = lax.axis_index("head")
        wg = lax.axis_index("wg")
        low, high, u0, u1, home, followers, *first_item = (
            splits_ref[split, i] for i in range(SPLIT_FIELDS)
        )

        share = Share(spec, h, low, high, u0, u1, tuple(first_item), followers, items_ref)

        @pl.when(wg == groups)
        def _producer() -> None:
            plgpu.set_max_registers(spec.registers[0], action="decrease")
            table = PageTable(table_ref, page_ref[0])
            n, m = share.each_unit(
                lambda u, unit: produce(spec, unit, q_ref, pool_refs, table, h, sm)
            )
            parts = jnp.int32(0) if phase == "parts" else followers
            if phase == "both":
                pl.when(parts > 0)(
                    lambda: await_flag(splits_ref.at[split, SPLIT_FIELDS + h], parts * groups)
                )

            @pl.loop(0, parts)
            def _parts(c):  # type: ignore[no-untyped-def]
                entry = take(sm["v_free"], n + c, stages)
                copy_part(spec, (merge_o, merge_lse), (h, split + 1 + c), sm, entry)

            # Every arrival is waited for, so that the barriers end in the phase they began in.
            drain(sm["k_free"], n, stages)
            drain(sm["v_free"], n + parts, stages)
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
                    entry = lax.rem(unit.n + unit.end - unit.begin + c, jnp.int32(stages))
                    return _add_part(sm, wg, entry, carry)

                carry = lax.fori_loop(
                    0, jnp.int32(0) if phase == "parts" else unit.merges, add, carry
                )
                if sinks_ref:
                    carry = add_sinks(
                        carry, [sinks_ref[0][unit.head + i] for i in range(spec.share)], unit.ours
                    )
                _keep(spec, sm, wg, finish(carry))
                pl.when(unit.ours)(lambda: _store(spec, sm["o"].at[wg], o_ref, unit, wg))

                @pl.when(jnp.logical_not(unit.ours))
                def _() -> None:
                    _leave_part(spec, sm, wg, parts_o.at[h, split], parts_lse.at[h, split])
                    if phase == "both":
                        raise_flag(splits_ref.at[home, SPLIT_FIELDS + h])

            pl.when(jnp.logical_and(wg == 1, u1 > u0))(turn)
            share.each_unit(step)
            plgpu.wait_smem_to_gmem(0)

    out = (
        jax.ShapeDtypeStruct((spec.T, spec.K * spec.G, spec.F), spec.dtype),
        jax.ShapeDtypeStruct((spec.K, splits, spec.size, spec.F), spec.dtype),
        jax.ShapeDtypeStruct((spec.K, splits, groups, ROWS), jnp.float32),
    )
    return launch(
        extend_attend,
        operands,
        spec.interpret,
        thread_name="wg",
        out_type=out,
        scratch_types=_scratch(spec),
        grid=(splits, spec.K),
        grid_names=("split", "head"),
        num_threads=groups + 1,
        # Rows are reduced within a warp; the memory that reductions across warps would need is not
        # there
        compiler={"reduction_scratch_bytes": 0},
    )


def _add_part(sm: dict[str, Any], wg: Array, slot: Array, carry: Carry) -> Carry:
    """The carry with a follower's part, in this `slot`, added."""
    rows = pl.ds(pl.multiple_of(wg * ROWS, ROWS), ROWS)
    plgpu.barrier_wait(sm["lse_full"].at[slot])
    lse = plgpu.load(
        sm["lse_in"].at[slot, wg], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
    )
    plgpu.barrier_wait(sm["v_full"].at[slot])
    carry = merge(carry, plgpu.load(sm["v"].at[slot, rows], layout=plgpu.Layout.WGMMA), lse)
    plgpu.commit_smem()  # plain reads before the next copy into the slot
    plgpu.barrier_arrive(sm["v_free"].at[slot])
    return carry


def _keep(spec: Spec, sm: dict[str, Any], wg: Array, result: tuple[Array, Array]) -> None:
    """A unit's outputs and log2-sum-exps into shared memory."""
    out, lse = result
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for c in range(spec.F // spec.width):
        columns = out[:, c * spec.width : (c + 1) * spec.width]
        store_rows(sm["o"].at[wg, c], columns, spec.interpret)
    sm["lse_out"].at[wg][...] = lse
    plgpu.commit_smem()


def _leave_part(spec: Spec, sm: dict[str, Any], wg: Array, outputs: Any, lse: Any) -> None:
    """A follower's part into device memory, visible when this returns."""
    plgpu.copy_smem_to_gmem(sm["lse_out"].at[wg], lse.at[wg])
    rows = pl.ds(pl.multiple_of(wg * ROWS, ROWS), ROWS)
    for c, column in enumerate(spec.columns_of(spec.F)):
        plgpu.copy_smem_to_gmem(sm["o"].at[wg, c], outputs.at[rows, column])
    plgpu.wait_smem_to_gmem(0)


def _scratch(spec: Spec) -> dict[str, Any]:
    """Shared memory and barriers of one block."""
    groups = spec.tuning.groups
    stages = spec.tuning.stages
    columns = len(spec.columns)
    scratch = {
        "q_in": plgpu.SMEM((groups, columns, ROWS, spec.width), spec.dtype),
        "o": plgpu.SMEM((groups, spec.F // spec.width, ROWS, spec.width), spec.dtype),
        "q": plgpu.SMEM((groups, ROWS, spec.H), spec.dtype, transforms=tiled(spec.H)),
        "k": plgpu.SMEM((stages, spec.size, spec.H), spec.dtype, transforms=tiled(spec.H)),
        "v": plgpu.SMEM((stages, spec.size, spec.F), spec.dtype, transforms=tiled(spec.F)),
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
        scratch["p"] = plgpu.SMEM((groups, ROWS, spec.size), spec.dtype, transforms=TILED)
    return scratch


def _take_queries(spec: Spec, sm: dict[str, Any], wg: Array) -> None:
    """Tiled copies begin at multiples of 8 tokens and queries at any: so they pass through plain
    buffers."""
    plgpu.barrier_wait(sm["q_full"].at[wg])
    for c, column in enumerate(spec.columns):
        rows = plain(sm["q_in"].at[wg, c], spec.interpret)
        sm["q"].at[wg, :, column][...] = plgpu.load(
            rows, layout=plgpu.Layout.WGMMA, optimized=False
        )
    plgpu.commit_smem()
    plgpu.barrier_arrive(sm["q_free"])


def _attend_tiles(
    spec: Spec, sm: dict[str, Any], wg: Array, unit: Unit, turn: Callable[[], None]
) -> tuple[Array, Array, Array]:
    """Flash attention of one warpgroup over the share of a unit.

    All warpgroups take the same tiles: those before the first own query of the block need no mask,
    the others get one.
    """
    stages = jnp.int32(spec.tuning.stages)

    def step(t, carry, masked):  # type: ignore[no-untyped-def]
        slot = lax.rem(unit.n + t - unit.begin, stages)
        plgpu.barrier_wait(sm["k_full"].at[slot])

        scores = product(sm["q"].at[wg], sm["k"].at[slot].T, (ROWS, spec.size), turn)
        plgpu.barrier_arrive(sm["k_free"].at[slot])

        def ready() -> Any:
            turn()
            plgpu.barrier_wait(sm["v_full"].at[slot])
            return sm["v"].at[slot]

        mask = None
        if masked:
            query = unit.position + wg * spec.tokens - t * spec.size
            mask = functools.partial(causal, spec, query)
        carry = fold(
            spec, carry, scores, mask, ready, None if spec.interpret is None else sm["p"].at[wg]
        )
        plgpu.barrier_arrive(sm["v_free"].at[slot])
        return carry

    middle = unit.begin
    carry = start(spec.F)
    if spec.window is None:
        middle = jnp.clip(
            lax.div(unit.position + unit.low - unit.token + 1, jnp.int32(spec.size)),
            unit.begin,
            unit.end,
        )
        carry = lax.fori_loop(unit.begin, middle, lambda t, c: step(t, c, False), carry)
    return lax.fori_loop(middle, unit.end, lambda t, c: step(t, c, True), carry)


def _store(spec: Spec, out: Any, o_ref: Any, unit: Unit, wg: Array) -> None:
    """Writes own tokens alone: one after the other with their heads, or as boxes of tokens of one
    head, whose sizes are powers of two. Where boxes cannot begin at odd rows, the first token goes
    by itself if its row is one."""
    first_row = jnp.maximum(unit.low - unit.token - wg * spec.tokens, 0)
    count = jnp.minimum(unit.high - unit.token - wg * spec.tokens, spec.tokens) - first_row
    first = unit.token + wg * spec.tokens

    if not spec.boxes:

        @pl.loop(first_row, first_row + count)
        def _(j):  # type: ignore[no-untyped-def]
            for c, column in enumerate(spec.columns_of(spec.F)):
                rows = out.at[c, pl.ds(j * spec.share, spec.share)]
                plgpu.copy_smem_to_gmem(
                    rows, o_ref.at[first + j, pl.ds(unit.head, spec.share), column]
                )

        return

    def store(begin: Array | int, size: int) -> None:
        for c, column in enumerate(spec.columns_of(spec.F)):
            plgpu.copy_smem_to_gmem(
                out.at[c, pl.ds(begin, size)],
                o_ref.at[pl.ds(first + begin, size), unit.head, column],
            )

    pl.when(count == ROWS)(lambda: store(0, ROWS))

    @pl.when(jnp.logical_and(count > 0, count < ROWS))
    def _() -> None:
        for there, begin, size in boxes(first_row, count, even=rows_apart(spec.width) > 1):
            pl.when(there)(lambda size=size, begin=begin: store(begin, size))


def boxes(first_row: Any, count: Any, *, even: bool) -> Iterator[tuple[Any, Any, int]]:
    """`count` rows from `first_row` on, fewer than a tile and at least one, as boxes of powers of
    two: whether each is there, its first row and its rows. With `even`, boxes of several rows begin
    at even ones."""
    if even:
        odd = first_row & 1
        yield odd == 1, first_row, 1
        first_row = first_row + odd
        count = count - odd
    for size in (32, 16, 8, 4, 2, 1):
        yield (count & size) != 0, first_row + (count & (ROWS - 2 * size)), size
