"""Pages of 8-bit floats: scales are exact, and writes and attention agree with float32."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import paged_decode, paged_extend
from pallas_kernels.paged_decode import cases as decode_cases
from pallas_kernels.paged_extend import cases as extend_cases
from pallas_kernels.quantised import (
    DTYPES,
    MIN_SCALE_BITS,
    SCALE_DTYPE,
    is_quantised,
    quantise,
    scale_of,
)
from pallas_kernels.rope_write import HeadRows, rope_write
from pallas_kernels.rope_write import mosaic_gpu as mosaic_write
from pallas_kernels.rope_write.cases import CASES as WRITES
from pallas_kernels.rope_write.cases import Case as Write
from tests.pallas_kernels.places import jitted
from tests.pallas_kernels.test_rope_write import arguments

OPS = {
    "decode": (paged_decode.decode_attention, decode_cases),
    "extend": (paged_extend.extend_attention, extend_cases),
}
NAMES = (
    "ragged",
    "groups of seven",
    "pages that do not divide a tile",
    "sinks, window and softcap",
    "infinite poison",
    "window",
)
SIMPLE = ("ragged", "window")
READS = [(op, case) for op, (_, table) in OPS.items() for case in table.CASES if case.name in NAMES]
WRITTEN = [
    case
    for case in WRITES
    if case.name
    in ("some dropped", "all dropped", "bias, groups of seven", "bias and norm, heads of 256")
]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def pages_in_8_bits(x: np.ndarray, dtype: Any, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pages `[P, K, C, H]` in 8 bits, scaled by any powers of two, and the scales `[P, K, C]`; what
    was NaN or infinite is NaN in both."""
    scale = 2.0 ** np.random.default_rng(seed).integers(-9, 9, x.shape[:3])
    with np.errstate(invalid="ignore"):
        return (x * 32).astype(dtype), np.where(
            np.isfinite(x).all(axis=-1), scale / 32, np.nan
        ).astype(SCALE_DTYPE)


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-9))


def read(op: str, case: Any, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Attention over 8-bit pages by the reference and by the fallback, and by the reference over
    what they stand for in float32."""
    attend, table = OPS[op]
    q, k, v, *rows = table.inputs(case).args
    (k8, ks), (v8, vs) = (pages_in_8_bits(x, dtype, seed) for seed, x in enumerate((k, v)))
    run = jax.jit(functools.partial(attend, **case.options), static_argnames="backend")
    wide = [
        x.astype(np.float32) * scale.astype(np.float32)[..., None]
        for x, scale in ((k8, ks), (v8, vs))
    ]
    wanted = np.asarray(run(q, *wide, *rows, backend="reference"))
    scales = np.stack([ks, vs], axis=2)
    by_reference, by_fallback = (
        np.asarray(run(q, k8, v8, *rows, backend=backend, scales=scales))
        for backend in ("reference", "xla")
    )
    assert by_reference.dtype == by_fallback.dtype == q.dtype
    return by_reference, by_fallback, wanted


def assert_rounded(got: np.ndarray, x: np.ndarray, dtype: Any) -> None:
    """Equal to half a unit of the 8-bit type, at sizes where a power of two as scale cannot lose
    digits, and close to zero."""
    info = jnp.finfo(dtype)
    close = np.abs(x).max(axis=-1, keepdims=True) * float(info.smallest_subnormal) / float(info.max)
    assert (
        np.abs(got - x) <= np.maximum(np.abs(x) * 2.0 ** -(info.nmant + 1), close) * 1.001
    ).all()


@dtypes
@given(largest=st.floats(0, 2.0**127, width=32))
def test_a_scale_is_the_smallest_power_of_two_that_fits(dtype: Any, largest: float) -> None:
    scale, limit = float(scale_of(jnp.float32(largest), dtype)), float(jnp.finfo(dtype).max)
    assert np.frexp(scale)[0] == 0.5
    assert float(jnp.asarray(scale).astype(SCALE_DTYPE)) == scale
    assert largest / scale <= limit
    assert largest / scale > limit / 2 or scale == 2.0 ** (MIN_SCALE_BITS - 127)


@dtypes
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(-20, 20))
def test_the_type_alone_rounds(dtype: Any, seed: int, size: int) -> None:
    x = np.random.default_rng(seed).standard_normal((3, 16)).astype(np.float32) * np.float32(
        2.0**size
    )
    x8, scale = (np.asarray(y, np.float64) for y in quantise(jnp.asarray(x), dtype))
    assert_rounded(x8 * scale[:, None], x, dtype)
    again, same = quantise(jnp.asarray(x8 * scale[:, None], jnp.float32), dtype)
    np.testing.assert_array_equal(
        np.asarray(again, np.float64) * np.asarray(same, np.float64)[:, None], x8 * scale[:, None]
    )


@dtypes
def test_what_is_not_a_number_stays_so_and_zeros_stay_zeros(dtype: Any) -> None:
    x8, scale = quantise(jnp.array([[0.0, 0.0], [1.0, np.nan], [np.inf, 1.0]]), dtype)
    assert not np.asarray(x8[0], np.float32).any()
    assert np.isfinite(np.asarray(scale, np.float32)[0])
    assert (
        not np.isfinite((np.asarray(x8, np.float32) * np.asarray(scale, np.float32)[:, None])[1:])
        .all(axis=1)
        .any()
    )


def test_what_has_scales() -> None:
    assert [
        is_quantised(name) for name in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float32")
    ] == [True, True, False, False]


@dtypes
@pytest.mark.parametrize("case", WRITTEN, ids=lambda case: case.name)
def test_a_write_stores_the_token_in_8_bits_and_its_scale(case: Write, dtype: Any) -> None:
    rows, k_pages, v_pages, page, offset = arguments(case)
    q, *wide = rope_write(rows, k_pages * 0, v_pages * 0, page, offset, backend="reference")
    before = np.full((case.num_pages, case.kv_heads, 2, case.page_size), 7, SCALE_DTYPE)
    pools = [np.full(k_pages.shape, 3, dtype)] * 2
    run = jax.jit(rope_write, static_argnames="backend")
    q8, *narrow, scales = run(rows, *pools, page, offset, scales=before, backend="reference")
    np.testing.assert_allclose(q8, q, rtol=1e-5, atol=1e-5)
    kept = np.asarray(page) < case.num_pages
    place = np.asarray(page)[kept], slice(None), np.asarray(offset)[kept]
    for side, (pool, x) in enumerate(zip(narrow, wide, strict=True)):
        _, scale = quantise(x[place], dtype)
        np.testing.assert_array_equal(np.asarray(scales)[:, :, side][place], scale)
        assert_rounded(
            np.asarray(pool, np.float32)[place] * np.asarray(scale, np.float32)[..., None],
            np.asarray(x)[place],
            dtype,
        )
        rest = np.ones((case.num_pages, case.page_size), bool)
        rest[place[0], place[2]] = False
        assert (np.moveaxis(np.asarray(pool, np.float32), 2, 1)[rest] == 3).all()
        assert (np.moveaxis(np.asarray(scales, np.float32)[:, :, side], 2, 1)[rest] == 7).all()


def test_a_donated_quantised_pool_is_written_in_place() -> None:
    rows, k_pages, v_pages, page, offset = arguments(Write(name="large", kept=8, num_pages=256))
    pools = [jax.ShapeDtypeStruct(k_pages.shape, DTYPES[0])] * 2 + [
        jax.ShapeDtypeStruct((256, 2, 2, 16), SCALE_DTYPE)
    ]
    donated = {"donate_argnums": (1, 2), "donate_argnames": ("scales",)}
    run = jax.jit(rope_write, static_argnames="backend", **donated)  # type: ignore[call-overload]
    k, v, scales = pools
    lowered = run.lower(rows, k, v, page, offset, scales=scales, backend="reference")
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.size * x.dtype.itemsize for x in pools)


@pytest.mark.parametrize(
    ("op", "case"),
    [
        pytest.param(op, case, marks=pytest.mark.slow if case.name in SIMPLE else [])
        for op, case in READS
    ],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_reference_and_fallback_read_what_8_bits_stand_for_the_first_to_the_last_bit(
    op: str, case: Any
) -> None:
    by_reference, by_fallback, wanted = read(op, case, DTYPES[case.name == "window"])
    np.testing.assert_array_equal(by_reference, wanted)
    assert relative_error(by_fallback, wanted) < 2e-5


@pytest.mark.parametrize(
    "case",
    [case for case in WRITTEN if case.head_dim != 64] + [WRITES[0]],
    ids=lambda case: case.name,
)
def test_the_interpreted_write_for_hopper_rounds_as_the_reference(case: Write) -> None:
    low = arguments(case, "bfloat16")
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, low)
    q, *full = jax.jit(rope_write, static_argnames="backend")(*wide, backend="reference")
    rows, k_pages, v_pages, page, offset = low
    pools = [jnp.zeros(k_pages.shape, DTYPES[0]) for _ in range(2)]
    scales = jnp.zeros((*k_pages.shape[:2], 2, k_pages.shape[2]), SCALE_DTYPE)
    run = functools.partial(
        jitted(mosaic_write.rope_write, "k_pages", "v_pages", "scales"),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    q8, k8, v8, scales = run(rows, *pools, page, offset, scales=scales)
    np.testing.assert_allclose(np.asarray(q8, np.float32), q, rtol=2**-8, atol=1e-6)
    kept = np.asarray(page) < case.num_pages
    place = np.asarray(page)[kept], slice(None), np.asarray(offset)[kept]
    for side, (pool, x) in enumerate(zip((k8, v8), full, strict=True)):
        scale = np.asarray(scales, np.float32)[:, :, side][place]
        np.testing.assert_array_equal(
            scale, np.asarray(quantise(x[place], DTYPES[0])[1], np.float32)
        )
        assert_rounded(
            np.asarray(pool, np.float32)[place] * scale[..., None], np.asarray(x)[place], DTYPES[0]
        )
    untouched = np.ones((case.num_pages, case.page_size), bool)
    untouched[place[0], place[2]] = False
    assert not np.moveaxis(np.asarray(k8, np.float32), 2, 1)[untouched].any()


@dtypes
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "tokens"),
    [(28, 4, 128, 3), (14, 2, 64, 3), (7, 1, 256, 2048), (32, 8, 128, 2048)],
)
def test_the_write_lowers_for_cuda_and_aliases_the_pools(
    heads: int, kv_heads: int, head_dim: int, tokens: int, dtype: Any
) -> None:
    low, angles = (
        functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, head_dim // 2), jnp.float32),
    )
    rows = HeadRows(
        low((tokens, heads + 2 * kv_heads, head_dim)),
        angles,
        angles,
        bias=None,
        norms=None,
        eps=0.0,
        queries=heads,
    )
    pool, ints = (
        jax.ShapeDtypeStruct((64, kv_heads, 64, head_dim), dtype),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    traced = jitted(mosaic_write.rope_write, "k_pages", "v_pages", "scales").trace(
        rows, pool, pool, ints, ints, scales=low((64, kv_heads, 2, 64))
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1
    assert text.count("tf.aliasing_output") == 3


def test_a_pool_may_have_more_scales_than_an_int32_counts() -> None:
    rows, k_pages, *_, page, offset = arguments(Write(name="large", kept=8))
    pages = 2**31 // (4 * k_pages.shape[2]) + 1
    pool = jax.ShapeDtypeStruct((pages, *k_pages.shape[1:]), DTYPES[0])
    scales = jax.ShapeDtypeStruct((pages, 2, 2, k_pages.shape[2]), SCALE_DTYPE)
    assert np.prod(scales.shape) > 2**31 and k_pages.shape[1] == 2
    written = jax.eval_shape(
        functools.partial(rope_write, backend="reference"),
        rows,
        pool,
        pool,
        page,
        offset,
        scales=scales,
    )
    assert written[3].shape == scales.shape
