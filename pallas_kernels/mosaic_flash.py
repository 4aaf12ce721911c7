"""What the Hopper kernels of attention have in common: the parameters of a compiled
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

# Weighted values [ROWS, H], running maximum [ROWS] in the log2 domain, sum of weights [ROWS]
type Carry = tuple[Array, Array, Array]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What one compiled kernel is specialised to.

    Attributes:
        K, G, H: KV heads, query heads of each, head dimension.
        dtype: of queries and output.
        scale, softcap: as in `AttentionOptions`.
        interpret: Pallas' `interpret`, for machines without a GPU.
    """

    K: int
    G: int
    H: int
    dtype: Any
    scale: float
    softcap: float | None
    interpret: Any


@dataclass(frozen=True, kw_only=True)
class PagedSpec(AttentionSpec):
    """The same of a kernel over pages.

    Attributes:
        C: tokens of a page.
        window: as in `AttentionOptions`.
        kv_dtype: of 8-bit pages, else None.
    """

    C: int
    window: int | None
    kv_dtype: str | None = None

    @property
    def width(self) -> int:
        """Columns of one plain buffer: layout inference of JAX 0.12 does not end on 256."""
        if self.H < 128:
            return self.H
        return math.gcd(self.H, 128)

    @property
    def columns(self) -> list[Any]:
        """The plain buffers' columns of a row."""
        return self.columns_of(self.H)

    def columns_of(self, row: int) -> list[Any]:
        """The plain buffers' columns of a row of another length."""
        return [pl.ds(c, self.width) for c in range(0, row, self.width)]


def merged(interpret: Any, launch: Callable[..., tuple[Array, ...]], splits_SF: Any) -> Array:
    """The output of `launch(phase, flags, *parts)`, whose other results are the parts of followers.

    The interpreter has no flags, and would report an owner's reads of its followers' parts as
    races. There the kernel runs twice: first without merging, then with the parts of the first run
    as inputs.
    """
    if interpret is None:
        return launch("both", flags_buffer(splits_SF))[0]
    _, *parts = launch("parts", splits_SF[...])
    return launch("merge", splits_SF[...], *parts)[0]


def start(H: int) -> Carry:
    """The carry before any tile."""
    row = plgpu.Layout.WGMMA.reduce(1)
    acc = plgpu.layout_cast(jnp.full((ROWS, H), 0.0, jnp.float32), plgpu.Layout.WGMMA)
    top = plgpu.layout_cast(jnp.full((ROWS,), NEVER, jnp.float32), row)
    return acc, top, plgpu.layout_cast(jnp.full((ROWS,), 0.0, jnp.float32), row)


def product(left: Any, right: Any, shape: tuple[int, int], then: Callable[[], None]) -> Array:
    """left·right on the tensor cores, float32; `then()` runs before it is awaited."""

    def multiply(acc):  # type: ignore[no-untyped-def]
        plgpu.wgmma(acc, left, right)
        then()
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def add_product(acc: Array, left: Any, right: Any, interpret: Any) -> Array:
    """acc + left·right on the tensor cores; the interpreter takes no accumulator that is given."""
    if interpret is not None:
        return acc + product(left, right, acc.shape, lambda: None)
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, left, right))(plgpu.ACC.init(acc))


def weights_operand(p16: Array, p_sm: Any) -> Any:
    """Weights as the left side of a product: registers, or where the kernel is interpreted the
    shared memory `p_sm`, since the interpreter takes nothing else."""
    if p_sm is None:
        return p16
    p_sm[...] = p16
    plgpu.commit_smem()
    return p_sm


def zero_from(v: Any, size: int, H: int, count: Array) -> None:
    """Zeroes the values from token `count` on: they get weight 0, but 0 · NaN is NaN and a page may
    hold anything."""
    width = math.gcd(H, 64)
    columns = H // width

    @pl.loop(0, (size // 64) * columns)
    def _(i):  # type: ignore[no-untyped-def]
        # Small pieces, since the producer has few registers; a loop, since layout inference is slow
        # on many pieces.
        base = pl.multiple_of(lax.div(i, jnp.int32(columns)) * 64, 64)
        column = pl.multiple_of(lax.rem(i, jnp.int32(columns)) * width, width)
        piece = v.at[pl.ds(base, 64), pl.ds(column, width)]
        token = plgpu.broadcasted_iota(jnp.int32, (64, width), 0, layout=plgpu.Layout.WGMMA)
        values = plgpu.load(piece, layout=plgpu.Layout.WGMMA)
        piece[...] = jnp.where(token < count - base, values, jnp.zeros_like(values))

    plgpu.commit_smem()


def fold(
    spec: AttentionSpec,
    carry: Carry,
    scores: Array,
    mask: Callable[[Array], Array] | None,
    ready: Callable[[], Any],
    p_sm: Any,
) -> Carry:
    """One step of online softmax: scores `[ROWS, keys]`, then the values that `ready()` waits for.

    `mask` makes scores -inf where a row does not see a key; None means that every row sees every
    key.
    """
    acc, top, total = carry
    factor = spec.scale * LOG2E
    if spec.softcap is not None:
        scores = jnp.tanh(scores * (spec.scale / spec.softcap))
        factor = spec.softcap * LOG2E
    if mask is not None:
        scores = mask(scores)
    new_top = jnp.maximum(top, scores.max(axis=1) * factor)
    decay = jnp.exp2(top - new_top)
    p = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
    total = total * decay + p.sum(axis=1)
    p16 = p.astype(spec.dtype)
    acc, total, new_top, p16 = lax.optimization_barrier((acc, total, new_top, p16))
    values = ready()
    return add_product(acc, weights_operand(p16, p_sm), values, spec.interpret), new_top, total


def finish(carry: Carry) -> tuple[Array, Array]:
    """The output `[ROWS, H]` and the log2 of the sum of weights; rows that saw nothing give zeros
    and -inf."""
    acc, top, total = carry
    lse = top + jnp.log2(total)
    total = jnp.where(total > 0, total, 1.0)
    return acc * lax.broadcast_in_dim(1 / total, acc.shape, [0]), lse
