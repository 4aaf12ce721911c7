"""The gated product for NVIDIA Hopper in Pallas Mosaic GPU. A block computes gate and up of some
outputs and writes their product.

A producer warpgroup fills a ring of TMA copies with `[n, 64]` tiles of the weight, half gate and
half up, and the same columns of x. The other warpgroups share the rows of x and multiply on the
tensor cores. The weight tile is the operand whose width can be any multiple of 8, so tiles can fill
the card a whole number of times. Two blocks of a cluster may share x: each loads half of its rows
and multicasts them to both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_matmul.gating import Gating, computes, in_kernels
from pallas_kernels.gated_matmul.plan import (
    PROCESSORS,
    K,
    Tuning,
    bands,
    chunk_of,
    is_faster,
    tuning_of,
)
from pallas_kernels.mosaic_gpu import (
    PRODUCER_REGISTERS,
    TILED,
    banded,
    drain,
    launch,
    padded,
    registers_of,
    take,
)
from pallas_kernels.target import Target

BAND_GROUP = 8  # bands of x that pass over the weight side by side


class _Spec(NamedTuple):
    """Static parameters of a compiled kernel: shapes, type, gating and sizes."""

    M: int
    F: int
    I: int
    dtype: Any
    gating: Gating
    tuning: Tuning
    interpret: Any

    @property
    def groups(self) -> int:
        return self.tuning.warpgroups

    @property
    def height(self) -> int:
        """Rows of one warpgroup's product."""
        return self.tuning.rows // self.groups

    @property
    def width(self) -> int:
        """Columns of y that one block writes."""
        return self.tuning.n // 2

    @property
    def across(self) -> int:
        """Tiles of y's columns, counted in clusters."""
        return -(-self.F // (self.width * self.tuning.cluster))

    @property
    def bands(self) -> int:
        """Tiles of y's rows."""
        return bands(self.M, self.tuning.rows)

    @property
    def chunk(self) -> int:
        return chunk_of(self.height, self.width, self.groups, self.F)


class _Tile(NamedTuple):
    """Where a block's tile of y begins. Rows and columns beyond the end of y are not written."""

    row: Array
    column: Array


def prefers(target: Target, x: Any, w: Any, gating: Gating) -> bool:
    """Where the kernel was measured to be faster than XLA's product and activation."""
    return is_faster(x.shape[0], w.size * w.dtype.itemsize)


def check(x: Any, w: Any, gating: Gating) -> None:
    """Raise ValueError unless x and w are bfloat16 or float16, F is a multiple of 8 and I of 64,
    and Mosaic has the gating's functions."""
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1] or not x.shape[0]:
        raise ValueError(
            f"mosaic_gpu gated_matmul takes x [M, I] and w [O, I], got {x.shape} and {w.shape}"
        )
    if x.dtype not in (jnp.bfloat16, jnp.float16) or w.dtype != x.dtype:
        raise ValueError(
            "mosaic_gpu gated_matmul takes bfloat16 or float16 throughout, "
            f"got x {x.dtype}, w {w.dtype}"
        )
    if w.shape[0] % 16 or w.shape[1] % K or 0 in w.shape:
        raise ValueError(
            f"mosaic_gpu gated_matmul takes O a multiple of 16 and I of {K}, got w {w.shape}"
        )
    if not computes(gating):
        raise ValueError("mosaic_gpu gated_matmul takes gatings without erf; approximate gelu")


def gated_matmul(
    x_MI: Array,
    w_OI: Array,
    gating: Gating,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """See `pallas_kernels.gated_matmul`. Raises what `check` raises.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    check(x_MI, w_OI, gating)
    M, I = x_MI.shape
    O = w_OI.shape[0]
    x_MI = padded(x_MI)
    sizes = tuning or tuning_of(M, O, I)
    spec = _Spec(x_MI.shape[0], O // 2, I, x_MI.dtype, gating, sizes, interpret)
    return _multiply(spec, x_MI, w_OI)[:M]


def _multiply(spec: _Spec, x: Array, w: Array) -> Array:
    tuning = spec.tuning
    groups = spec.groups
    shared = tuning.cluster > 1
    steps = spec.I // K
    units = spec.across * spec.bands
    clusters = min(units, PROCESSORS // tuning.cluster)

    def kernel(x_ref, w_ref, o_ref, **sm):  # type: ignore[no-untyped-def]
        cluster = lax.axis_index("cluster")
        wg = lax.axis_index("wg")
        rank = lax.axis_index("rank") if shared else 0

        def each_unit(run):  # type: ignore[no-untyped-def]
            """Call `run(tile, steps done before)` for each own tile; returns the steps done."""

            def body(i, done):  # type: ignore[no-untyped-def]
                across, band = _tile_of(spec, cluster + i * clusters)
                column = pl.multiple_of((across * tuning.cluster + rank) * spec.width, 8)
                run(_Tile(pl.multiple_of(band * tuning.rows, 8), column), done)
                return done + steps

            return lax.fori_loop(
                0, lax.div(units - 1 - cluster, jnp.int32(clusters)) + 1, body, jnp.int32(0)
            )

        @pl.when(wg == groups)
        def _producer() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            done = each_unit(lambda tile, done: _fill(spec, x_ref, w_ref, tile, done, sm))
            drain(sm["free"], done, tuning.stages)

        @pl.when(wg < groups)
        def _consumer() -> None:
            plgpu.set_max_registers(registers_of(groups), action="increase")
            each_unit(
                lambda tile, done: _store(
                    spec, _consume(spec, done, wg, sm), tile, wg, sm["o"].at[wg], o_ref
                )
            )
            plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = f"gated_matmul_{spec.M}x{2 * spec.F}x{spec.I}"  # for profiles
    scratch = {
        "x": plgpu.SMEM((tuning.stages, tuning.rows, K), spec.dtype, transforms=TILED),
        "w": plgpu.SMEM((tuning.stages, tuning.n, K), spec.dtype, transforms=TILED),
        "o": plgpu.SMEM((groups, spec.height, spec.chunk), spec.dtype),
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=tuning.stages),
        "free": plgpu.Barrier(num_arrivals=groups, num_barriers=tuning.stages),
    }
    if shared:  # a slot is free once both blocks have read the x that was sent to both
        scratch["free"] = plgpu.ClusterBarrier(
            collective_axes=("rank",), num_arrivals=groups, num_barriers=tuning.stages
        )
    grid: dict[str, Any] = {
        "grid": (clusters,),
        "grid_names": ("cluster",),
        "num_threads": groups + 1,
        "thread_name": "wg",
    }
    if shared:
        grid |= {"cluster": (tuning.cluster,), "cluster_names": ("rank",)}
    out = jax.ShapeDtypeStruct((spec.M, spec.F), spec.dtype)
    return launch(kernel, (x, w), spec.interpret, out_type=out, scratch_types=scratch, **grid)


def _tile_of(spec: _Spec, unit: Array) -> tuple[Array, Array]:
    """Column tile (counted in clusters) and band of a unit."""
    if spec.bands == 1:
        # Not a constant: the compiler would reject a slice that ends beyond the array
        return unit, lax.axis_index("wg") * 0
    return banded(unit, spec.across, spec.bands, BAND_GROUP)


def _fill(
    spec: _Spec, x_ref: Any, w_ref: Any, tile: _Tile, done: Array, sm: dict[str, Any]
) -> None:
    """Fill the ring with one unit's tiles of the weight and of x."""
    stages = spec.tuning.stages
    axes = "rank" if spec.tuning.cluster > 1 else None

    @pl.loop(0, spec.I // K)
    def _(t):  # type: ignore[no-untyped-def]
        slot = take(sm["free"], done + t, stages)
        columns = pl.ds(pl.multiple_of(t * K, K), K)
        for half in range(2):
            rows = pl.ds(pl.multiple_of(tile.column + half * spec.F, 8), spec.width)
            dst = sm["w"].at[slot, pl.ds(half * spec.width, spec.width)]
            plgpu.copy_gmem_to_smem(w_ref.at[rows, columns], dst, sm["full"].at[slot])
        x = x_ref.at[pl.ds(tile.row, spec.tuning.rows), columns]
        plgpu.copy_gmem_to_smem(x, sm["x"].at[slot], sm["full"].at[slot], collective_axes=axes)


def _consume(spec: _Spec, done: Array, wg: Array, sm: dict[str, Any]) -> Array:
    """One warpgroup's share of y `[height, width]`. A slot is released one step late, while the
    next product runs."""
    steps = spec.I // K
    stages = jnp.int32(spec.tuning.stages)

    def multiply(acc):  # type: ignore[no-untyped-def]
        @pl.loop(0, steps)
        def _(t):  # type: ignore[no-untyped-def]
            slot = lax.rem(done + t, stages)
            plgpu.barrier_wait(sm["full"].at[slot])
            plgpu.wgmma(
                acc, sm["x"].at[slot, pl.ds(wg * spec.height, spec.height)], sm["w"].at[slot].T
            )
            plgpu.wgmma_wait(1)
            pl.when(t > 0)(
                lambda: plgpu.barrier_arrive(sm["free"].at[lax.rem(done + t - 1, stages)])
            )

        return acc[...]

    both = pl.run_scoped(multiply, plgpu.ACC((spec.height, 2 * spec.width), jnp.float32))
    plgpu.barrier_arrive(sm["free"].at[lax.rem(done + steps - 1, stages)])
    gate = both[:, : spec.width]
    up = both[:, spec.width :]
    return in_kernels(spec.gating)(gate, up)


def _store(spec: _Spec, y: Array, tile: _Tile, wg: Array, o: Any, o_ref: Any) -> None:
    """Write one warpgroup's rows, a chunk of columns at a time."""
    rows = pl.ds(pl.multiple_of(tile.row + wg * spec.height, 8), spec.height)
    for c in range(0, spec.width, spec.chunk):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o[...] = y[:, c : c + spec.chunk].astype(spec.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            o, o_ref.at[rows, pl.ds(pl.multiple_of(tile.column + c, 8), spec.chunk)]
        )
