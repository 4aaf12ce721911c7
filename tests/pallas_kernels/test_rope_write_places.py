"""Rotation and write: laws of the rotation, refusals by name, and the Hopper kernel in the
interpreter and on a card, over 16-bit and 8-bit pages."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.parts import Parts
from pallas_kernels.quantised import SCALE_DTYPE
from pallas_kernels.rope_write import (
    HeadRows,
    mosaic_gpu,
    rope_write,
    rotated,
)
from pallas_kernels.rope_write.cases import CASES, Case
from tests.pallas_kernels.places import (
    CARD,
    jitted,
    launch_options,
    pick,
    places,
    poison_outputs,
    shape_of,
    slow_places,
)
from tests.pallas_kernels.test_rope_write import arguments

ULP = {"bfloat16": 2**-8, "float16": 2**-10}
HOPPER = [case for case in CASES if case.head_dim in (64, 96, 128, 256)]
written = jax.jit(rope_write, static_argnames="backend")
turned = jax.jit(rotated)


def rows_of(qkv: np.ndarray, angle: np.ndarray, **changes: Any) -> HeadRows:
    """Rows of one query head, one key head and one value head."""
    cos, sin = (jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    given: dict[str, Any] = {"bias": None, "norms": None, "eps": 1e-6, "queries": 1}
    return HeadRows(jnp.asarray(qkv, jnp.float32), cos, sin, **given | changes)


def random_rows(seed: int, tokens: int = 4, dim: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((tokens, 3, dim)), rng.uniform(-9, 9, (tokens, dim // 2))


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_rotation_keeps_norms_and_leaves_values_alone(seed: int) -> None:
    qkv, angle = random_rows(seed)
    q, k, v = turned(rows_of(qkv, angle))
    for got, before in ((q, qkv[:, :1]), (k, qkv[:, 1:2])):
        np.testing.assert_allclose(
            np.linalg.norm(got, axis=-1), np.linalg.norm(before, axis=-1), rtol=1e-5
        )
    np.testing.assert_array_equal(v, qkv[:, 2:].astype(np.float32))


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), shift=st.floats(-5, 5))
def test_scores_depend_on_the_difference_of_angles_alone(seed: int, shift: float) -> None:
    qkv, angle = random_rows(seed, tokens=2)
    here, there = (turned(rows_of(qkv, angle + by)) for by in (0.0, shift))
    scores = [float(q[0, 0] @ k[1, 0]) for q, k, _ in (here, there)]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-4)


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_a_rotation_and_its_opposite_cancel(seed: int) -> None:
    qkv, angle = random_rows(seed)
    q, k, v = turned(rows_of(qkv, angle))
    back = turned(rows_of(np.concatenate([q, k, v], axis=1), -angle))
    np.testing.assert_allclose(np.concatenate(back, axis=1), qkv, atol=1e-5)


def test_an_angle_of_zero_turns_nothing_and_a_right_angle_swaps_halves() -> None:
    qkv, angle = random_rows(1)
    q, _, _ = turned(rows_of(qkv, angle * 0))
    np.testing.assert_array_equal(q[:, 0], qkv[:, 0].astype(np.float32))
    q, _, _ = turned(rows_of(qkv, np.full_like(angle, np.pi / 2)))
    np.testing.assert_allclose(q[:, 0, :4], -qkv[:, 0, 4:], atol=1e-6)
    np.testing.assert_allclose(q[:, 0, 4:], qkv[:, 0, :4], atol=1e-6)


@pytest.mark.parametrize("factor", [0.001, 7.0, 1000.0])
def test_normed_heads_do_not_depend_on_their_size(factor: float) -> None:
    qkv, angle = random_rows(2)
    norms = (jnp.ones((8,)), jnp.full((8,), 2.0))
    small, large = (turned(rows_of(x, angle, norms=norms, eps=0.0)) for x in (qkv, qkv * factor))
    for i in range(2):
        np.testing.assert_allclose(small[i], large[i], rtol=1e-4)
    np.testing.assert_allclose((np.asarray(small[0]) ** 2).mean(axis=-1), 1.0, rtol=1e-5)
    np.testing.assert_allclose((np.asarray(small[1]) ** 2).mean(axis=-1), 4.0, rtol=1e-5)


def test_shards_one_after_another_are_rotated_as_if_alone() -> None:
    qkv, angle = random_rows(3)
    both = np.stack([qkv, qkv * 2], axis=1)
    found = turned(rows_of(both, angle))
    for shard, factor in enumerate((1, 2)):
        alone = turned(rows_of(qkv * factor, angle))
        for x, y in zip(found, alone, strict=True):
            np.testing.assert_array_equal(x[:, shard], y)


def error_of(dtype: str, got: Any, wanted: Any) -> None:
    for x, y in zip(got, wanted, strict=True):
        assert x.dtype == dtype
        np.testing.assert_allclose(np.asarray(x, np.float32), y, rtol=2 * ULP[dtype], atol=1e-6)


@places
@pytest.mark.parametrize("dtype", ULP)
def test_the_kernel_writes_what_the_reference_writes(place: str, dtype: str) -> None:
    small = [Case(name="small", kept=2, dropped=1, norm=True, bias=True)]
    for case in pick(place, small, HOPPER):
        low = arguments(case, dtype)
        wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == dtype else x, low)
        wanted = written(*wide, backend="reference")
        poison_outputs(place, shape_of(wanted[0]))
        error_of(
            dtype,
            jitted(mosaic_gpu.rope_write, "k_pages", "v_pages", "scales")(
                *low, **launch_options(place)
            ),
            wanted,
        )


@slow_places
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_the_kernel_writes_8_bit_pages_and_scales(place: str, kv_dtype: str) -> None:
    small = [Case(name="small", kept=2, dropped=1, norm=True)]
    for case in pick(place, small, HOPPER):
        rows, k, v, page, offset = arguments(case, "bfloat16")
        pools = [jnp.zeros(x.shape, kv_dtype) for x in (k, v)]
        scales = jnp.ones((*k.shape[:2], 2, k.shape[2]), SCALE_DTYPE)
        wanted = written(rows, *pools, page, offset, scales=scales, backend="reference")
        given = [jnp.array(x) for x in pools]
        options = launch_options(place) | {"scales": jnp.array(scales)}
        got = jitted(mosaic_gpu.rope_write, "k_pages", "v_pages", "scales")(
            rows, *given, page, offset, **options
        )
        for side in (1, 2):
            # Sums of a norm in another order may move a number by one step of the 8-bit type
            x, y = (np.asarray(out[side], np.float32) for out in (got, wanted))
            np.testing.assert_allclose(x, y, rtol=0.26, atol=2**-9)
            assert (x != y).mean() < 0.02
        np.testing.assert_array_equal(got[3], wanted[3])


@places
@pytest.mark.parametrize(
    "scaled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["shares", "scales"]
)
def test_parts_of_the_projection_are_added_to_the_bits_of_their_sum(
    place: str, scaled: bool
) -> None:
    large = {"kept": 600, "num_pages": 40, "heads": 14}
    sizes = pick(place, {"kept": 1, "dropped": 1, "num_pages": 2}, large)
    case = Case(name="parts", bias=True, head_dim=128, **sizes)
    rows, *places_of = arguments(case, "bfloat16")
    (T, C, H), rng, shares = (
        rows.qkv.shape,
        np.random.default_rng(0),
        1 if scaled else pick(place, 2, 7),
    )
    # Rows and columns that no product has follow it
    shape = shares, T + 5, C * H + (0 if scaled else 256)
    sums = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16 if scaled else jnp.float32)
    scales = tuple(jnp.asarray(rng.uniform(0.1, 2, n), jnp.float32) for n in (T + 5, C * H))
    parts = Parts(sums, scales if scaled else (), (T, C, H), jnp.dtype(jnp.bfloat16))
    run = jitted(mosaic_gpu.rope_write, "k_pages", "v_pages", "scales")
    found, wanted = (
        run(dataclasses.replace(rows, qkv=qkv), *map(jnp.array, places_of), **launch_options(place))
        for qkv in (parts, parts.whole)
    )
    for name, one, two in zip(("queries", "keys", "values"), found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two), err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 512, 513, 2048])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [
        *((heads, K, 128) for heads, K in ((28, 4), (32, 8), (14, 2), (7, 1), (12, 12))),
        *((heads, K, 96) for heads, K in ((32, 32), (7, 1), (14, 2), (12, 4))),
    ],
)
def test_on_the_card_all_tiles_of_heads_are_right(
    tokens: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    case = Case(
        name="tiles",
        kept=tokens,
        dropped=3,
        num_pages=-(-tokens // 16) + 2,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm=True,
        bias=True,
    )
    low = arguments(case, "bfloat16")
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, low)
    wanted = written(*wide, backend="reference")
    poison_outputs(CARD, shape_of(low[0].qkv))
    error_of(
        "bfloat16", jitted(mosaic_gpu.rope_write, "k_pages", "v_pages", "scales")(*low), wanted
    )


@pytest.mark.gpu
def test_on_the_card_places_beyond_two_billion_elements_are_written() -> None:
    pages, size, dim = 9000, 128, 256
    pool = jnp.zeros((pages, 8, size, dim), jnp.bfloat16)
    assert pool.size > 2**31
    qkv = jnp.ones((1, 24, dim), jnp.bfloat16)
    angle = jnp.zeros((1, dim // 2), jnp.float32)
    rows = HeadRows(qkv, angle + 1, angle, bias=None, norms=None, eps=0.0, queries=8)
    at = jnp.array([pages - 1], jnp.int32), jnp.array([size - 1], jnp.int32)
    _, k, v = jitted(mosaic_gpu.rope_write, "k_pages", "v_pages", "scales")(
        rows, pool, jnp.copy(pool), *at
    )
    for x in (k, v):
        np.testing.assert_array_equal(np.asarray(x[-1, :, -1], np.float32), 1.0)
        assert float(x[-1].astype(jnp.float32).sum()) == 8 * dim
        assert not bool(x[:-1].any())


@pytest.mark.parametrize("tokens", [1, 512, 513])
@pytest.mark.parametrize("heads", [1, 2, 3, 7, 8, 12, 14, 28, 32, 40, 64])
def test_tiles_of_heads_divide_the_heads_and_stay_small(heads: int, tokens: int) -> None:
    found = mosaic_gpu.tile_of(heads, tokens)
    most = mosaic_gpu.SMALL_TILE if tokens <= mosaic_gpu.FEW_TOKENS else mosaic_gpu.LARGE_TILE
    assert heads % found == 0 and 1 <= found <= most


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": "float32"}, "bfloat16 or float16 throughout.*got float32"),
        ({"v": "float16"}, "got bfloat16, bfloat16, float16"),
        ({"k": "float32", "v": "float32"}, "got bfloat16, float32, float32"),
        ({"dim": 80}, "head_dim 64, 96, 128 or 256"),
        ({"dim": 96, "k": "float8_e4m3fn", "v": "float8_e4m3fn"}, "head_dim 64, 128 or 256"),
        ({"pool_dim": 128}, "head_dim 64, 96, 128 or 256"),
        ({"pool_heads": 3}, "pools of 2 heads"),
        ({"v_pages": 8}, "pools of 2 heads"),
    ],
)
def test_each_refusal_names_what_was_given(change: dict[str, Any], message: str) -> None:
    dim = change.get("dim", 64)
    pool = (change.get("pool_heads", 2), 16, change.get("pool_dim", dim))
    low = functools.partial(jax.ShapeDtypeStruct)
    angle = low((3, dim // 2), jnp.float32)
    qkv = low((3, 8, dim), jnp.dtype(change.get("qkv", "bfloat16")))
    rows = HeadRows(qkv, angle, angle, bias=None, norms=None, eps=0.0, queries=4)  # type: ignore[arg-type]
    k = low((7, *pool), jnp.dtype(change.get("k", "bfloat16")))
    v = low((change.get("v_pages", 7), *pool), jnp.dtype(change.get("v", "bfloat16")))
    with pytest.raises(ValueError, match=message):
        mosaic_gpu.check(rows, k, v)
