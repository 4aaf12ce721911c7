"""Ordered images, counts in one number, the search and Threefry: the parts of the draw's kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.draw.bits import (
    counts_of,
    exponential,
    float_bits,
    float_of,
    int_bits,
    ordered,
    reach,
    search,
    threefry,
    uniform,
)

LARGEST = float(np.finfo(np.float32).max)
floats = st.floats(-LARGEST, LARGEST, width=32)
images = jax.jit(ordered)
numbers = jax.jit(float_of)


@given(x=st.lists(floats, min_size=8, max_size=8))
@settings(max_examples=80)
def test_images_compare_as_their_floats_do(x: list[float]) -> None:
    values = np.array(x, np.float32)
    found = np.asarray(images(values))
    for i in range(8):
        for j in range(8):
            if values[i] < values[j]:
                assert found[i] < found[j]
    np.testing.assert_array_equal(np.asarray(numbers(found)).view(np.int32), values.view(np.int32))


def test_every_bit_pattern_leads_back() -> None:
    bits = np.random.default_rng(0).integers(-(2**31), 2**31, 4096).astype(np.int32)
    np.testing.assert_array_equal(np.asarray(images(numbers(bits))), bits)
    np.testing.assert_array_equal(np.asarray(int_bits(float_bits(bits))), bits)


@given(
    x=st.lists(st.integers(-5, 5), min_size=1, max_size=40),
    s=st.integers(-6, 6),
    t=st.integers(-6, 6),
)
def test_one_sum_holds_two_counts(x: list[int], s: int, t: int) -> None:
    values = np.array(x, np.int32)
    total = jnp.sum(reach(jnp.asarray(values), jnp.int32(s), jnp.int32(t)))
    low, high = counts_of(total)
    assert (int(low), int(high)) == ((values >= s).sum(), (values >= t).sum())


def test_counts_hold_up_to_two_to_the_fifteenth_less_one() -> None:
    total = jnp.sum(reach(jnp.zeros(2**15 - 1, jnp.int32), jnp.int32(0), jnp.int32(0)))
    assert [int(x) for x in counts_of(total)] == [2**15 - 1] * 2


@given(x=st.lists(floats, min_size=30, max_size=30), k=st.integers(1, 30), ties=st.integers(0, 5))
@settings(max_examples=60)
def test_the_search_finds_the_kth_of_any_floats(x: list[float], k: int, ties: int) -> None:
    values = np.array(x, np.float32)
    values[: ties + 1] = values[0]
    found = np.sort(np.asarray(images(values)))
    threshold = int(jitted_search(k, found[0], found[-1], found))
    assert (found >= threshold).sum() == (found >= found[-k]).sum()


jitted_search = jax.jit(
    lambda k, low, high, values: search(
        k, low, high, lambda *ts: tuple(jnp.sum(values >= t, dtype=jnp.int32) for t in ts)
    )
)


def test_the_search_gives_the_lower_bound_where_too_few_reach_it() -> None:
    values = np.arange(10, dtype=np.int32)
    assert int(jitted_search(11, 3, 9, values)) == 3


@pytest.mark.parametrize("changed", range(4))
def test_one_bit_of_key_or_counter_changes_half_of_threefrys_bits(changed: int) -> None:
    given_words = np.random.default_rng(0).integers(-(2**31), 2**31, (4, 512)).astype(np.int32)
    other = given_words.copy()
    other[changed] ^= np.int32(1) << (np.arange(512) % 31).astype(np.int32)
    first, second = (
        np.stack([np.asarray(x) for x in threefry((w[0], w[1]), w[2], w[3])])
        for w in (jnp.asarray(given_words), jnp.asarray(other))
    )
    flipped = np.unpackbits((first ^ second).view(np.uint8)).mean()
    assert abs(flipped - 0.5) < 0.01


@pytest.mark.parametrize("vary", ["key", "counter"])
def test_threefrys_numbers_are_uniform_along_a_counter_and_over_keys(vary: str) -> None:
    count = jnp.arange(20_000, dtype=jnp.int32)
    zero = jnp.zeros_like(count)
    key, counter = ((count, zero), zero) if vary == "key" else ((zero, zero), count)
    for bits in threefry(key, counter, zero):
        x = np.sort(np.asarray(uniform(bits), np.float64))
        distance = np.abs(x - np.arange(1, len(x) + 1) / len(x)).max()
        assert distance < 2.2 / len(x) ** 0.5  # Kolmogorov–Smirnov, one sample in ten thousand


def test_the_smallest_uniforms_and_exponentials_are_resolved() -> None:
    bits = jnp.arange(1000, dtype=jnp.int32)
    for x in (np.asarray(uniform(bits)), np.asarray(exponential(bits))):
        assert (np.diff(x) > 0).all() and 0 < x[0] < 1e-9


def test_an_exponential_is_minus_the_logarithm_of_the_rest() -> None:
    bits = np.random.default_rng(1).integers(0, 2**31, 20_000).astype(np.int32)
    u = np.asarray(uniform(bits), np.float64)
    np.testing.assert_allclose(np.asarray(exponential(bits)), -np.log1p(-u), rtol=3e-4)
