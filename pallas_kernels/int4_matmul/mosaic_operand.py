"""Weights of few bits as an operand of the tensor cores, and those of 4 bits."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_matmul.conversion import EXCESS, conversion
from pallas_kernels.int4_matmul.packed import (
    CHUNK,
    FORMS,
    FP4,
    ROWS,
    TABLES,
    WORDS,
    Int4,
    dequantised,
)
from pallas_kernels.int4_matmul.plan import FEW_TOKENS, Tuning, tuning_with, with_room
from pallas_kernels.mosaic_units.split import Split

OPERAND = 128  # columns that are converted at once


def check(x: Any, w: Int4) -> None:
    """Raise ValueError unless x and scales are of one 16-bit type, the words cover I, and the group
    is 16, 32, 64 or a multiple of 128."""
    if x.ndim != 2 or not x.shape[0] or -(-x.shape[1] // CHUNK) > w.words.shape[1]:
        raise ValueError(
            f"mosaic_gpu int4_matmul takes x [T, I] and words of I columns, got {x.shape} and "
            f"{w.words.shape}"
        )
    if x.dtype not in (jnp.bfloat16, jnp.float16) or w.scales.dtype != x.dtype:
        raise ValueError(
            "mosaic_gpu int4_matmul takes x and scales of one type, bfloat16 or float16, "
            f"got x {x.dtype}, scales {w.scales.dtype}"
        )
    if w.group not in (16, 32, 64) and w.group % OPERAND:
        raise ValueError(
            f"mosaic_gpu int4_matmul takes groups of 16, 32, 64 or a multiple of {OPERAND}, "
            f"got {w.group}"
        )


class Rows(NamedTuple):
    """A warpgroup's rows of the weight: its arrays in global memory, and the first row."""

    refs: tuple[Any, ...]
    first: Array


class Blocks(NamedTuple):
    """Blocks of 64 rows of a slot: the first one and their number, in the weight and in the
    slot."""

    first: Array
    height: int
    slot_block: int


class Place(NamedTuple):
    """Where an operand begins: its slot, its warpgroup, and the column within the slot."""

    slot: Array
    wg: Array
    column: int


class Numbers(Protocol):
    """How numbers lie in memory, and become an operand of the tensor cores."""

    @property
    def name(self) -> str:
        """For profiles."""

    @property
    def copies(self) -> int:
        """Copies that fill a slot with rows of one part of the weight."""

    def tuning(self, shape: tuple[int, int, int], tile: tuple[int, int], kept: int) -> Tuning:
        """Sizes for T, O and I with a given tile, its tokens and warpgroups, where a kernel keeps
        so many bytes of shared memory for itself."""

    def scratch(self, spec: Spec) -> dict[str, Any]:
        """Shared memory of the ring."""

    def copy(
        self, spec: Spec, refs: tuple[Any, ...], rows: Blocks, step: Array, slot: Array, sm: Any
    ) -> None:
        """Copy step `step` of the columns into a slot."""

    def scales(self, spec: Spec, rows: Rows, step: Array) -> list[Array]:
        """What is loaded from global memory while the slot arrives."""

    def operand(self, spec: Spec, place: Place, scales: list[Array], sm: dict[str, Any]) -> Any:
        """A warpgroup's rows of `spec.operand` columns, `[ROWS, operand]`: in registers, or in
        shared memory where nothing is converted."""

    def finished(self, spec: Spec, rows: Rows, y: Array) -> Array:
        """Products `[ROWS, tokens]` of sums."""


class Weight(NamedTuple):
    """A weight as kernels take it: how it lies in memory, its arrays, and its rows. Of experts, the
    arrays have an axis of these first."""

    numbers: Numbers
    arrays: tuple[Array, ...]
    rows: int


class Spec(NamedTuple):
    """Static parameters of a compiled kernel: shapes, types and sizes. Of several `parts`, the rows
    of the weight for the same columns of y lie apart, and O are the rows of one. `made` is the type
    of y; None: that of x, `dtype`."""

    T: int
    O: int
    I: int
    numbers: Numbers
    dtype: Any
    tuning: Tuning
    interpret: Any
    parts: int = 1
    made: Any = None

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
        steps = -(-self.I // self.K)
        warpgroups = self.tuning.warpgroups // self.parts
        if self.made is None:
            made = self.dtype
        else:
            made = self.made
        return Split(
            *(self.T, self.O, made, steps, warpgroups),
            *(self.tuning.tokens, self.tuning.shares, self.tuning.joined),
        )


class Words(NamedTuple):
    """Weights of 4 bits, see `packed.Int4`."""

    group: int
    form: str

    @property
    def name(self) -> str:
        return "int4"

    @property
    def copies(self) -> int:
        return 2 + (self.form in FORMS[1:])

    def groups(self, columns: int) -> int:
        """Groups that so many columns of a slot touch."""
        return max(1, columns // self.group)

    def excess(self, dtype: Any) -> float:
        """What sums are multiplied with."""
        if self.form == FP4:
            return EXCESS[jnp.dtype(dtype).name]
        return 1.0

    def tuning(self, shape: tuple[int, int, int], tile: tuple[int, int], kept: int) -> Tuning:
        return with_room(tuning_with(*shape, self.group, *tile), self.group, kept)

    def scratch(self, spec: Spec) -> dict[str, Any]:
        ring = spec.tuning.stages, spec.tuning.warpgroups
        values = plgpu.SMEM((*ring, self.groups(spec.K), ROWS), spec.dtype)
        words = plgpu.SMEM((*ring, spec.K // CHUNK, *WORDS), jnp.int32)
        if self.form in FORMS[1:]:
            others = {"others": values}
        else:
            others = {}
        return {"w": words, "scales": values, **others}

    def copy(
        self, spec: Spec, refs: tuple[Any, ...], rows: Blocks, step: Array, slot: Array, sm: Any
    ) -> None:
        words, *values = refs
        blocks = pl.ds(rows.first, rows.height)
        slot_blocks = pl.ds(rows.slot_block, rows.height)
        chunks = pl.ds(step * (spec.K // CHUNK), spec.K // CHUNK)
        groups = pl.ds(lax.div(step * spec.K, jnp.int32(self.group)), self.groups(spec.K))
        full = sm["full"].at[slot]
        plgpu.copy_gmem_to_smem(words.at[blocks, chunks], sm["w"].at[slot, slot_blocks], full)
        for name, ref in zip(("scales", "others"), values, strict=False):
            plgpu.copy_gmem_to_smem(ref.at[blocks, groups], sm[name].at[slot, slot_blocks], full)

    def scales(self, spec: Spec, rows: Rows, step: Array) -> list[Array]:
        return []  # they lie in the slot

    def operand(self, spec: Spec, place: Place, scales: list[Array], sm: dict[str, Any]) -> Any:
        return operand(spec, self, place, sm)

    def finished(self, spec: Spec, rows: Rows, y: Array) -> Array:
        excess = self.excess(spec.dtype)
        if excess == 1:
            return y
        return y * jnp.float32(excess)


def operand(spec: Spec, words: Words, place: Place, sm: dict[str, Any]) -> Any:
    """A warpgroup's weights of 4 bits, `[ROWS, operand]` in registers."""
    slot, wg, first = place
    K = spec.operand
    group = min(words.group, spec.operand)
    groups = pl.ds(first // words.group, K // group)
    values = [sm[name].at[slot, wg, groups] for name in ("scales", "others") if name in sm]
    refs = [sm["w"].at[slot, wg, pl.ds(first // CHUNK, K // CHUNK)], *values]
    if spec.interpret is not None:
        held, scales, *others = (ref[...][None] for ref in refs)
        zeros, offsets = (others[0] if words.form == form else None for form in FORMS[1:])
        a = sm["a"].at[wg]
        table = None
        if words.form in TABLES:
            table = words.form
        weight = Int4(held, scales, zeros, offsets, rows=ROWS, group=group, table=table)
        a[...] = dequantised(weight, K, spec.dtype) / jnp.asarray(
            words.excess(spec.dtype), spec.dtype
        )
        plgpu.commit_smem()
        return a

    text = conversion(K, group, jnp.dtype(spec.dtype).name, words.form)
    return made_by(text, spec.dtype, (ROWS, K), [(ref, ()) for ref in refs])


def made_by(
    text: str,
    dtype: Any,
    shape: tuple[int, int],
    refs: list[tuple[Any, tuple[Any, ...]]],
    scales: list[Array] | None = None,
) -> Any:
    """The operand whose registers an assembly makes of the addresses of `refs`, each with its
    layout, and of the registers of `scales`, one of each of `ROWS`."""
    held = scales or []

    @plgpu.inline_mgpu(
        arg_types=(
            tuple(plgpu.RefType(how) for _, how in refs),
            (plgpu.Layout.WGMMA.reduce(1),) * len(held),
        ),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.WGMMA),
    )
    def converted(_: Any, refs: tuple[Any, ...], scales: tuple[Any, ...]) -> Any:
        i32 = mgpu.utils.dtype_to_ir_type(jnp.int32)
        layout = plgpu.Layout.WGMMA.to_mgpu()
        registers_shape = layout.registers_shape(shape)
        operands = [mgpu.utils.memref_ptr(ref) for ref in refs]
        operands += [
            mgpu.utils.bitcast(register, i32)
            for scale in scales
            for register in scale.registers.flat
        ]
        made = mgpu.utils.inline_ptx(
            text,
            *operands,
            result_types=[i32] * int(np.prod(registers_shape)),
            has_side_effects=True,
        )
        pair = layout.registers_element_type(mgpu.utils.dtype_to_ir_type(dtype))
        registers = np.array([mgpu.utils.bitcast(x, pair) for x in made], dtype=object)
        return mgpu.FragmentedArray(
            _registers=registers.reshape(registers_shape), _layout=layout, _is_signed=None
        )

    return converted(tuple(ref for ref, _ in refs), tuple(held))
