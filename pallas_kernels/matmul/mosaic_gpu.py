"""y = x · wᵀ of a few rows for NVIDIA Hopper in Pallas Mosaic GPU: every block streams its weight rows through shared memory once.

A producer warpgroup fills a ring of TMA copies with `[n, k]` tiles of the weight and the same columns of x; one or two warpgroups multiply
on the tensor cores with x as the 64-row operand (rows are independent, so those that x lacks may hold anything) and the weight tile as the
other, whose width is any multiple of 8: so O / n fills the card. Where O is small, blocks take parts of K and XLA adds the parts. Blocks of
a cluster may share x: each loads a part of its rows and sends it to all.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.plan import PROCESSORS, Tuning, chunk_of, row_class, tuning_of

ROWS = 64  # rows of one WGMMA operand
BOX = 256  # most rows and columns of one copy
PREFETCH_BYTES = 8_000_000  # of the next product's weight: what memory delivers in two microseconds


class _Spec(NamedTuple):
    """What one compiled kernel is specialised to."""

    rows: int  # of x, padded to a row class
    O: int  # noqa: E741 - columns of y
    K: int
    halves: int  # 2 for a gated product: the weight's rows are O for the gate and then O for what it scales
    dtype: Any
    out_dtype: Any
    tuning: Tuning
    interpret: Any

    @property
    def tiled(self) -> tuple[Any, ...]:
        return plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)

    @property
    def by_rows(self) -> bool:
        """Whether the warpgroups share the rows of x, not those of the weight."""
        return self.rows > ROWS

    @property
    def height(self) -> int:
        """Rows of one warpgroup's product."""
        return max(ROWS, self.rows // self.tuning.groups) if self.by_rows else ROWS

    @property
    def width(self) -> int:
        """Columns of y that one warpgroup writes."""
        return self.columns if self.by_rows else self.columns // self.tuning.groups

    @property
    def columns(self) -> int:
        """Columns of y that one block writes."""
        return self.tuning.n // self.halves

    @property
    def tiles(self) -> int:
        """Operands that one slot holds of the weight, each of `halves * width` rows."""
        return self.columns // self.width

    @property
    def units(self) -> int:
        """Pieces of work of one cluster: weight row tiles, one a block of the cluster, times parts of K."""
        return -(-self.O // (self.columns * self.tuning.cluster)) * self.tuning.split

    @property
    def chunk(self) -> int:
        return chunk_of(self.height, self.width, jnp.dtype(self.out_dtype).itemsize, self.tuning.groups)


def _check(x: Array, w: Array) -> None:
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"mosaic_gpu matmul takes x [M, I] and w [O, I], got {x.shape} and {w.shape}")
    if x.dtype not in (jnp.bfloat16, jnp.float16) or w.dtype != x.dtype:
        raise ValueError(f"mosaic_gpu matmul takes bfloat16 or float16 throughout, got x {x.dtype}, w {w.dtype}")
    if w.shape[0] % 8 or w.shape[1] % 64 or 0 in w.shape:
        raise ValueError(f"mosaic_gpu matmul takes O a multiple of 8 and I a multiple of 64, got w {w.shape}")


def matmul(
    x_MI: Array,
    w_OI: Array,
    *,
    out_dtype: Any = None,
    following: Array | None = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """See `pallas_kernels.matmul`. 1 to 256 rows of bfloat16 or float16; O a multiple of 8, I of 64. Raises ValueError otherwise.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    _check(x_MI, w_OI)
    O, K = w_OI.shape  # noqa: E741
    rows = row_class(x_MI.shape[0])
    tuning = tuning or tuning_of(rows, O, K)
    out = jnp.dtype(out_dtype or x_MI.dtype)
    spec = _Spec(rows, O, K, 1, x_MI.dtype, out if tuning.split == 1 else jnp.dtype(jnp.float32), tuning, interpret)
    parts = _multiply(spec, x_MI, w_OI, following)
    return parts[0] if tuning.split == 1 else parts.sum(axis=0).astype(out)


def gated_matmul(x_MI: Array, w_OI: Array, *, following: Array | None = None, tuning: Tuning | None = None, interpret: Any = None) -> Array:
    """See `pallas_kernels.matmul`. As `matmul`, with O a multiple of 16; there are no parts of K."""
    _check(x_MI, w_OI)
    O, K = w_OI.shape  # noqa: E741
    if O % 16:
        raise ValueError(f"mosaic_gpu gated_matmul takes O a multiple of 16, got w {w_OI.shape}")
    rows = row_class(x_MI.shape[0])
    spec = _Spec(rows, O // 2, K, 2, x_MI.dtype, x_MI.dtype, tuning or tuning_of(rows, O, K, 2), interpret)
    return _multiply(spec, x_MI, w_OI, following)[0]


def _multiply(spec: _Spec, x: Array, w: Array, following: Array | None) -> Array:
    """The parts `[split, M, O]`: float32 if there is more than one, else the product in the output's dtype."""
    tuning, M = spec.tuning, x.shape[0]
    if M > 8 and M % 8:  # rows beyond x read as zeros, but a copy's tiles of eight rows must not be cut
        x = jnp.pad(x, ((0, -M % 8), (0, 0)))
    if following is not None and (following.dtype != w.dtype or following.shape[0] % 8 or following.shape[1] % 64):
        following = None
    clusters = min(spec.units, PROCESSORS // tuning.cluster)
    shared = tuning.cluster > 1
    steps = spec.K // tuning.k

    def kernel(x_ref, w_ref, *others, **sm):  # type: ignore[no-untyped-def]
        *following_ref, o_ref = others
        cluster, wg = lax.axis_index("cluster"), lax.axis_index("wg")
        rank = lax.axis_index("rank") if shared else 0

        def place(i):  # type: ignore[no-untyped-def]
            """First column of y, part, first step and end step of this block's unit number `i`."""
            unit = cluster + i * clusters
            tile, part = lax.div(unit, jnp.int32(tuning.split)), lax.rem(unit, jnp.int32(tuning.split))
            tile = tile * tuning.cluster + rank
            row = pl.multiple_of(tile * spec.columns, 8)  # rows beyond the weight's last read as zeros and are not written
            low, high = (lax.div(p * steps, jnp.int32(tuning.split)) for p in (part, part + 1))
            return row, part, low, high

        def each_unit(run):  # type: ignore[no-untyped-def]
            """Calls `run(place, steps done before)`; returns all steps done."""

            def body(i, done):  # type: ignore[no-untyped-def]
                at = place(i)
                run(at, done)
                return done + at[3] - at[2]

            if spec.units == clusters:
                return body(jnp.int32(0), jnp.int32(0))
            return lax.fori_loop(0, lax.div(spec.units - 1 - cluster, jnp.int32(clusters)) + 1, body, jnp.int32(0))

        @pl.when(wg == tuning.groups)
        def _producer() -> None:
            plgpu.set_max_registers(40, action="decrease")
            done = each_unit(lambda at, done: _fill(spec, x_ref, w_ref, at, done, sm))
            for ref in following_ref:
                _prefetch(spec, ref, cluster * tuning.cluster + rank, clusters * tuning.cluster)

            # Every arrival is waited for, so that the barriers end in the phase they began in.
            @pl.loop(jnp.maximum(done - tuning.stages, 0), done)
            def _(t):  # type: ignore[no-untyped-def]
                plgpu.barrier_wait(sm["free"].at[lax.rem(t, jnp.int32(tuning.stages))])

        @pl.when(wg < tuning.groups)
        def _consumer() -> None:
            plgpu.set_max_registers(232, action="increase")

            def run(at, done):  # type: ignore[no-untyped-def]
                y = _consume(spec, at, done, wg, sm)
                _store(spec, y, at, wg, sm["o"].at[wg], o_ref)

            each_unit(run)
            plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = f"{'gated_' if spec.halves == 2 else ''}matmul_{spec.rows}x{spec.O * spec.halves}x{spec.K}"  # for profiles
    scratch = {
        "x": plgpu.SMEM((tuning.stages, max(spec.rows, ROWS), tuning.k), spec.dtype, transforms=spec.tiled),
        "w": plgpu.SMEM((tuning.stages, spec.tiles, spec.halves * spec.width, tuning.k), spec.dtype, transforms=spec.tiled),
        "o": plgpu.SMEM((tuning.groups, spec.height, spec.chunk), spec.out_dtype),
        "full": plgpu.Barrier(num_arrivals=spec.tiles * spec.halves + 1, num_barriers=tuning.stages),
        "free": plgpu.Barrier(num_arrivals=tuning.groups, num_barriers=tuning.stages),
    }
    if shared:  # a slot is free when every block of the cluster has read the x that each of them sent to all
        scratch["free"] = plgpu.ClusterBarrier(collective_axes=("rank",), num_arrivals=tuning.groups, num_barriers=tuning.stages)
    given = {} if spec.interpret is None else {"interpret": spec.interpret}
    grid = {"grid": (clusters,), "grid_names": ("cluster",), "num_threads": tuning.groups + 1, "thread_name": "wg"}
    if shared:
        grid |= {"cluster": (tuning.cluster,), "cluster_names": ("rank",)}
    out = jax.ShapeDtypeStruct((tuning.split, x.shape[0], spec.O), spec.out_dtype)
    operands = (x, w) if following is None else (x, w, following)
    return plgpu.kernel(kernel, out_type=out, scratch_types=scratch, **grid, **given)(*operands)[:, :M]


def _first() -> Array:
    """Row 0, unknown to the compiler: for a slice that may end beyond an array, where copies read zeros and write nothing."""
    return lax.axis_index("wg") * 0


def _fill(spec: _Spec, x_ref: Any, w_ref: Any, at: tuple[Any, ...], done: Array, sm: dict[str, Any]) -> None:
    """Fills the ring with one unit's tiles of the weight and of x."""
    row, low, high = at[0], at[2], at[3]
    k, stages = spec.tuning.k, spec.tuning.stages

    @pl.loop(low, high)
    def _(t):  # type: ignore[no-untyped-def]
        number = done + t - low
        slot = lax.rem(number, jnp.int32(stages))
        pl.when(number >= stages)(lambda: plgpu.barrier_wait(sm["free"].at[slot]))
        columns = pl.ds(pl.multiple_of(t * k, k), k)
        for tile, half in itertools.product(range(spec.tiles), range(spec.halves)):
            rows = pl.ds(pl.multiple_of(row + half * spec.O + tile * spec.width, 8), spec.width)
            dst = sm["w"].at[slot, tile, pl.ds(half * spec.width, spec.width)]
            plgpu.copy_gmem_to_smem(w_ref.at[rows, columns], dst, sm["full"].at[slot])
        axes = "rank" if spec.tuning.cluster > 1 else None
        x = x_ref.at[pl.ds(_first(), spec.rows), columns]
        plgpu.copy_gmem_to_smem(x, sm["x"].at[slot, pl.ds(0, spec.rows)], sm["full"].at[slot], collective_axes=axes)


def _prefetch(spec: _Spec, w_ref: Any, block: Array, blocks: int) -> None:
    """Asks for what the blocks of the next product read first, so that memory does not rest until they ask for it themselves."""
    tuning = tuning_of(spec.rows, *w_ref.shape)
    steps, depth = w_ref.shape[1] // tuning.k, w_ref.shape[1] // tuning.split
    units = min(-(-w_ref.shape[0] // tuning.n) * tuning.split, PROCESSORS)
    width = min(PREFETCH_BYTES // (2 * units * tuning.n), depth) // 64 * 64
    boxes = [(begin, min(width - begin, BOX)) for begin in range(0, width, BOX)]
    rows = [(begin, min(tuning.n - begin, BOX)) for begin in range(0, tuning.n, BOX)]

    @pl.loop(block, units, step=blocks)
    def _(unit):  # type: ignore[no-untyped-def]
        tile, part = lax.div(unit, jnp.int32(tuning.split)), lax.rem(unit, jnp.int32(tuning.split))
        column = lax.div(part * steps, jnp.int32(tuning.split)) * tuning.k
        for first, height in rows:
            for begin, span in boxes:
                place = pl.ds(pl.multiple_of(tile * tuning.n + first, 8), height), pl.ds(pl.multiple_of(column + begin, 64), span)
                plgpu.async_prefetch(w_ref.at[place])


def _consume(spec: _Spec, at: tuple[Any, ...], done: Array, wg: Array, sm: dict[str, Any]) -> Array:
    """One warpgroup's share of y `[height, width]` over one unit's steps. A slot is given back one step late, while the next multiplies."""
    low, high = at[2], at[3]
    stages = jnp.int32(spec.tuning.stages)

    def multiply(acc):  # type: ignore[no-untyped-def]
        @pl.loop(low, high)
        def _(t):  # type: ignore[no-untyped-def]
            number = done + t - low
            slot = lax.rem(number, stages)
            plgpu.barrier_wait(sm["full"].at[slot])
            if spec.by_rows:
                x, w = sm["x"].at[slot, pl.ds(wg * spec.height, spec.height)], sm["w"].at[slot, 0]
            else:
                x, w = sm["x"].at[slot], sm["w"].at[slot, wg]
            plgpu.wgmma(acc, x, w.T)
            plgpu.wgmma_wait(1)

            pl.when(t > low)(lambda: plgpu.barrier_arrive(sm["free"].at[lax.rem(number - 1, stages)]))

        return acc[...]

    y = pl.run_scoped(multiply, plgpu.ACC((spec.height, spec.halves * spec.width), jnp.float32))
    plgpu.barrier_arrive(sm["free"].at[lax.rem(done + high - low - 1, stages)])
    if spec.halves == 1:
        return y
    gate, up = y[:, : spec.width], y[:, spec.width :]
    return gate / (1.0 + jnp.exp(-gate)) * up


def _store(spec: _Spec, y: Array, at: tuple[Any, ...], wg: Array, o: Any, o_ref: Any) -> None:
    """Writes those of one warpgroup's rows that x has, a chunk of columns at a time."""
    row, part = at[:2]
    real = min(spec.rows, spec.height)
    first = wg * spec.height if spec.by_rows else _first()
    column = row if spec.by_rows else row + wg * spec.width
    for c in range(0, spec.width, spec.chunk):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o[...] = y[:, c : c + spec.chunk].astype(spec.out_dtype)
        plgpu.commit_smem()
        dst = o_ref.at[part, pl.ds(first, real), pl.ds(pl.multiple_of(column + c, 8), spec.chunk)]
        plgpu.copy_smem_to_gmem(o.at[pl.ds(0, real)], dst)


gated_jitted = functools.partial(jax.jit, static_argnames=("tuning", "interpret"))(gated_matmul)
jitted = functools.partial(jax.jit, static_argnames=("out_dtype", "tuning", "interpret"))(matmul)
