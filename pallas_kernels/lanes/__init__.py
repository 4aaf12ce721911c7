"""What the 128 lanes of a warpgroup do, written once: a lane program is a function of a machine,
whose methods are instructions.

`Ptx` writes the program down as assembly for NVIDIA GPUs of compute capability 8.9 and later;
`Emulated` runs it in JAX, lane by lane, for the interpreter, which knows no assembly. A value is a
32-bit register: its name, or an array `[128]` of every lane's. Lane 32·warp + 4·g + c is the one
that fragments of matrices call (g, c).

Tiles of bytes in shared memory are `[rows, width]` in pieces of 8 rows x up to 128 bytes, swizzled,
as the copy engine leaves them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.lanes.emulated import Emulated, Words
from pallas_kernels.lanes.ptx import LANES, Ptx

type Machine = Ptx | Emulated

# One register of each lane in a column: lanes know what it means.
REGISTERS = plgpu.Layout.TILED(
    plgpu.Tiling(((LANES, 1), (32, 1))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
)


def byte_tiled(width: int) -> tuple[Any, ...]:
    """How the copy engine lays out a tile of bytes, for programs that read it."""
    piece = min(width, 128)
    return plgpu.TilingTransform((8, piece)), plgpu.SwizzleTransform(piece)


def plain(ref: Any, width: int) -> Any:
    """What a machine takes for an array in shared memory: its address in assembly, where a ref is
    that already, or else the array, in bytes if its numbers have 8 bits; and its width."""
    if isinstance(ref, str) or ref is None or ref.dtype.itemsize > 1:
        return ref, width
    return lax.bitcast_convert_type(ref, jnp.uint8), width


def run(
    program: Callable[[Machine, list[Any], list[Any], list[Any]], list[Any]],
    interpret: Any,
    results: int,
    refs: Sequence[tuple[Any, tuple[Any, ...]]] = (),
    scalars: Sequence[Array] = (),
    arrays: Sequence[Array] = (),
    words: Sequence[Any] = (),
) -> Any:
    """Runs `program(machine, refs, scalars, registers of arrays)` and returns its registers `[128,
    results]`; `refs` are (ref, layout), and `words` refs of plain arrays of 32-bit words, which
    follow them and may be written. Other warpgroups do not write them meanwhile."""
    if interpret is not None:
        return _emulated(program, results, refs, scalars, arrays, words)
    splat = plgpu.Layout.WG_SPLAT(())
    refs = [*refs, *((ref, ()) for ref in words)]
    types = (
        tuple(plgpu.RefType(how) for _, how in refs),
        (splat,) * len(scalars),
        (REGISTERS,) * len(arrays),
    )
    returned = None
    if results:
        returned = plgpu.ShapeDtypeStruct((LANES, results), jnp.int32, layout=REGISTERS)

    @plgpu.inline_mgpu(arg_types=types, return_type=returned)
    def written(
        _: Any, refs: tuple[Any, ...], scalars: tuple[Any, ...], arrays: tuple[Any, ...]
    ) -> Any:
        i32 = mgpu.utils.dtype_to_ir_type(jnp.int32)
        operands = [mgpu.utils.memref_ptr(ref) for ref in refs] + [
            scalar.registers.item() for scalar in scalars
        ]
        operands += [
            mgpu.utils.bitcast(register, i32)
            for array in arrays
            for register in array.registers.flat
        ]
        far = [
            i for i, pointer in enumerate(operands[: len(refs)]) if "<3>" not in str(pointer.type)
        ]
        m = Ptx(len(operands), results, far)
        r = len(refs)
        s = len(refs) + len(scalars)
        text = m.text(program(m, m.inputs[:r], m.inputs[r:s], m.inputs[s:]))
        made = mgpu.utils.inline_ptx(
            text,
            *operands,
            result_types=[i32] * results or None,
            has_side_effects=True,
            convergent=True,
        )
        if not results:
            return None
        layout = REGISTERS.to_mgpu()
        register_type = layout.registers_element_type(i32)
        registers = np.array([mgpu.utils.bitcast(x, register_type) for x in made], dtype=object)
        shape = layout.registers_shape((LANES, results))
        return mgpu.FragmentedArray(
            _registers=registers.reshape(shape), _layout=layout, _is_signed=True
        )

    return written(tuple(ref for ref, _ in refs), tuple(scalars), tuple(arrays))


def sync(interpret: Any) -> None:
    """A barrier of the warpgroup: what its lanes wrote before, all of them see after."""
    if interpret is None:
        plgpu.inline_mgpu()(lambda _: mgpu.warpgroup_barrier())()


def _emulated(
    program: Any, results: int, refs: Any, scalars: Any, arrays: Any, words: Any
) -> Array | None:
    m = Emulated()
    held = [Words(ref[...]) for ref in words]
    registers = [
        lax.bitcast_convert_type(array[:, i], jnp.float32)
        for array in arrays
        for i in range(array.shape[1])
    ]
    made = program(m, [*(ref[...] for ref, _ in refs), *held], list(scalars), registers)
    for ref, held_words in zip(words, held, strict=True):
        if held_words.written:
            ref[...] = held_words.array
    if results:
        return jnp.stack([lax.bitcast_convert_type(x, jnp.int32) for x in made], axis=1)
    if m.stored:
        rows, _ = refs[0]
        rows[...] = m.written(rows.shape).astype(rows.dtype)
    if m.numbers:
        numbers, _ = refs[1]
        numbers[...] = m.put_down(numbers.shape)
    return None
