"""Weights of 4 bits as an operand of the tensor cores."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_matmul.conversion import EXCESS, conversion
from pallas_kernels.int4_matmul.packed import CHUNK, FORMS, FP4, ROWS, TABLES, Int4, dequantised
from pallas_kernels.int4_matmul.plan import FEW_TOKENS, Tuning
from pallas_kernels.mosaic_units import Split

OPERAND = 128  # columns that are converted at once


class Spec(NamedTuple):
    """Static parameters of a compiled kernel: shapes, type and sizes. Of several `parts`, the rows
    of the weight for the same columns of y lie apart, and O are the rows of one."""

    T: int
    O: int  # noqa: E741
    I: int  # noqa: E741
    group: int
    dtype: Any
    form: str
    tuning: Tuning
    interpret: Any
    parts: int = 1

    @property
    def K(self) -> int:
        """Columns of a slot."""
        return self.tuning.columns

    @property
    def operand(self) -> int:
        """Columns that are converted at once."""
        many = self.tuning.tokens > FEW_TOKENS
        return max(CHUNK, min(self.K // (1 + many), OPERAND))

    @property
    def together(self) -> int:
        """Slots of a turn of the loop."""
        return 1 + (self.tuning.tokens > FEW_TOKENS and self.operand == self.K)

    @property
    def running(self) -> int:
        """Products that may run while the next operand is made. That takes registers of its own,
        which it has where the parts of a slot, or slots, take turns."""
        return int(self.operand < self.K or self.together > 1)

    @property
    def split(self) -> Split:
        steps, warpgroups = -(-self.I // self.K), self.tuning.warpgroups // self.parts
        return Split(
            self.T, self.O, self.dtype, steps, warpgroups, self.tuning.tokens, self.tuning.shares
        )

    @property
    def excess(self) -> float:
        """What sums are multiplied with."""
        return EXCESS[jnp.dtype(self.dtype).name] if self.form == FP4 else 1.0

    @property
    def groups(self) -> int:
        """Groups that a slot's columns touch."""
        return max(1, self.K // self.group)


def operand(spec: Spec, slot: Array, wg: Array, first: int, sm: dict[str, Any]) -> Any:
    """A warpgroup's weights of a slot from column `first` on, `[ROWS, operand]` in registers."""
    K, group = spec.operand, min(spec.group, spec.operand)
    groups = pl.ds(first // spec.group, K // group)
    values = [sm[name].at[slot, wg, groups] for name in ("scales", "others") if name in sm]
    refs = [sm["w"].at[slot, wg, pl.ds(first // CHUNK, K // CHUNK)], *values]
    if spec.interpret is not None:
        words, scales, *others = (ref[...][None] for ref in refs)
        zeros, offsets = (others[0] if spec.form == form else None for form in FORMS[1:])
        a = sm["a"].at[wg]
        table = spec.form if spec.form in TABLES else None
        own = Int4(words, scales, zeros, offsets, rows=ROWS, group=group, table=table)
        a[...] = dequantised(own, K, spec.dtype) / jnp.asarray(spec.excess, spec.dtype)
        plgpu.commit_smem()
        return a

    @plgpu.inline_mgpu(
        arg_types=tuple(plgpu.RefType(()) for _ in refs),
        return_type=plgpu.ShapeDtypeStruct((ROWS, K), spec.dtype, layout=plgpu.Layout.WGMMA),
    )
    def converted(_: Any, *refs: Any) -> Any:
        i32 = mgpu.utils.dtype_to_ir_type(jnp.int32)
        layout = plgpu.Layout.WGMMA.to_mgpu()
        shape = layout.registers_shape((ROWS, K))
        made = mgpu.utils.inline_ptx(
            conversion(K, group, jnp.dtype(spec.dtype).name, spec.form),
            *(mgpu.utils.memref_ptr(ref) for ref in refs),
            result_types=[i32] * int(np.prod(shape)),
            has_side_effects=True,
        )
        pair = layout.registers_element_type(mgpu.utils.dtype_to_ir_type(spec.dtype))
        registers = np.array([mgpu.utils.bitcast(x, pair) for x in made], dtype=object)
        return mgpu.FragmentedArray(
            _registers=registers.reshape(shape), _layout=layout, _is_signed=None
        )

    return converted(*refs)
