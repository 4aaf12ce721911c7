"""Products of tokens in 16 bits with weights of 8, for NVIDIA Hopper: the kernels of
`int4_matmul`, which convert weights in registers, with 8-bit numbers as they are stored.

Scales of rows are those of sums. Where groups of columns have scales, numbers are scaled in float32
and rounded once to x's type, as the reference has it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import Gating, Groups
from pallas_kernels.int4_matmul.mosaic_gpu import parts_of
from pallas_kernels.int4_matmul.mosaic_grouped import grouped_products
from pallas_kernels.int4_matmul.mosaic_operand import Blocks, Place, Rows, Spec, Weight, made_by
from pallas_kernels.int4_matmul.plan import Tuning
from pallas_kernels.lanes import byte_tiled
from pallas_kernels.mosaic_units import ROWS
from pallas_kernels.parts import Product, whole
from pallas_kernels.scaled_matmul import reference
from pallas_kernels.scaled_matmul.conversion import conversion
from pallas_kernels.scaled_matmul.experts import ScaledExperts
from pallas_kernels.scaled_matmul.plan import (
    DENSE_ROWS,
    GROUPS,
    K,
    converted_tuning,
    converted_with,
    takes_group,
)

NUMBERS = {jnp.dtype(jnp.float8_e4m3fn): "fp8", jnp.dtype(jnp.int8): "int8"}


class Bytes(NamedTuple):
    """Weights of 8 bits, `[O, I]`. Their scales are `[O]`, or `[O, G]` of `group` columns; floats
    of 32 or of 16 bits."""

    dtype: Any
    group: int | None

    @property
    def name(self) -> str:
        return f"{NUMBERS[jnp.dtype(self.dtype)]}_w8a16"

    @property
    def copies(self) -> int:
        return 1

    def tuning(self, shape: tuple[int, int, int], tile: tuple[int, int], kept: int) -> Tuning:
        return converted_with(shape, tile, kept)

    def scratch(self, spec: Spec) -> dict[str, Any]:
        shape = spec.tuning.stages, spec.tuning.warpgroups * ROWS, K
        return {"w": plgpu.SMEM(shape, self.dtype, transforms=byte_tiled(K))}

    def copy(
        self, spec: Spec, refs: tuple[Any, ...], rows: Blocks, step: Array, slot: Array, sm: Any
    ) -> None:
        height = rows.height * ROWS
        weight_rows = pl.ds(pl.multiple_of(rows.first * ROWS, ROWS), height)
        columns = pl.ds(pl.multiple_of(step * K, K), K)
        place = sm["w"].at[slot, pl.ds(rows.slot_block * ROWS, height)]
        plgpu.copy_gmem_to_smem(refs[0].at[weight_rows, columns], place, sm["full"].at[slot])

    def scales(self, spec: Spec, rows: Rows, step: Array) -> list[Array]:
        """Of the groups that a slot touches."""
        if self.group is None:
            return []
        row_scales = self._own(rows)
        last = rows.refs[1].shape[1] - 1
        first = lax.div(step * K, jnp.int32(self.group))
        places = (jnp.minimum(first + i, last) for i in range(max(1, K // self.group)))
        return [_load(row_scales.at[:, place]) for place in places]

    def operand(self, spec: Spec, place: Place, scales: list[Array], sm: dict[str, Any]) -> Any:
        slot, wg, first = place
        columns = spec.operand
        group = self.group or K
        held = scales[first // group :][: max(1, columns // group)]
        rows = pl.ds(wg * ROWS, ROWS)
        if spec.interpret is not None:
            plain = sm["w"].at[slot, rows, pl.ds(first, columns)][...].astype(jnp.float32)
            for i, scale in enumerate(held):
                inside = jnp.arange(columns) // min(group, columns) == i
                plain = jnp.where(inside, plain * scale[:, None], plain)
            a = sm["a"].at[wg]
            a[...] = plain.astype(spec.dtype)
            plgpu.commit_smem()
            return a
        integers = jnp.dtype(self.dtype) == jnp.int8
        text = conversion(first, columns, len(held), jnp.dtype(spec.dtype).name, integers)
        refs = [(sm["w"].at[slot, rows], byte_tiled(K))]
        return made_by(text, spec.dtype, (ROWS, columns), refs, held)

    def finished(self, spec: Spec, rows: Rows, y: Array) -> Array:
        if self.group is not None:
            return y
        return y * lax.broadcast_in_dim(_load(self._own(rows)), y.shape, [0])

    def _own(self, rows: Rows) -> Any:
        """Scales of a warpgroup's rows, which may lie beyond the last one."""
        scale = rows.refs[1]
        first = jnp.minimum(rows.first, scale.shape[0] - ROWS)
        return scale.at[pl.ds(pl.multiple_of(first, ROWS), ROWS)]


def _load(ref: Any) -> Array:
    """A vector along the rows of a product, float32."""
    vector = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return vector.astype(jnp.float32)


def check(x: Any, w: Any, scale: Any, group: int) -> None:
    """Raise ValueError unless x is of 16 bits, w of 8, O a multiple of 8 and I of 128, and groups
    are of all columns, of 16, 32, 64 or of a multiple of 128."""
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1] or not x.shape[0]:
        raise ValueError(
            f"mosaic_gpu scaled_matmul takes x [T, I] and w [O, I], got {x.shape} and {w.shape}"
        )
    if x.dtype not in (jnp.bfloat16, jnp.float16) or w.dtype not in NUMBERS:
        raise ValueError(
            "mosaic_gpu scaled_matmul takes x of bfloat16 or float16 and w of float8_e4m3fn or "
            f"int8, got x {x.dtype}, w {w.dtype}"
        )
    if w.shape[0] % 8 or w.shape[1] % K or 0 in w.shape:  # JAX 0.12 copies whole pieces alone
        raise ValueError(
            f"mosaic_gpu scaled_matmul takes plain inputs with O a multiple of 8 and I of {K}, "
            f"got w {w.shape}"
        )
    if scale.shape[1] > 1 and not takes_group(group):
        raise ValueError(
            f"mosaic_gpu scaled_matmul takes plain inputs with groups of {GROUPS} columns or a "
            f"multiple of {K}, got {group}"
        )


def fits(rows: int, columns: int) -> bool:
    """Whether experts' weights of so many rows and columns are taken."""
    return rows % ROWS == 0 and columns % K == 0


def check_experts(x: Any, w: ScaledExperts) -> None:
    """Raise ValueError unless one expert's product is one that `check` allows, and O is a multiple
    of 64."""
    values, scale = (jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in (w.values, w.scale))
    check(x, values, scale, w.group)
    shape = values.shape
    if not fits(*shape):
        raise ValueError(
            f"mosaic_gpu scaled_matmul takes experts with O a multiple of {ROWS}, got {shape}"
        )


def scaled_parts(
    x_TI: Array,
    w_OI: Array,
    scale_OG: Array,
    group: int,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Product:
    """See `pallas_kernels.scaled_matmul`, of inputs that are "plain". Raises what `check` raises.

    Without a `tuning` the product is XLA's, of the whole weight, from `plan.DENSE_ROWS` tokens on.
    """
    check(x_TI, w_OI, scale_OG, group)
    if tuning is None and x_TI.shape[0] >= DENSE_ROWS:
        return reference.scaled_parts(x_TI, w_OI, scale_OG, group, "plain")
    return _product(x_TI, w_OI, scale_OG, group, tuning, interpret, x_TI.dtype)


def scaled_sums(
    x_TI: Array,
    w_OI: Array,
    scale_OG: Array,
    group: int,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """The same in float32, not rounded."""
    check(x_TI, w_OI, scale_OG, group)
    if tuning is None and x_TI.shape[0] >= DENSE_ROWS:
        return reference.scaled_sums(x_TI, w_OI, scale_OG, group, "plain")
    return whole(_product(x_TI, w_OI, scale_OG, group, tuning, interpret, jnp.float32))


def _product(
    x_TI: Array,
    w_OI: Array,
    scale_OG: Array,
    group: int,
    tuning: Tuning | None,
    interpret: Any,
    made: Any,
) -> Product:
    T, I = x_TI.shape
    O = w_OI.shape[0]
    if O % ROWS:
        scale = jnp.pad(scale_OG, ((0, -O % ROWS), (0, 0)))
    else:
        scale = scale_OG
    sizes = tuning or converted_tuning(T, O, I)
    return parts_of(x_TI, _weight(w_OI, scale, group), sizes, interpret, made)


def grouped_matmul(
    x_PI: Array,
    w: ScaledExperts,
    groups: Groups,
    bias_EO: Array | None,
    gating: Gating | None,
    interpret: Any,
) -> Array:
    """See `grouped_scaled_matmul`, of inputs that are "plain". Raises what `check_experts`
    raises."""
    check_experts(x_PI, w)
    weight = _weight(w.values, w.scale, w.group)
    return grouped_products(x_PI, weight, groups, bias_EO, gating, interpret)


def _weight(values: Array, scale: Array, group: int) -> Weight:
    rows = values.shape[-2]
    if scale.shape[-1] == 1:
        return Weight(Bytes(values.dtype.type, None), (values, scale[..., 0]), rows)
    return Weight(Bytes(values.dtype.type, group), (values, scale), rows)
