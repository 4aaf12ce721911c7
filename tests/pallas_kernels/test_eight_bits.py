"""Every value of the 8-bit types, their scales, and rounding, against NumPy's float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.quantised import (
    DTYPES,
    SCALE_DTYPE,
    clipped,
    inverse_of,
    quantise,
    scale_of,
)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
jitted = jax.jit(quantise, static_argnums=1)
scale = jax.jit(scale_of, static_argnums=1)
LIMITS = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
TOP_EXPONENT = {"float8_e4m3fn": 8, "float8_e5m2": 15}


def finite_values(dtype: Any) -> np.ndarray:
    """All finite values of an 8-bit type in ascending order, float32; both zeros."""
    every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    return np.sort(every[np.isfinite(every)])


def quantised_beside_the_limit(x: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Each value in a head of its own beside the type's largest, so that its scale is 1."""
    heads = np.stack([x, np.full_like(x, LIMITS[str(dtype)])], axis=1)
    values, scales = jitted(heads, dtype)
    return np.asarray(values)[:, 0], np.asarray(scales, np.float32)


@dtypes
def test_the_types_have_the_values_that_the_tests_assume(dtype: Any) -> None:
    values = finite_values(dtype)
    assert values[-1] == LIMITS[str(dtype)] == float(ml_dtypes.finfo(dtype).max)
    assert len(values) == {"float8_e4m3fn": 254, "float8_e5m2": 248}[str(dtype)]


@dtypes
def test_every_value_of_the_type_comes_back_to_the_bit(dtype: Any) -> None:
    values = finite_values(dtype)
    found, scales = quantised_beside_the_limit(values, dtype)
    assert (scales == 1).all()
    np.testing.assert_array_equal(found.view(np.uint8), values.astype(dtype).view(np.uint8))


@dtypes
@pytest.mark.parametrize("exponent", [-60, -9, -1, 1, 20, 100])
def test_every_value_times_a_power_of_two_comes_back_to_the_bit(dtype: Any, exponent: int) -> None:
    values = finite_values(dtype)
    factor = np.float32(2.0**exponent)
    heads = np.stack([values, np.full_like(values, LIMITS[str(dtype)])], axis=1) * factor
    found, scales = jitted(heads, dtype)
    assert (np.asarray(scales, np.float32) == factor).all()
    np.testing.assert_array_equal(np.asarray(found)[:, 0].astype(np.float32), values)


@dtypes
def test_halfway_between_neighbours_rounds_to_the_even_one(dtype: Any) -> None:
    values = finite_values(dtype)
    values = values[np.diff(values, prepend=-np.inf) > 0]
    halfway = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
    found, _ = quantised_beside_the_limit(halfway, dtype)
    assert (found.view(np.uint8) % 2 == 0).all(), "the last bit of an even value is 0"
    got = found.astype(np.float32)
    assert ((got == values[:-1]) | (got == values[1:])).all()


@dtypes
def test_what_lies_off_the_middle_rounds_to_the_nearer_neighbour(dtype: Any) -> None:
    values = finite_values(dtype)
    values = values[np.diff(values, prepend=-np.inf) > 0].astype(np.float64)
    for share, side in ((0.49, 0), (0.51, 1)):
        x = values[:-1] + share * np.diff(values)
        found, _ = quantised_beside_the_limit(x.astype(np.float32), dtype)
        np.testing.assert_array_equal(found.astype(np.float64), values[side : side - 1 or None])


@dtypes
def test_a_scale_doubles_just_beyond_what_fits(dtype: Any) -> None:
    exponents = np.arange(-60, 61)
    largest = (LIMITS[str(dtype)] * 2.0**exponents).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(scale(largest, dtype)), 2.0**exponents)
    beyond = np.nextafter(largest, np.float32(np.inf))
    np.testing.assert_array_equal(np.asarray(scale(beyond, dtype)), 2.0 ** (exponents + 1))


@dtypes
@pytest.mark.parametrize("largest", [0.0, 1e-45, 2.0**-100, 2.0**-64])
def test_tiny_heads_share_the_smallest_scale(dtype: Any, largest: float) -> None:
    assert float(scale(np.float32(largest), dtype)) == 2.0**-64


@dtypes
def test_the_largest_float_has_a_scale_that_keeps_it_finite(dtype: Any) -> None:
    head = np.array([[np.finfo(np.float32).max, 1.0]], np.float32)
    values, scales = jitted(head, dtype)
    product = np.asarray(values, np.float64)[0, 0] * np.asarray(scales, np.float64)[0]
    assert np.isfinite(product)
    assert abs(product / float(np.finfo(np.float32).max) - 1) <= 2.0**-3


def test_the_inverse_of_a_power_of_two_is_exact() -> None:
    powers = np.exp2(np.arange(-64, 65)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(jax.jit(inverse_of)(powers)) * powers, 1)


@dtypes
def test_scales_are_exact_in_the_type_that_stores_them(dtype: Any) -> None:
    heads = np.random.default_rng(0).standard_normal((500, 4)).astype(np.float32)
    heads *= np.exp2(np.random.default_rng(1).integers(-50, 50, (500, 1))).astype(np.float32)
    scales = np.asarray(jitted(heads, dtype)[1])
    assert scales.dtype == SCALE_DTYPE
    np.testing.assert_array_equal(
        scales.astype(np.float32), np.asarray(scale(np.abs(heads).max(axis=1), dtype))
    )


@dtypes
def test_numbers_out_of_range_are_clipped_and_nan_stays(dtype: Any) -> None:
    limit = np.float32(LIMITS[str(dtype)])
    x = np.array([limit, -limit, 2 * limit, -np.inf, np.inf, 0.5, np.nan], np.float32)
    got = np.asarray(clipped(jnp.asarray(x), dtype))
    np.testing.assert_array_equal(got[:-1], [limit, -limit, limit, -limit, limit, 0.5])
    assert np.isnan(got[-1])


@dtypes
def test_a_given_scale_that_is_too_small_saturates(dtype: Any) -> None:
    limit = LIMITS[str(dtype)]
    x = np.array([[[3.0, -5.0], [3.0, -5.0]]], np.float32) * np.float32(limit)
    values, scales = quantise(jnp.asarray(x), dtype, jnp.array([1.0, 8.0], SCALE_DTYPE))
    got = np.asarray(values, np.float32)
    np.testing.assert_array_equal(got[0, 0], [limit, -limit])
    np.testing.assert_allclose(got[0, 1] * 8, x[0, 1], rtol=2.0**-3)
    np.testing.assert_array_equal(np.asarray(scales, np.float32), [[1.0, 8.0]])


@dtypes
@given(seed=st.integers(0, 2**31), exponent=st.integers(-6, 6))
@settings(max_examples=30)
def test_given_scales_round_as_a_division_would(dtype: Any, seed: int, exponent: int) -> None:
    rng = np.random.default_rng(seed)
    given_scales = np.exp2(rng.integers(-2, 3, 3) + exponent).astype(np.float32)
    x = rng.standard_normal((2, 3, 8)).astype(np.float32) * np.float32(2.0**exponent)
    values, scales = quantise(jnp.asarray(x), dtype, jnp.asarray(given_scales, SCALE_DTYPE))
    np.testing.assert_array_equal(
        np.asarray(values).view(np.uint8), (x / given_scales[:, None]).astype(dtype).view(np.uint8)
    )
    assert scales.shape == (2, 3)


@dtypes
@given(seed=st.integers(0, 2**31))
@settings(max_examples=30)
def test_a_head_is_quantised_alike_alone_and_among_others(dtype: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads = (rng.standard_normal((5, 16)) * 10.0 ** rng.integers(-5, 6, (5, 1))).astype(np.float32)
    values, scales = jitted(heads, dtype)
    order = rng.permutation(5)
    again, same = jitted(heads[order], dtype)
    np.testing.assert_array_equal(
        np.asarray(values)[order].view(np.uint8), np.asarray(again).view(np.uint8)
    )
    np.testing.assert_array_equal(np.asarray(scales)[order], np.asarray(same))
