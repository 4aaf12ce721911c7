"""Products with 16-bit weights for NVIDIA Hopper: the units of `int4_matmul`, with weights that the
tensor cores read from shared memory as they are stored."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_matmul.mosaic_gpu import parts_of
from pallas_kernels.int4_matmul.mosaic_operand import Blocks, Place, Rows, Spec, Weight
from pallas_kernels.int4_matmul.plan import Tuning
from pallas_kernels.matmul.plan import K, is_faster, tuning_of, tuning_with
from pallas_kernels.mosaic_gpu import TILED
from pallas_kernels.mosaic_units import ROWS
from pallas_kernels.parts import Product, whole
from pallas_kernels.target import Target


class Plain(NamedTuple):
    """Weights `[O, I]` of x's type."""

    @property
    def name(self) -> str:
        return "plain"

    @property
    def copies(self) -> int:
        return 1

    def tuning(self, shape: tuple[int, int, int], tile: tuple[int, int], kept: int) -> Tuning:
        assert not kept, "a whole weight is multiplied, by a kernel that keeps nothing"
        return tuning_with(shape, *tile)

    def scratch(self, spec: Spec) -> dict[str, Any]:
        shape = spec.tuning.stages, spec.tuning.warpgroups * ROWS, spec.K
        return {"w": plgpu.SMEM(shape, spec.dtype, transforms=TILED)}

    def copy(
        self, spec: Spec, refs: tuple[Any, ...], rows: Blocks, step: Array, slot: Array, sm: Any
    ) -> None:
        height = rows.height * ROWS
        weight_rows = pl.ds(pl.multiple_of(rows.first * ROWS, ROWS), height)
        columns = pl.ds(pl.multiple_of(step * spec.K, spec.K), spec.K)
        place = sm["w"].at[slot, pl.ds(rows.slot_block * ROWS, height)]
        plgpu.copy_gmem_to_smem(refs[0].at[weight_rows, columns], place, sm["full"].at[slot])

    def scales(self, spec: Spec, rows: Rows, step: Array) -> list[Array]:
        return []

    def operand(self, spec: Spec, place: Place, scales: list[Array], sm: dict[str, Any]) -> Any:
        """A warpgroup's rows where they lie."""
        slot, wg, first = place
        return sm["w"].at[slot, pl.ds(wg * ROWS, ROWS), pl.ds(first, spec.operand)]

    def finished(self, spec: Spec, rows: Rows, y: Array) -> Array:
        return y


def prefers(target: Target, x: Any, w: Any) -> bool:
    """Where the kernel was measured to be faster than XLA's product."""
    return is_faster(x.shape[0], w.size * w.dtype.itemsize)


def check(x: Any, w: Any) -> None:
    """Raise ValueError unless x and w are of one 16-bit type, O is a multiple of 8 and I of 64."""
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1] or not x.shape[0]:
        raise ValueError(
            f"mosaic_gpu matmul takes x [T, I] and w [O, I], got {x.shape} and {w.shape}"
        )
    if x.dtype not in (jnp.bfloat16, jnp.float16) or w.dtype != x.dtype:
        raise ValueError(
            f"mosaic_gpu matmul takes bfloat16 or float16 throughout, got x {x.dtype}, w {w.dtype}"
        )
    if w.shape[0] % 8 or w.shape[1] % K or 0 in w.shape:
        raise ValueError(f"mosaic_gpu matmul takes O a multiple of 8 and I of {K}, got w {w.shape}")


def matmul(
    x_TI: Array, w_OI: Array, *, tuning: Tuning | None = None, interpret: Any = None
) -> Array:
    """See `pallas_kernels.matmul`, and `matmul_parts`."""
    return whole(matmul_parts(x_TI, w_OI, tuning=tuning, interpret=interpret))


def matmul_parts(
    x_TI: Array, w_OI: Array, *, tuning: Tuning | None = None, interpret: Any = None
) -> Product:
    """See `pallas_kernels.matmul`. Raises what `check` raises. `interpret` is a
    `plgpu.InterpretGPUParams` for machines without a GPU."""
    check(x_TI, w_OI)
    T, I = x_TI.shape
    O = w_OI.shape[0]
    sizes = tuning or tuning_of(T, O, I)
    return parts_of(x_TI, Weight(Plain(), (w_OI,), O), sizes, interpret)
