"""Shared by the kernels for NVIDIA Hopper: launches and stores, supported pages, flags between
thread blocks, and page table look-ups."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.backends import named
from pallas_kernels.quantised import is_quantised

THREADS = 128  # of a warpgroup
# Widths of heads that attention takes over pages of 16 bits and of 8, ascending
HEAD_DIMS = (64, 96, 128, 256)
HEAD_DIMS_8_BITS = (64, 128, 256)
PRODUCER_REGISTERS = 40  # of a thread of a warpgroup that only copies
PROXY_FENCE = "fence.proxy.async;"  # orders plain accesses against those of the copy engine


def tiled(width: int) -> tuple[Any, Any]:
    """How the tensor cores read an operand of 16-bit numbers in shared memory, in rows of `width`:
    pieces of 128 bytes, or of the largest power of two that divides a row. Both operands of a
    product have pieces of one size if both lie in shared memory."""
    piece = math.gcd(width, 64)
    return plgpu.TilingTransform((8, piece)), plgpu.SwizzleTransform(2 * piece)


TILED = tiled(64)


def launch(
    kernel: Callable[..., None],
    operands: tuple[Any, ...],
    interpret: Any,
    compiler: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Run a kernel on its `operands`; `interpret` is a `plgpu.InterpretGPUParams`, or None on a
    card. `options` are those of `plgpu.kernel`, and `compiler` further compiler parameters."""
    params = plgpu.CompilerParams(approx_math=True, **(compiler or {}))
    if interpret is not None:
        options["interpret"] = interpret
    return plgpu.kernel(kernel, compiler_params=params, **options)(*operands)


def store(ref: Any, x: Array) -> None:
    """Store x in the ref's type, in whatever layout x has."""
    x = x.astype(ref.dtype)
    if hasattr(plgpu, "store"):  # JAX 0.12: a plain assignment asks for whole cache lines
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def narrowed(x: Array, dtype: Any, layout: Any, interpret: Any) -> Array:
    """float32 x, in a `layout` of neighbouring numbers, in a type of 16 bits, two numbers an
    instruction. LLVM converts numbers that are widened again one by one, by a unit that takes eight
    times as long."""
    if interpret is not None:
        return x.astype(dtype)

    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, dtype, layout=layout)
    )
    def converted(_: Any, x: Any) -> Any:
        element_type = mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype))
        if mgpu.utils.bitwidth(x.registers.flat[0].type) % 64:
            return x.astype(element_type)
        registers = np.array(
            [_narrowed(register, element_type) for register in x.registers.flat], dtype=object
        )
        return mgpu.FragmentedArray(
            _registers=registers.reshape(x.registers.shape), _layout=x.layout, _is_signed=None
        )

    return converted(x)


def _narrowed(register: Any, element_type: Any) -> Any:
    """A register, a vector of an even count of float32, as a vector of `element_type`."""
    ut = mgpu.utils
    pair = ut.ir.VectorType.get((2,), element_type)
    i32, i64 = (ut.ir.IntegerType.get_signless(bits) for bits in (32, 64))
    text = f"{{ .reg .b32 a, b; mov.b64 {{a, b}}, $1; cvt.rn.{element_type}x2.f32 $0, b, a; }}"
    made = []
    for start in range(0, ut.bitwidth(register.type) // 32, 2):
        two = ut.bitcast(ut.vector_slice(register, slice(start, start + 2)), i64)
        made.append(ut.bitcast(ut.inline_ptx(text, two, result_types=i32), pair))
    return ut.vector_concat(made)


def rows_apart(width: int) -> int:
    """Rows of `width` 16-bit numbers between two places of shared memory where a tensor copy may
    begin: multiples of 128 bytes. Any other is a "misaligned address" on a card."""
    return 128 // math.gcd(128, 2 * width)


def plain(ref: Any, interpret: Any) -> Any:
    """The ref, rows of 16-bit numbers in shared memory. Where a tensor copy cannot begin at each of
    them they lie as they follow, in neither tiles nor swizzle: a copy of rows that lie together on
    both sides, or of one, is then no tensor copy, and begins at multiples of 16 bytes."""
    if interpret is None and rows_apart(ref.shape[-1]) > 1:
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(lambda _, ref: None)(ref)
    return ref


def store_rows(ref: Any, x: Array, interpret: Any) -> None:
    """Store x in rows from which copies begin at any; see `plain`."""
    if rows_apart(ref.shape[-1]) > 1:
        store(plain(ref, interpret), x)
    else:
        ref[...] = x.astype(ref.dtype)


def registers_of(consumers: int, producers: int = 1) -> int:
    """Registers of a thread of the warpgroups that multiply, beside so many that copy.

    A block begins with as many for each thread as its processor has, in eights, and shares out
    these alone: a warpgroup that asks for more waits for ever.
    """
    warpgroups = consumers + producers
    held = 2**16 // (THREADS * warpgroups) // 8 * 8 * warpgroups
    return min(232, (held - producers * PRODUCER_REGISTERS) // consumers // 8 * 8)


def padded(x: Array, columns: int = 1) -> Array:
    """`[rows, columns of x]` as copies take it: they read zeros beyond its end, but eight full rows
    and so many columns at a time."""
    rows = -x.shape[0] % 8 if x.shape[0] > 8 else 0
    beyond = -x.shape[1] % columns
    if rows or beyond:
        return jnp.pad(x, ((0, rows), (0, beyond)))
    return x


def row_layout(width: int, dtype: Any = jnp.bfloat16) -> Any:
    """How a warpgroup holds a row: neighbouring threads read neighbouring words, of 16 bytes if the
    width, a multiple of `THREADS`, allows. Types of one size have one layout."""
    # Not WG_STRIDED, whose accesses guarantee the alignment of one element only.
    word = math.gcd(width // THREADS, 16 // jnp.dtype(dtype).itemsize)
    tiling = plgpu.Tiling(((THREADS * word,), (32 * word,), (word,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def take(free: Any, i: Array, slots: int) -> Array:
    """The slot of a ring's entry `i`, once it is free."""
    slot = lax.rem(i, jnp.int32(slots))
    pl.when(i >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
    return slot


def drain(free: Any, n: Array, slots: int) -> None:
    """Waits until the last of `n` entries of a ring are free. Every arrival is waited for, so that
    the barriers end in the phase they began in."""

    @pl.loop(jnp.maximum(0, n - slots), n)
    def _(i):  # type: ignore[no-untyped-def]
        plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(slots))])


def banded(index: Array, places: int, bands: int, most: int) -> tuple[Array, Array]:
    """Place and band of a unit, where each band has so many `places`. At `most` so many bands pass
    over the places together, place by place, so that what both read stays in the L2 cache."""
    together = -(-bands // -(-bands // most))
    group = lax.div(index, jnp.int32(together * places))
    rest = lax.rem(index, jnp.int32(together * places))
    here = jnp.minimum(jnp.int32(together), bands - group * together)
    return lax.div(rest, here), group * together + lax.rem(rest, here)


def head_dims(pages: DTypeLike) -> tuple[int, ...]:
    """Widths of heads that attention takes over pages of this type, ascending."""
    if is_quantised(pages):
        return HEAD_DIMS_8_BITS
    return HEAD_DIMS


def check_pages(
    op: str, q: Array, k_pages: Array, v_pages: Array, unequal: tuple[tuple[int, int], ...] = ()
) -> None:
    """Raise ValueError, naming `op`, if its kernel does not support pages `[P, K, C, H]` with
    queries `[tokens, N, H]`. `unequal` are widths of keys and of values that it takes besides; they
    have 16 bits."""
    H = q.shape[2]
    C, HK = k_pages.shape[2:]
    eight = is_quantised(k_pages.dtype)
    if (
        q.dtype not in (jnp.bfloat16, jnp.float16)
        or v_pages.dtype != k_pages.dtype
        or not (eight or k_pages.dtype == q.dtype)
    ):
        raise ValueError(
            f"mosaic_gpu {op} takes bfloat16 or float16 throughout, or pages of 8-bit floats, "
            f"got q {q.dtype}, k {k_pages.dtype}, v {v_pages.dtype}"
        )
    if eight and C not in (64, 128):
        raise ValueError(f"mosaic_gpu {op} takes 8-bit pages of 64 or 128 tokens, got {C}")
    widths = head_dims(k_pages.dtype)
    equal = H in widths and v_pages.shape == k_pages.shape
    is_listed = (HK, v_pages.shape[3]) in unequal and v_pages.shape[:3] == k_pages.shape[:3]
    if HK != H or not (equal or (is_listed and not eight)):
        raise ValueError(
            f"mosaic_gpu {op} takes head_dim {named(widths)} and equal K and V pools, "
            f"got q {q.shape}, k {k_pages.shape}, v {v_pages.shape}"
        )
    if C not in (16, 32, 64, 128):
        raise ValueError(f"mosaic_gpu {op} takes pages of 16, 32, 64 or 128 tokens, got {C}")


def flags_buffer(splits_SF: Any) -> Any:
    """The buffer of a plan's flags that a call may write: that of an open plan, else a copy."""
    if isinstance(splits_SF, jax.Ref):
        return splits_SF
    return jax.new_ref(splits_SF)


def raise_flag(flag: Any) -> None:
    """Add one to a flag, an int32 of `flags_buffer`.

    Earlier writes of this warpgroup are then visible to the block that awaits the flag; its copies
    to device memory must have been waited for.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def add(_: Any, ref: Any) -> None:
        mgpu.utils.inline_ptx(PROXY_FENCE, has_side_effects=True)
        mgpu.warpgroup_barrier()
        mgpu.SemaphoreRef(mgpu.utils.memref_ptr(ref)).signal(1, memory_scope="gpu")

    add(flag)


def await_flag(flag: Any, count: Array, lower: bool = True) -> None:
    """Wait until the flag is `count` (at least 1), and set it to zero; without `lower`, until it is
    at least that, and leave it, so that others may wait for it too."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def wait(_: Any, ref: Any, value: Any) -> None:
        mgpu.SemaphoreRef(mgpu.utils.memref_ptr(ref)).wait(
            value.registers.item(), decrement=lower, memory_scope="gpu"
        )
        mgpu.utils.inline_ptx(PROXY_FENCE, has_side_effects=True)

    wait(flag, count)


def first_page_of(first_page: Array | None) -> Array:
    """The option `first_page` as int32 `[1]`; None is page 0."""
    if first_page is None:
        return jnp.zeros((1,), jnp.int32)
    return first_page.astype(jnp.int32)


@dataclass(frozen=True)
class PageTable:
    """A page table inside a kernel; `first` is added to each of its page numbers."""

    ref: Any
    first: Array

    def __getitem__(self, place: tuple[Any, Any]) -> Array:
        return self.ref[place] + self.first
