"""Products of tokens with the 4-bit weights of the experts that they chose, for NVIDIA Hopper: the
kernel of one weight, whose units are tiles of tokens times rows of the tile's expert."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.grouped_matmul.mosaic_gpu import Gating, tile_rows
from pallas_kernels.int4_matmul import mosaic_gpu as one
from pallas_kernels.int4_matmul.packed import CHUNK, ROWS, Int4
from pallas_kernels.int4_matmul.plan import tuning_with
from pallas_kernels.mosaic_gpu import PRODUCER_REGISTERS, drain, launch, registers_of
from pallas_kernels.mosaic_units import PROCESSORS, Unit


def grouped_int4_matmul(
    x_PI: Array,
    w: Int4,
    groups: Groups,
    bias_EO: Array | None = None,
    gating: Gating | None = None,
    *,
    interpret: Any = None,
) -> Array:
    """Each row of `groups`' tiles times the weight of its expert, see
    `pallas_kernels.grouped_matmul`. All arrays of w have an axis of experts first. Raises what
    `mosaic_gpu.check` raises of one expert's weight.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    one.check(x_PI, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), w))
    x = tile_rows(x_PI, groups, interpret)
    if (x.shape[0] > 8 and x.shape[0] % 8) or x.shape[1] % CHUNK:
        x = jnp.pad(x, ((0, -x.shape[0] % 8 if x.shape[0] > 8 else 0), (0, -x.shape[1] % CHUNK)))
    blocks, tile = w.words.shape[1], groups.tile
    sizes = tuning_with(
        groups.rows, blocks * ROWS, x.shape[1], w.group, tile, 4 if tile <= 64 else 2
    )
    spec = one.Spec(
        groups.rows,
        blocks * ROWS,
        x.shape[1],
        w.group,
        x.dtype,
        w.form,
        sizes._replace(shares=1),
        interpret,
    )
    shared = x.shape[0] < groups.rows
    (found,) = _multiply(spec, blocks, shared, (groups.expert_W, groups.used), x, w)
    return _finished(found[:, : w.rows], groups, bias_EO, gating)


def _finished(y_PO: Array, groups: Groups, bias_EO: Array | None, gating: Gating | None) -> Array:
    """Products with the bias of their experts, and gated."""
    y_WRO = y_PO.astype(jnp.float32).reshape(len(groups.expert_W), groups.tile, -1)
    if bias_EO is not None:
        y_WRO += bias_EO[groups.expert_W][:, None].astype(jnp.float32)
    y = y_WRO if gating is None else gating(*jnp.split(y_WRO, 2, axis=-1))
    return y.astype(y_PO.dtype).reshape(len(y_PO), -1)


def _multiply(
    spec: one.Spec, apart: int, shared: bool, plan: tuple[Array, Array], x: Array, w: Int4
) -> list[Array]:
    """`apart` are the blocks of 64 rows of an expert; `shared`: every tile has the first rows of
    x; `plan` has the tiles' experts, and the number of those in use."""
    split, warpgroups = spec.split, spec.tuning.warpgroups
    held = [part for part in (w.words, w.scales, w.zeros, w.offsets) if part is not None]
    arrays = [x, *(part.reshape(-1, *part.shape[2:]) for part in held)]
    blocks = min(PROCESSORS, split.bands * split.down)

    def kernel(expert_ref, used_ref, *refs, **sm):  # type: ignore[no-untyped-def]
        given, made = refs[: len(arrays)], refs[len(arrays) :]
        block, wg = lax.axis_index("block"), lax.axis_index("wg")

        def each(run):  # type: ignore[no-untyped-def]
            """Call `run(unit, expert's first block, steps done before)` for each own unit."""
            units = used_ref[used_ref.shape[0] - 1] * split.down

            def body(i, done):  # type: ignore[no-untyped-def]
                index = block + i * blocks
                tile = lax.div(index, jnp.int32(split.down))
                token = pl.multiple_of(tile * spec.tuning.tokens, 8)
                place, zero = lax.rem(index, jnp.int32(split.down)), jnp.int32(0)
                unit = Unit(place, token, zero, zero, jnp.int32(split.steps))
                run(unit, expert_ref[tile] * apart, done)
                return done + split.steps

            count = lax.div(units - block + (blocks - 1), jnp.int32(blocks))
            return lax.fori_loop(0, jnp.maximum(count, 0), body, jnp.int32(0))

        def fill(unit, first, done):  # type: ignore[no-untyped-def]
            # Not a constant: the compiler would reject a slice that ends beyond the array
            row = pl.multiple_of(unit.token * 0, 8) if shared else unit.token
            one.fill(spec, given, (first + unit.block * warpgroups, row), unit, done, sm)

        @pl.when(wg == warpgroups)
        def _producer() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            drain(sm["free"], each(fill), spec.tuning.stages)

        @pl.when(wg < warpgroups)
        def _consumer() -> None:
            plgpu.set_max_registers(registers_of(warpgroups), action="increase")
            each(
                lambda unit, first, done: split.store(
                    one.product(spec, unit, done, wg, sm), unit, wg, sm, made, spec.interpret
                )
            )
            plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = f"grouped_int4_{spec.tuning.tokens}x{spec.O}x{spec.I}"  # for profiles
    return launch(
        kernel,
        (*plan, *arrays),
        spec.interpret,
        out_type=split.results,
        scratch_types=one.scratch(spec, len(arrays)),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="wg",
    )
