"""Shapes that `benchmarks.kernels` times, and ragged batches that it checks against the reference
back ends."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.quantised import SCALE_DTYPE, quantise

TABLE_WIDTH = 130
POOL_PAGES = 8320
# KV heads and query heads of each: Qwen2.5 7B and Llama 3.1 8B; Llama 3.2 1B and gpt-oss; Gemma 2's
DECODE_HEADS = {128: ((4, 7), (8, 4)), 64: ((8, 4), (8, 8)), 256: ((8, 2), (4, 2))}
SOFTCAPS = {256: 50.0}  # of scores, by head dimension: Gemma 2's
DECODE_LOADS = ((1, 2048), (16, 2048), (64, 2048), (256, 1024), (64, 8192), (16, 8192))


class DecodeShape(NamedTuple):
    """Equal rows of one decode step."""

    B: int
    context: int
    group: int


class ExtendShape(NamedTuple):
    """Equal rows of prompt chunks."""

    rows: int
    queries: int
    prefix: int
    K: int
    group: int
    H: int = 128
    page: int = 64


class Check(NamedTuple):
    """A ragged batch; `lengths` are KV lengths, `chunks` the queries of each row (extend only)."""

    K: int
    group: int
    H: int
    page: int
    lengths: tuple[int, ...]
    chunks: tuple[int, ...] = ()
    window: int | None = None
    softcap: float | None = None
    dtype: str = "bfloat16"
    kv_dtype: str | None = None  # of the pages, None = dtype


E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
EXTEND_SHAPES = (
    ExtendShape(1, 8192, 0, 4, 7),
    ExtendShape(1, 2048, 8192, 4, 7),
    ExtendShape(1, 2048, 0, 4, 7),
    ExtendShape(1, 512, 0, 4, 7),
    ExtendShape(8, 512, 512, 4, 7),
    ExtendShape(1, 128, 8192, 4, 7),
    ExtendShape(1, 8192, 0, 8, 4),
    ExtendShape(1, 2048, 8192, 8, 4),
)
RAGGED = (1, 63, 64, 65, 0, 500, 2048, 7, 1031, 0, 129)
DECODE_CHECKS = (
    Check(4, 7, 128, 64, RAGGED),
    Check(8, 4, 128, 64, (2048,)),
    Check(8, 2, 128, 16, RAGGED),
    Check(2, 16, 128, 32, RAGGED, window=100),
    Check(1, 12, 64, 128, RAGGED, softcap=30.0),
    Check(3, 1, 64, 16, RAGGED, dtype="float16"),
    Check(2, 8, 256, 64, RAGGED, window=512, softcap=50.0),
    Check(2, 5, 256, 16, RAGGED),
    Check(4, 7, 128, 64, (0, 0, 0)),
    Check(4, 7, 128, 64, tuple(range(1, 2000, 17))),
    Check(4, 7, 128, 64, RAGGED, kv_dtype=E4M3),
    Check(4, 7, 128, 64, tuple(range(1, 2000, 17)), kv_dtype=E4M3),
    Check(8, 4, 128, 128, (2048, 8191), kv_dtype=E5M2),
    Check(1, 12, 64, 64, RAGGED, softcap=30.0, kv_dtype=E4M3),
    Check(2, 16, 256, 64, RAGGED, window=512, dtype="float16", kv_dtype=E5M2),
    Check(2, 1, 256, 128, RAGGED, kv_dtype=E4M3),
)
EXTEND_CHECKS = (
    Check(4, 7, 128, 64, (1, 63, 200, 1500, 700, 0), (1, 63, 130, 600, 1, 0)),
    Check(8, 4, 128, 64, (2048,), (2048,)),
    Check(2, 2, 128, 16, (300, 129, 1000), (300, 65, 128)),
    Check(2, 3, 64, 128, (300, 129, 1000), (150, 129, 1), window=100),
    Check(1, 4, 256, 32, (300, 129, 900), (150, 129, 500), softcap=30.0, dtype="float16"),
    Check(4, 7, 128, 64, (1, 63, 200, 1500, 700, 0), (1, 63, 130, 600, 1, 0), kv_dtype=E4M3),
    Check(8, 4, 128, 128, (2048,), (2048,), kv_dtype=E5M2),
    Check(2, 3, 64, 64, (300, 129, 1000), (150, 129, 1), window=100, kv_dtype=E4M3),
    Check(
        1,
        4,
        256,
        128,
        (300, 129, 900),
        (150, 129, 500),
        softcap=30.0,
        dtype="float16",
        kv_dtype=E4M3,
    ),
)


class Pools(NamedTuple):
    """Pages, and what attention is told of them beside: their scales, if they have some."""

    k: Array
    v: Array
    more: dict[str, Array]


def in_8_bits(k: Array, v: Array, kv_dtype: str) -> Pools:
    """Pages rounded to 8 bits with their scales; where they are NaN, scales are too."""
    (k8, ks), (v8, vs) = (quantise(x.astype(jnp.float32), kv_dtype) for x in (k, v))
    hidden = jnp.isnan(k[..., 0])[:, :, None]
    return Pools(
        k8,
        v8,
        {"scales": jnp.where(hidden, jnp.nan, jnp.stack([ks, vs], axis=2)).astype(SCALE_DTYPE)},
    )


def pools(check: Check, seed: int) -> tuple[np.random.Generator, Pools, Array]:
    """Random pages and a table; everything that no row may see is NaN, and table entries past a
    row's pages name no page."""
    rng = np.random.default_rng(seed)
    width = max(1, *(-(-n // check.page) for n in check.lengths))
    count = len(check.lengths) * width + 3
    table = (
        rng.permutation(count)[: len(check.lengths) * width]
        .reshape(len(check.lengths), width)
        .astype(np.int32)
    )
    seen = np.zeros((count, 1, check.page, 1), bool)
    for row, length in zip(table, check.lengths, strict=True):
        tokens = np.arange(length)
        seen[row[tokens // check.page], 0, tokens % check.page] = True
        row[-(-length // check.page) :] = count + 5
    shape = (count, check.K, check.page, check.H)
    k, v = (
        jnp.asarray(np.where(seen, rng.normal(size=shape), np.nan), check.dtype) for _ in range(2)
    )
    made = Pools(k, v, {}) if check.kv_dtype is None else in_8_bits(k, v, check.kv_dtype)
    return rng, made, jnp.asarray(table)


def difference(out: Array, wanted: Array) -> dict[str, Any]:
    """Relative error in the Frobenius norm and whether it is small; NaN is not."""
    out32, wanted32 = out.astype(jnp.float32), wanted.astype(jnp.float32)
    norm = float(jnp.linalg.norm(wanted32))
    error = float(jnp.linalg.norm(out32 - wanted32)) / max(norm, 1e-9)
    return {"error": error, "max": float(jnp.abs(out32 - wanted32).max()), "ok": bool(error < 1e-2)}


def check_decode(check: Check, **options: Any) -> dict[str, Any]:
    """The Mosaic kernel beside the reference on one ragged batch."""
    from pallas_kernels.paged_decode import mosaic_gpu, reference

    rng, pages, table = pools(check, 0)
    B = len(check.lengths)
    q = jnp.asarray(rng.normal(size=(B, check.K * check.group, check.H)), check.dtype)
    args = (q, pages.k, pages.v, table, jnp.asarray(check.lengths, jnp.int32))
    kw = {"scale": check.H**-0.5, "window": check.window, "softcap": check.softcap, **pages.more}
    wanted = jax.jit(lambda *a: reference.decode_attention(*a, **kw))(
        *(a.astype(jnp.float32) if a.dtype == q.dtype else a for a in args)
    )
    return difference(
        jax.jit(lambda *a: mosaic_gpu.decode_attention(*a, **kw, **options))(*args), wanted
    )


def check_extend(check: Check, **options: Any) -> dict[str, Any]:
    """As `check_decode`, for prompt chunks with a gap of unused tokens after each row."""
    from pallas_kernels.paged_extend import mosaic_gpu, reference

    rng, pages, table = pools(check, 0)
    chunks = np.asarray(check.chunks)
    starts = np.cumsum(chunks + 3) - (chunks + 3)
    total = int((chunks + 3).sum())
    q = jnp.asarray(rng.normal(size=(total, check.K * check.group, check.H)), check.dtype)
    args = (
        q,
        pages.k,
        pages.v,
        table,
        *(jnp.asarray(a, jnp.int32) for a in (starts, chunks, check.lengths)),
    )
    kw = {"scale": check.H**-0.5, "window": check.window, "softcap": check.softcap, **pages.more}
    wanted = jax.jit(lambda *a: reference.extend_attention(*a, **kw))(
        *(a.astype(jnp.float32) if a.dtype == q.dtype else a for a in args)
    )
    return difference(
        jax.jit(lambda *a: mosaic_gpu.extend_attention(*a, **kw, **options))(*args), wanted
    )


def decode_tunings(itemsize: int, head_dim: int) -> list[Any]:
    """Candidates of the decode sweep, for pages of so many bytes a number."""
    from pallas_kernels.paged_decode.mosaic_gpu import Tuning

    if itemsize == 1:
        two = [Tuning(stages=6, min_tiles=n, consumers=2) for n in (2, 1, 4)] + [
            Tuning(stages=n, consumers=2) for n in (4, 8)
        ]
        clusters = [Tuning(stages=6, consumers=2, cluster=n) for n in (1, 2)]
        return two + clusters + [Tuning(stages=n) for n in (6, 4, 5, 7)]
    if head_dim == 64:  # a tile is half as large, so twice as many are on their way, or two blocks
        deep = [Tuning(stages=6, blocks=n) for n in (132, 264)]
        return deep + [
            Tuning(stages=stages, blocks=blocks, cluster=1, swapped=True)
            for stages, blocks in ((6, 132), (6, 264), (8, 132), (4, 264))
        ]
    if head_dim == 96:
        deep = Tuning(stages=6, cluster=1, swapped=True)
        clusters = [deep._replace(cluster=n, min_tiles=t) for n, t in ((2, 2), (2, 16), (4, 16))]
        slots = [deep._replace(stages=n) for n in (4, 8)]
        longer = [deep._replace(min_tiles=n) for n in (4, 16)]
        return [Tuning(stages=4), deep, *slots, *longer, *clusters]
    if head_dim == 256:  # a tile is twice as large: two slots, or three with keys for rows
        deep = Tuning(stages=3, cluster=1, swapped=True)
        clusters = [deep._replace(cluster=n, min_tiles=2 * n) for n in (2, 8)]
        return [Tuning(stages=2, queries=1), deep, deep._replace(stages=2), *clusters]
    return [Tuning(), Tuning(min_tiles=1), Tuning(min_tiles=4), Tuning(stages=2), Tuning(stages=4)]


def extend_tunings() -> list[Any]:
    """Candidates of the prefill sweep at head_dim 128."""
    from pallas_kernels.paged_extend.mosaic_gpu import Tuning

    shares = [
        Tuning(min_tiles=2),
        Tuning(min_tiles=4),
        Tuning(shared_up_to=0),
        Tuning(shared_up_to=2048),
    ]
    return [Tuning(), Tuning(groups=1, stages=2), Tuning(groups=1, stages=4), *shares]
