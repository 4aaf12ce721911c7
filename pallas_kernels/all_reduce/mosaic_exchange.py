"""The protocol's steps as operations of a Pallas kernel for NVIDIA Hopper.

A row lies in the registers of a warpgroup: thread i has every 128th group of up to 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.all_reduce.protocol import Region, opening, putting, taking

REF = plgpu.RefType()
SCALAR = plgpu.Layout.WG_SPLAT(())
ut = mgpu.utils


class Row(NamedTuple):
    """A row of an exchange.

    Attributes:
        inbox, table: refs of this device's arrays.
        number: of the row in its region.
        place: 0 or 1.
    """

    inbox: Any
    table: Any
    number: Array
    place: Array


def open_place(inbox: Any, number: Array, counters: int, record: int) -> Array:
    """The place of a row's next exchange. Counts it."""

    @plgpu.inline_mgpu(
        arg_types=(REF, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR),
    )
    def run(_: Any, inbox: Any, number: Any) -> Any:
        text = opening(counters, record)
        place = _asm(text, [_i32()], ut.memref_ptr(inbox), number.registers.item())
        return mgpu.FragmentedArray(
            _registers=np.array(place, dtype=object),
            _layout=number.layout,
            _is_signed=number.is_signed,
        )

    return run(inbox, number)


def put(x: Array, layout: Any, row: Row, region: Region, to: Array | int) -> None:
    """Store x into the inbox of a device: 0 this one, 1 that of the next rank, and so on."""

    @plgpu.inline_mgpu(arg_types=(layout, REF, *[SCALAR] * 3))
    def run(_: Any, x: Any, table: Any, *scalars: Any) -> None:
        words = [_words(register) for register in x.registers.flat]
        flat = [word for register_words in words for word in register_words]
        text = putting(len(flat), len(words[0]), region)
        operands = [scalar.registers.item() for scalar in scalars]
        _asm(text, [], ut.memref_ptr(table), *operands, *flat)

    run(x, row.table, jnp.int32(to), row.number, row.place)


def take(
    shape: tuple[int, ...], dtype: Any, layout: Any, row: Row, region: Region, slots: Sequence[int]
) -> list[Array]:
    """What came into these slots of the own inbox, as soon as all of it is there."""
    array_type = plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(REF, REF, SCALAR, SCALAR), return_type=(array_type,) * len(slots))
    def run(_: Any, inbox: Any, table: Any, number: Any, place: Any) -> Any:
        count, vector, make = _arrays(shape, dtype, layout)
        text = taking(count, vector, region, slots)
        pointers = ut.memref_ptr(inbox), ut.memref_ptr(table)
        scalars = number.registers.item(), place.registers.item()
        made = _asm(text, [_i32()] * (count * len(slots)), *pointers, *scalars)
        if not isinstance(made, Sequence):
            made = [made]
        return tuple(make(made[i * count : (i + 1) * count]) for i in range(len(slots)))

    return list(run(row.inbox, row.table, row.number, row.place))


def _asm(text: str, results: list[Any], *operands: Any) -> Any:
    return ut.inline_ptx(
        text,
        *operands,
        result_types=results[0] if len(results) == 1 else (results or None),
        has_side_effects=True,
        convergent=True,
    )


def _arrays(
    shape: tuple[int, ...], dtype: Any, layout: Any
) -> tuple[int, int, Callable[[Sequence[Any]], Any]]:
    """Words that a thread has of such an array, words of a register, and how to make the array."""
    lowered = layout.to_mgpu()
    registers = lowered.registers_shape(shape)
    register_type = lowered.registers_element_type(ut.dtype_to_ir_type(jnp.dtype(dtype)))
    size = ut.bitwidth(register_type) // 32

    def make(words: Sequence[Any]) -> Any:
        made = [_register(words[i : i + size], register_type) for i in range(0, len(words), size)]
        return mgpu.FragmentedArray(
            _registers=np.array(made, dtype=object).reshape(registers),
            _layout=lowered,
            _is_signed=True if jnp.issubdtype(dtype, jnp.integer) else None,
        )

    return math.prod(registers) * size, size, make


def _words(register: Any) -> list[Any]:
    """The 32-bit words of a register."""
    count = ut.bitwidth(register.type) // 32
    if count == 1:
        return [ut.bitcast(register, _i32())]
    words = ut.bitcast(register, ut.ir.VectorType.get((count,), _i32()))
    return [ut.bitcast(ut.vector_slice(words, slice(i, i + 1)), _i32()) for i in range(count)]


def _register(words: Sequence[Any], register_type: Any) -> Any:
    if len(words) == 1:
        return ut.bitcast(words[0], register_type)
    word_vector = ut.ir.VectorType.get((1,), _i32())
    return ut.bitcast(
        ut.vector_concat([ut.bitcast(word, word_vector) for word in words]), register_type
    )


def _i32() -> Any:
    return ut.ir.IntegerType.get_signless(32)
