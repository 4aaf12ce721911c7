"""What the Hopper kernels of paged decode and extend have in common: the parameters of a compiled
kernel, rings of shared memory, and steps of online softmax on the tensor cores.

A ring's entry i lies in slot i % slots. The producer waits until a slot is free, copies a tile into
it, and the copies' arrival marks it full.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import flags_buffer

ROWS = 64  # rows of one WGMMA operand
LOG2E = math.log2(math.e)
NEVER = -1e30  # running maximum before any key: finite, so that exp2(-inf - it) is 0 and not NaN
TILED = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)

# Weighted values [ROWS, H], running maximum [ROWS] in the log2 domain, sum of weights [ROWS]
type Carry = tuple[Array, Array, Array]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What one compiled kernel is specialised to.

    Attributes:
        K, G, H, C: KV heads, query heads of each, head dimension, tokens of a page.
        dtype: of queries and output; kv_dtype: of 8-bit pages, else None.
        scale, window, softcap: as in `AttentionOptions`.
        interpret: Pallas' `interpret`, for machines without a GPU.
    """

    K: int
    G: int
    H: int
    C: int
    dtype: Any
    scale: float
    window: int | None
    softcap: float | None
    interpret: Any
    kv_dtype: str | None = None

    @property
    def width(self) -> int:
        """Columns of one plain buffer: layout inference of JAX 0.12 does not end on 256."""
        return min(self.H, 128)

    @property
    def columns(self) -> list[Any]:
        """The plain buffers' columns of a row."""
        return [pl.ds(c * self.width, self.width) for c in range(self.H // self.width)]

    def launch(self, kernel: Callable[..., None], given: tuple[Array, ...], **options: Any) -> Any:
        """Run a kernel on the inputs `given`; `options` are those of `plgpu.kernel`, and
        `compiler`, further compiler parameters."""
        interpret = {} if self.interpret is None else {"interpret": self.interpret}
        params = plgpu.CompilerParams(approx_math=True, **options.pop("compiler", {}))
        run = plgpu.kernel(kernel, thread_name="wg", compiler_params=params, **options, **interpret)
        return run(*given)


def merged(spec: AttentionSpec, launch: Callable[..., tuple[Array, ...]], splits_SF: Any) -> Array:
    """The output of `launch(phase, flags, *parts)`, whose other results are the parts of followers.

    The interpreter has no flags, and would report an owner's reads of its followers' parts as
    races. There the kernel runs twice: first without merging, then with the parts of the first run
    as inputs.
    """
    if spec.interpret is None:
        return launch("both", flags_buffer(splits_SF))[0]
    _, *parts = launch("parts", splits_SF[...])
    return launch("merge", splits_SF[...], *parts)[0]


def take(free: Any, i: Array, slots: int) -> Array:
    """The slot of a ring's entry `i`, once it is free."""
    at = lax.rem(i, jnp.int32(slots))
    pl.when(i >= slots)(lambda: plgpu.barrier_wait(free.at[at]))
    return at


def drain(free: Any, n: Array, slots: int) -> None:
    """Waits until the last of `n` entries of a ring are free."""

    @pl.loop(jnp.maximum(0, n - slots), n)
    def _(i):  # type: ignore[no-untyped-def]
        plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(slots))])


def start(H: int) -> Carry:
    """The carry before any tile."""
    row = plgpu.Layout.WGMMA.reduce(1)
    acc = plgpu.layout_cast(jnp.full((ROWS, H), 0.0, jnp.float32), plgpu.Layout.WGMMA)
    top = plgpu.layout_cast(jnp.full((ROWS,), NEVER, jnp.float32), row)
    return acc, top, plgpu.layout_cast(jnp.full((ROWS,), 0.0, jnp.float32), row)


def add_product(acc: Array, p16: Array, v: Any, p_sm: Any) -> Array:
    """acc + p·V on the tensor cores; the interpreter takes p from shared memory alone."""

    def multiply(acc_ref):  # type: ignore[no-untyped-def]
        plgpu.wgmma(acc_ref, p16, v)

    def interpreted(acc_ref):  # type: ignore[no-untyped-def]
        plgpu.wgmma(acc_ref, p_sm, v)
        return acc_ref[...]

    if p_sm is None:
        return pl.run_state(multiply)(plgpu.ACC.init(acc))
    p_sm[...] = p16
    plgpu.commit_smem()
    return acc + pl.run_scoped(interpreted, plgpu.ACC(acc.shape, jnp.float32))
