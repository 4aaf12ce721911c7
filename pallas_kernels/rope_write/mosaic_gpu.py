"""Bias, norm, rotation and the write of keys and values for NVIDIA Hopper in Pallas Mosaic GPU: one
small launch.

A thread block is one warpgroup with some heads of one token: a tile of query heads, or a tile of
key heads and the same value heads. It loads everything into registers at once. The two halves of a
head lie in registers of the same lane, so the rotation needs no exchange. Products in parts are
added up as they are loaded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backends import named
from pallas_kernels.mosaic_gpu import first_page_of, head_dims, launch, store
from pallas_kernels.parts import Parts, Product, added, whole
from pallas_kernels.quantised import clipped, inverse_of, is_quantised, scale_of
from pallas_kernels.rope_write.rows import HeadRows

# Up to this many tokens small tiles fill the device sooner; beyond, large tiles keep more bytes in
# flight
FEW_TOKENS = 512
# heads
SMALL_TILE = 8
LARGE_TILE = 32


def check(rows: HeadRows, k_pages: Array, v_pages: Array) -> None:
    """Raise ValueError for shapes and types that the kernel does not take."""
    shapes = f"qkv {rows.qkv.shape}, k {k_pages.shape}, v {v_pages.shape}"
    dtype = rows.qkv.dtype
    pool = k_pages.dtype
    if (
        dtype not in (jnp.bfloat16, jnp.float16)
        or v_pages.dtype != pool
        or not (pool == dtype or is_quantised(pool))
    ):
        types = f"got {dtype}, {pool}, {v_pages.dtype}"
        raise ValueError(
            "mosaic_gpu rope_write takes bfloat16 or float16 throughout, or pages of 8-bit floats, "
            f"{types}"
        )
    widths = head_dims(pool)
    if rows.qkv.shape[-1] not in widths or k_pages.shape[3] != rows.qkv.shape[-1]:
        raise ValueError(f"mosaic_gpu rope_write takes head_dim {named(widths)}, got {shapes}")
    if v_pages.shape != k_pages.shape or k_pages.shape[1] != rows.keys:
        raise ValueError(
            f"mosaic_gpu rope_write takes K and V pools of {rows.keys} heads, got {shapes}"
        )


def rope_write(
    rows: HeadRows,
    k_pages: Array,
    v_pages: Array,
    page_T: Array,
    offset_T: Array,
    first_page: Array | None = None,
    *,
    scales: Array | None = None,
    interpret: Any = None,
) -> tuple[Array, ...]:
    """See `pallas_kernels.rope_write`. bfloat16 or float16, pages of the same or of 8-bit floats;
    head_dim 64, 96 (16-bit pages alone), 128, 256. Raises ValueError otherwise.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    check(rows, k_pages, v_pages)
    pools: tuple[Array, ...] = (k_pages, v_pages)
    if scales is not None:
        pools = (*pools, scales)
    return _launch(rows, pools, (page_T, offset_T, first_page_of(first_page)), interpret)


class _Source(NamedTuple):
    """The heads of a product: arrays, and what a kernel makes of token t of refs to them; `load`
    loads some heads of a row."""

    arrays: tuple[Array, ...]
    heads: Callable[..., Array]

    @classmethod
    def of(cls, qkv: Product) -> _Source:
        _, C, H = qkv.shape
        if not isinstance(qkv, Parts) or qkv.done is not None or qkv.sums.shape[2] % H:
            return cls((whole(qkv),), lambda t, load, ref: load(ref.at[t]))
        *leading, columns = qkv.sums.shape
        sums = qkv.sums.reshape(*leading, columns // H, H)
        of_columns = [scale.reshape(C, H) for scale in qkv.scales[1:]]
        return cls((sums, *qkv.scales[:1], *of_columns), functools.partial(added, qkv.dtype))


def _launch(
    rows: HeadRows, pools: tuple[Array, ...], places: tuple[Array, ...], interpret: Any
) -> tuple[Array, ...]:
    """Returns the queries, and the pools with the tokens' keys and values written. `places` are
    pages, offsets in them, and the first page."""
    quantised = len(pools) > 2
    T, _, H = rows.qkv.shape
    N = rows.queries
    K = rows.keys
    half = H // 2
    count = rows.dim or H
    q_tile = tile_of(N, T)
    k_tile = tile_of(K, T)
    source = _Source.of(rows.qkv)
    biased = rows.bias is not None
    normed = rows.norms is not None
    fixed = quantised and rows.kv_scales is not None
    optional = []
    if biased:
        optional.append(rows.bias)
    if fixed:
        optional.append(rows.kv_scales)
    if rows.norms is not None:
        optional += rows.norms

    def rope_write_kernel(cos_ref, sin_ref, page_ref, offset_ref, first_ref, *rest):  # type: ignore[no-untyped-def]
        qkv_refs = rest[: len(source.arrays)]
        rest = rest[len(source.arrays) :]
        pool_refs = rest[: len(pools)]
        *optional_refs, q_ref = rest[len(pools) :]
        bias_ref = None
        if biased:
            bias_ref = optional_refs[0]
        scales_ref = None
        if fixed:
            scales_ref = optional_refs[biased]
        q_norm_ref = None
        k_norm_ref = None
        if normed:
            q_norm_ref, k_norm_ref = optional_refs[-2:]
        tile = lax.axis_index("tile")
        t = lax.axis_index("token")
        halves = pl.ds(0, half), pl.ds(half, half)

        def load(first: Array | int, heads: int) -> list[Array]:
            """Both halves of some heads, bias added, float32."""
            head_span = pl.ds(first, heads)
            layout = _layout(heads, half)
            loads = [
                lambda ref, columns=columns: _load(ref.at[head_span, columns], layout)
                for columns in halves
            ]
            x = [source.heads(t, load, *qkv_refs).astype(jnp.float32) for load in loads]
            if bias_ref is None:
                return x
            return [y + load(bias_ref) for y, load in zip(x, loads, strict=True)]

        def turned(first: Array | int, heads: int, weight_ref: Any) -> list[Array]:
            """Both halves of some heads, normed and rotated."""
            shape = (heads, half)
            layout = _layout(heads, half)

            def row(ref: Any) -> Array:
                return lax.broadcast_in_dim(_load(ref, layout.reduce(0)), shape, [1])

            left, right = load(first, heads)
            cos = row(cos_ref.at[t])
            sin = row(sin_ref.at[t])
            if weight_ref is not None:
                squares = jnp.sum(left * left + right * right, axis=1)
                scale = lax.broadcast_in_dim(
                    lax.rsqrt(squares * (1 / count) + rows.eps), shape, [0]
                )
                left, right = (
                    y * scale * row(weight_ref.at[columns])
                    for y, columns in zip((left, right), halves, strict=True)
                )
            return [left * cos - right * sin, right * cos + left * sin]

        @pl.when(tile < N // q_tile)
        def _queries() -> None:
            first = tile * q_tile
            for columns, y in zip(halves, turned(first, q_tile, q_norm_ref), strict=True):
                store(q_ref.at[t, pl.ds(first, q_tile), columns], y)

        @pl.when(tile >= N // q_tile)
        def _keys_and_values() -> None:
            page = page_ref[t] + first_ref[0]
            offset = offset_ref[t]
            first = (tile - N // q_tile) * k_tile
            values = load(N + K + first, k_tile)
            keys = turned(N + first, k_tile, k_norm_ref)

            @pl.when(page < pools[0].shape[0])
            def _() -> None:
                head_span = pl.ds(first, k_tile)
                sides = [keys, values]
                if quantised:
                    for side in range(2):
                        fixed_scale = None
                        if scales_ref is not None:
                            fixed_scale = _load(
                                scales_ref.at[head_span, side], _layout(k_tile, half).reduce(1)
                            )
                        sides[side], scale = _scaled(
                            sides[side], pool_refs[side].dtype, fixed_scale
                        )
                        store(pool_refs[2].at[page, head_span, side, offset], scale)
                for columns, *both in zip(halves, *sides, strict=True):
                    for ref, x in zip(pool_refs, both, strict=False):
                        store(ref.at[page, head_span, offset, columns], x)

    written = [jax.new_ref(pool) for pool in pools]
    q_TNH = launch(
        rope_write_kernel,
        (
            *(rows.cos, rows.sin, *(x.astype(jnp.int32) for x in places)),
            *(*source.arrays, *written, *optional),
        ),
        interpret,
        out_type=jax.ShapeDtypeStruct((T, N, H), rows.qkv.dtype),
        grid=(N // q_tile + K // k_tile, T),
        grid_names=("tile", "token"),
    )
    return q_TNH, *(ref[...] for ref in written)


def tile_of(heads: int, tokens: int) -> int:
    """Heads of one tile: a divisor of `heads`, and a multiple of the largest number up to 8 of
    which a layout exists."""
    unit = math.gcd(heads, 8)
    if tokens <= FEW_TOKENS:
        most = SMALL_TILE
    else:
        most = LARGE_TILE
    return max(size for size in range(unit, max(unit, most) + 1, unit) if heads % size == 0)


def _layout(heads: int, half: int) -> Any:
    """Rows over warps and columns over lanes, so that a sum over a row stays within a warp; with
    few rows warps, and of a single row of 48 half the lanes, do the same work."""
    layout = functools.partial(plgpu.Layout.TILED, vector_dim=-1)
    copies = plgpu.Replicated
    unit = math.gcd(heads, 8)
    word = math.gcd(half // 16, 16)
    if unit < 8 and half % 32 == 0:  # a warp a row
        tiling = plgpu.Tiling(((unit, half), (half // 32,)))
        warps = {4: (-3,), 2: (-3, copies(2)), 1: (copies(4),)}[unit]
        return layout(tiling, warp_dims=warps, lane_dims=(-2,))
    if unit == 1:
        tiling = plgpu.Tiling(((1, half), (16 * word,), (word,)))
        return layout(tiling, warp_dims=(copies(4),), lane_dims=(copies(2), -2))
    tiling = plgpu.Tiling(((unit, half), (2, 16 * word), (word,)))
    warps = {8: (-5,), 4: (-5, copies(2)), 2: (copies(4),)}[unit]
    return layout(tiling, warp_dims=warps, lane_dims=(-3, -2))


def _scaled(both: list[Array], dtype: Any, fixed_scale: Array | None) -> tuple[list[Array], Array]:
    """Both halves of some heads divided by the heads' scales, and these: the given ones, or their
    own.
    """
    if fixed_scale is not None:
        inverse = lax.broadcast_in_dim(1 / fixed_scale, both[0].shape, [0])
        return [clipped(x * inverse, dtype) for x in both], fixed_scale
    largest = jnp.max(jnp.maximum(*(jnp.maximum(x, -x) for x in both)), axis=1)
    scale = scale_of(largest, dtype)
    inverse = lax.broadcast_in_dim(inverse_of(scale), both[0].shape, [0])
    return [x * inverse for x in both], scale


def _load(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)
