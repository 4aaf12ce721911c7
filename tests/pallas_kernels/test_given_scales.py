"""Writes of keys and values in 8 bits by scales that are given, for all tokens, head by head."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quantised import DTYPES, SCALE_DTYPE, quantise
from pallas_kernels.rope_write import mosaic_gpu, rope_write
from pallas_kernels.rope_write.cases import CASES, Case
from tests.pallas_kernels.places import jitted
from tests.pallas_kernels.test_quantised import dtypes
from tests.pallas_kernels.test_rope_write import arguments

NAMES = (
    "some dropped",
    "all dropped",
    "bias, groups of seven",
    "norm",
    "bias and norm, heads of 256",
    "one KV head",
)
WRITTEN = [case for case in CASES if case.name in NAMES]


def scales_of(heads: int) -> Any:
    """Of each head's keys, so that none is too large, and of its values, so that many are; no two
    are equal."""
    return (jnp.array([[0.0123, 0.0031]]) * (1 + jnp.arange(heads)[:, None] / heads)).astype(
        SCALE_DTYPE
    )


def given_scales(case: Case, low: Any = jnp.float32) -> tuple[Any, ...]:
    rows, *rest = arguments(case, low)
    return replace(rows, kv_scales=scales_of(case.kv_heads)), *rest


def pools_of(k_pages: Any, dtype: Any) -> list[Any]:
    return [jnp.full(k_pages.shape, 3, dtype)] * 2 + [
        jnp.full((*k_pages.shape[:2], 2, k_pages.shape[2]), 7, SCALE_DTYPE)
    ]


def assert_written(case: Case, got: Any, wide: Any, page: Any, offset: Any, slack: float) -> None:
    """What was kept is within half a unit of the 8-bit type, or the largest number where it is
    larger; nothing else changed."""
    dtype, scales = got[0].dtype, np.asarray(got[2], np.float32)
    info, kept = jnp.finfo(dtype), np.asarray(page) < case.num_pages
    place = np.asarray(page)[kept], slice(None), np.asarray(offset)[kept]
    rest = np.ones((case.num_pages, case.page_size), bool)
    rest[place[0], place[2]] = False
    for side, x in enumerate(wide):
        scale = np.asarray(scales_of(case.kv_heads), np.float64)[:, side]
        exact = np.clip(
            np.asarray(x, np.float64)[place] / scale[:, None], float(info.min), float(info.max)
        )
        unit = np.maximum(
            np.abs(exact) * 2.0 ** -(info.nmant + 1), float(info.smallest_subnormal) / 2
        )
        assert (
            np.abs(np.asarray(got[side], np.float64)[place] - exact) <= unit * (1 + slack)
        ).all()
        assert (scales[:, :, side][place] == scale).all()
        assert (np.moveaxis(np.asarray(got[side], np.float32), 2, 1)[rest] == 3).all()
        assert (np.moveaxis(scales[:, :, side], 2, 1)[rest] == 7).all()
    if case.kept > 4 and dtype == DTYPES[0]:
        assert (np.abs(np.asarray(got[1], np.float32)[place]) == float(info.max)).any(), (
            "some value was too large"
        )


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(
            case,
            dtype,
            id=f"{case.name}-{dtype}",
            marks=[] if dtype is DTYPES[i % len(DTYPES)] else pytest.mark.slow,
        )
        for i, case in enumerate(WRITTEN)
        for dtype in DTYPES
    ],
)
def test_the_reference_writes_by_the_given_scales(case: Case, dtype: Any) -> None:
    rows, k_pages, v_pages, page, offset = given_scales(case)
    write = jax.jit(rope_write, static_argnames="backend")
    q, *wide = write(rows, k_pages * 0, v_pages * 0, page, offset, backend="reference")
    k8, v8, scales = pools_of(k_pages, dtype)
    q8, *got = write(rows, k8, v8, page, offset, scales=scales, backend="reference")
    np.testing.assert_allclose(q8, q, rtol=1e-5, atol=1e-5)
    assert_written(case, got, wide, page, offset, 1e-3)


@pytest.mark.parametrize(
    "case", [case for case in WRITTEN if case.kept < 10], ids=lambda case: case.name
)
def test_the_interpreted_write_for_hopper_does_so_too(case: Case) -> None:
    rows, k_pages, _, page, offset = low = given_scales(case, jnp.bfloat16)
    full = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, low)
    _, *wide = jax.jit(rope_write, static_argnames="backend")(*full, backend="reference")
    run = functools.partial(
        jitted(mosaic_gpu.rope_write, "k_pages", "v_pages", "scales"),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    k8, v8, scales = (jnp.array(pool) for pool in pools_of(k_pages, DTYPES[0]))
    _, *got = run(rows, k8, v8, page, offset, scales=scales)
    assert_written(case, got, wide, page, offset, 1e-3)


@dtypes
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "tokens"),
    [(28, 4, 128, 3), (14, 2, 64, 3), (7, 1, 256, 2048), (32, 8, 128, 2048)],
)
def test_it_lowers_for_cuda_and_aliases_the_pools(
    heads: int, kv_heads: int, head_dim: int, tokens: int, dtype: Any
) -> None:
    shape = jax.ShapeDtypeStruct
    low, angles = (
        functools.partial(shape, dtype=jnp.bfloat16),
        shape((tokens, head_dim // 2), jnp.float32),
    )
    qkv, bias, norms = (
        low((tokens, heads + 2 * kv_heads, head_dim)),
        low((heads + 2 * kv_heads, head_dim)),
        (low((head_dim,)),) * 2,
    )
    rows = replace(
        arguments(CASES[0])[0],
        qkv=qkv,
        cos=angles,
        sin=angles,
        bias=bias,
        norms=norms,
        queries=heads,
        kv_scales=low((kv_heads, 2)),
    )
    pool, ints = shape((64, kv_heads, 64, head_dim), dtype), shape((tokens,), jnp.int32)
    traced = jitted(mosaic_gpu.rope_write, "k_pages", "v_pages", "scales").trace(
        rows, pool, pool, ints, ints, scales=low((64, kv_heads, 2, 64))
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1
    assert text.count("tf.aliasing_output") == 3


@dtypes
def test_what_is_no_number_stays_none_and_what_is_infinite_becomes_the_largest(dtype: Any) -> None:
    given = scales_of(1)[:, 0]
    x8, scale = quantise(jnp.array([[0.0, jnp.nan, 1.0, jnp.inf, -1e30]]), dtype, given)
    limit = float(jnp.finfo(dtype).max)
    np.testing.assert_array_equal(
        np.asarray(x8, np.float32)[0, [0, 1, 3, 4]], [0, np.nan, limit, -limit]
    )
    assert scale.dtype == SCALE_DTYPE and float(scale[0]) == float(given[0])
