"""Draws: every back end draws what the options allow, by their softmax, from its own row alone; the
Hopper one interpreted and lowered."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backends import UnknownBackend
from pallas_kernels.draw import BROKEN, DrawRows, choose, draw, mosaic_gpu
from pallas_kernels.draw.bits import exponential, float_of, ordered, search, threefry, uniform
from pallas_kernels.draw.cases import (
    LOGITS,
    OPTIONS,
    ROUNDING,
    Options,
    logits,
    possible,
    probabilities,
    rows_of,
)
from pallas_kernels.target import PORTABLE
from tests.chi_square import chi_square, limit, pooled
from tests.pallas_kernels.places import jitted
from tests.targets import H200

# With the small tuning: slots of 256, five chunks a warpgroup, the last partly beyond the row
V = 1152
SMALL = mosaic_gpu.Tuning(groups=2, lines=1, stages=2)
THREE = SMALL._replace(groups=3)  # a warpgroup for each candidate that the real sizes draw
reference = jax.jit(functools.partial(draw, backend="reference"))
jitted_search = jax.jit(
    lambda k, low, high, values, first: search(
        k, low, high, lambda *ts: tuple(jnp.sum(values >= t, dtype=jnp.int32) for t in ts), first
    ),
    static_argnums=4,
)


def interpreted(
    logits_BV: np.ndarray, rows: DrawRows, races: bool = True, tuning: mosaic_gpu.Tuning = SMALL
) -> np.ndarray:
    params = plgpu.InterpretGPUParams(detect_races=races)
    return np.asarray(
        jitted(mosaic_gpu.draw)(
            jnp.asarray(logits_BV), jax.tree.map(jnp.asarray, rows), tuning=tuning, interpret=params
        )
    )


BACKENDS = {"reference": lambda x, rows: np.asarray(reference(x, rows)), "mosaic_gpu": interpreted}


def assert_possible(tokens: np.ndarray, logits_BV: np.ndarray, options: list[Options]) -> None:
    for row, (token, one) in enumerate(zip(tokens, options, strict=True)):
        assert 0 <= token < logits_BV.shape[1], (row, token, one)
        exact = possible(logits_BV[row], one)
        if one.temperature == 0:
            assert exact[token], (row, token, one)
        else:
            assert (exact | possible(logits_BV[row], one, ROUNDING))[token], (row, token, one)


@pytest.mark.parametrize("kind", LOGITS)
def test_a_row_draws_what_its_options_allow(kind: str) -> None:
    options = list(OPTIONS.values())
    given = logits(kind, len(options), V)
    for seed in range(20):
        assert_possible(np.asarray(reference(given, rows_of(options, given, seed))), given, options)


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind == "clustered" else pytest.param(kind, marks=pytest.mark.slow)
        for kind in LOGITS
    ],
)
@pytest.mark.slow
def test_an_interpreted_row_draws_what_its_options_allow(kind: str) -> None:
    options = list(OPTIONS.values())
    given = logits(kind, len(options), V)
    assert_possible(interpreted(given, rows_of(options, given)), given, options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.slow
def test_a_draw_depends_on_its_own_row_alone_and_repeats(backend: str) -> None:
    options = [
        OPTIONS[name] for name in ("plain", "top_p", "two filters", "banned", "greedy", "min_p")
    ]
    given = logits("spread", len(options), V, seed=1)
    rows = rows_of(options, given)
    together = BACKENDS[backend](given, rows)
    assert_possible(together, given, options)
    for some in ([3, 2, 0, 5, 4, 1], [2, 1]):
        np.testing.assert_array_equal(
            BACKENDS[backend](given[some], jax.tree.map(lambda x, i=some: x[i], rows)),
            together[some],
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_without_a_finite_maximum_is_reported_and_disturbs_nobody(backend: str) -> None:
    options = [
        OPTIONS[name]
        for name in (
            "plain",
            "greedy",
            "top_p",
            "two filters",
            "plain",
            "greedy",
            "min_p",
            "banned",
        )
    ]
    given = logits("flat", 8, V)
    given[0, V - 1], given[1, 0], given[2], given[3, 5] = np.nan, np.nan, -np.inf, np.inf
    given[4, :-1], given[5, :-7], given[6, 1:] = -np.inf, -np.inf, -np.inf
    given[7, 1:] = -np.inf  # and the one that is left is banned
    tokens = BACKENDS[backend](given, rows_of(options, given)).tolist()
    assert tokens == [BROKEN] * 4 + [V - 1, V - 7 + int(given[5, -7:].argmax()), 0, BROKEN]


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_equal_logits_greedy_takes_the_first(backend: str) -> None:
    given = np.zeros((4, V), np.float32)
    given[1, [700, 300, 1000]] = 1
    given[2, V - 1] = 1
    given[3, :128] = -1
    rows = dataclasses.replace(
        rows_of([Options(temperature=0.0)] * 4, given), banned_BK=np.full((4, 2), -1, np.int32)
    )
    assert BACKENDS[backend](given, rows).tolist() == [0, 300, V - 1, 128]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_banned_token_is_impossible(backend: str) -> None:
    given = np.full((4, V), -50, np.float32)
    given[:, [3, 500, 1100]] = [9, 8, 7]
    rows = rows_of([Options(temperature=t) for t in (0.0, 0.0, 1.0, 1.0)], given)
    rows = dataclasses.replace(
        rows, banned_BK=np.array([[3, -1, -1], [-1, 500, 3], [-1, -1, 3], [500, 3, -1]], np.int32)
    )
    tokens = BACKENDS[backend](given, rows)
    assert tokens[[0, 1, 3]].tolist() == [500, 1100, 1100]
    assert tokens[2] in (500, 1100)


@pytest.mark.slow
def test_the_last_token_of_a_cluster_counts_in_every_filter() -> None:
    """Five likely tokens share a slot, so the three that are kept of it do not tell how many or how
    likely they are."""
    given = np.full((6, V), -20, np.float32)
    given[:, 5::256] = [3.0, 3.1, 3.2, 3.3, 3.4]
    options = [Options(top_k=k) for k in (4, 5)] + [
        Options(top_p=0.75),
        Options(top_p=0.9),
        Options(min_p=0.7),
        Options(top_k=4, top_p=0.6),
    ]
    drawn = [interpreted(given, rows_of(options, given, seed), races=False) for seed in range(12)]
    for tokens in drawn:
        assert_possible(tokens, given, options)
    assert {len({int(tokens[row]) for tokens in drawn}) > 1 for row in range(6)} == {True}


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    kinds=st.lists(st.sampled_from(LOGITS), min_size=8, max_size=8),
    options=st.lists(
        st.builds(
            Options,
            temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
            top_k=st.sampled_from([-1, 0, 1, 2, 7, 60, 300, V - 1, V, V + 1, 2**31 - 1]),
            top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
            min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5]),
            best_banned=st.booleans(),
        ),
        min_size=8,
        max_size=8,
    ),
    seed=st.integers(0, 2**20),
)
def test_any_row_of_any_options_draws_what_they_allow(
    kinds: list[str], options: list[Options], seed: int
) -> None:
    given = np.concatenate([logits(kind, 1, V, seed + i) for i, kind in enumerate(kinds)])
    rows = rows_of(options, given, seed)
    assert_possible(interpreted(given, rows), given, options)
    assert_possible(np.asarray(reference(given, rows)), given, options)


@pytest.mark.slow
def test_interpreted_draws_follow_the_exact_distribution() -> None:
    # None of three candidates may stay in one draw of five
    often_again = Options(temperature=2.0, top_p=0.4)
    options = [*(OPTIONS[name] for name in ("plain", "top_p", "two filters", "min_p")), often_again]
    times, vocabulary = 160, 640
    one_row = logits("head", 1, vocabulary)
    given = np.repeat(one_row, times * len(options), axis=0)
    rows = rows_of([one for one in options for _ in range(times)], given)
    tokens = interpreted(given, rows, races=False, tuning=THREE).reshape(len(options), times)
    for drawn, one in zip(tokens, options, strict=True):
        statistic, freedom = chi_square(*pooled(drawn, probabilities(one_row[0], one)))
        assert statistic < limit(freedom), one


@pytest.mark.slow
def test_the_real_tuning_draws_what_the_options_allow_when_interpreted() -> None:
    options = [OPTIONS[name] for name in ("plain", "two filters", "top_p", "banned")]
    given = logits("head", 4, 8192 + 128)
    assert_possible(
        interpreted(given, rows_of(options, given), tuning=mosaic_gpu.Tuning()), given, options
    )


@pytest.mark.parametrize(
    ("batch", "vocabulary"),
    [
        (1, 152064),
        *(
            pytest.param(b, v, marks=pytest.mark.slow)
            for b in (16, 64, 256, 320)
            for v in (128256, 151936, 152064)
        ),
    ],
)
def test_the_kernel_lowers_for_cuda_as_one_launch(batch: int, vocabulary: int) -> None:
    shape = functools.partial(jax.ShapeDtypeStruct, (batch,))
    pairs, banned = (
        jax.ShapeDtypeStruct((batch, 2), jnp.uint32),
        jax.ShapeDtypeStruct((batch, 4), jnp.int32),
    )
    rows = DrawRows(
        shape(jnp.float32), shape(jnp.int32), shape(jnp.float32), shape(jnp.float32), pairs, banned
    )
    logits_BV = jax.ShapeDtypeStruct((batch, vocabulary), jnp.float32)
    assert mosaic_gpu.check(logits_BV) is None
    assert (
        jitted(mosaic_gpu.draw)
        .trace(logits_BV, rows)
        .lower(lowering_platforms=("cuda",))
        .as_text()
        .count("mosaic_gpu_v2")
        == 1
    )


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "message"),
    [
        (1152, "bfloat16", "float32"),
        (1100, "float32", "multiple of 128"),
        (896, "float32", "at least 1024"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_and_left_to_the_reference(
    vocabulary: int, dtype: str, message: str
) -> None:
    given = jnp.zeros((1, vocabulary), dtype)
    rows = jax.tree.map(jnp.asarray, rows_of([Options()], np.zeros((1, vocabulary), np.float32)))
    with pytest.raises(ValueError, match=message):
        draw(given, rows, backend="mosaic_gpu")
    assert choose(H200, given) == "reference"


def test_the_kernel_is_chosen_where_it_is_wanted_and_takes_the_logits() -> None:
    assert choose(H200, jnp.zeros((1, 1024))) == "mosaic_gpu"
    assert choose(PORTABLE, jnp.zeros((1, 1024))) == "reference"


def test_an_unknown_back_end_is_named_with_those_that_exist() -> None:
    given = np.zeros((1, 8), np.float32)
    with pytest.raises(
        UnknownBackend, match=r"draw has no back end 'cuda'; choose one of: reference, mosaic_gpu"
    ):
        draw(jnp.asarray(given), rows_of([Options()], given), backend="cuda")


def test_images_of_floats_are_in_their_order_and_lead_back() -> None:
    floats = np.array(
        [-np.inf, -3e38, -1.5, -1e-45, -0.0, 0.0, 1e-45, 2.0, 3e38, np.inf], np.float32
    )
    images = np.asarray(ordered(floats))
    assert (np.diff(images) > 0).all()
    np.testing.assert_array_equal(
        np.asarray(float_of(images)).view(np.int32), floats.view(np.int32)
    )


def test_random_bits_are_those_of_threefry() -> None:
    key = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
    pair = np.array([[7, 0], [4000, 3]], np.uint32)
    wanted = [jax.extend.random.threefry_2x32(key, one) for one in pair]
    got = threefry(tuple(jnp.asarray(key.view(np.int32))), *jnp.asarray(pair.view(np.int32).T))
    np.testing.assert_array_equal(np.stack(got, axis=1).view(np.uint32), np.stack(wanted))


def test_random_numbers_stay_inside_their_range_and_have_the_right_mean() -> None:
    ends = np.array([0, 2**31 - 1, -1, -(2**31)], np.int32)
    assert ((np.asarray(uniform(ends)) > 0) & (np.asarray(uniform(ends)) < 1)).all()
    assert ((np.asarray(exponential(ends)) > 0) & np.isfinite(np.asarray(exponential(ends)))).all()
    many = np.random.default_rng(0).integers(-(2**31), 2**31, 200_000).astype(np.int32)
    assert abs(float(exponential(many).mean()) - 1) < 0.01
    assert abs(float(exponential(many).std()) - 1) < 0.02


@pytest.mark.parametrize("k", [1, 2, 5, 10, 19, 40])
@pytest.mark.parametrize("largest", [3.4e38, 1e-44, 7.0])
def test_the_search_finds_a_threshold_that_exactly_k_reach_or_the_kth_among_equals(
    k: int, largest: float
) -> None:
    bits = np.random.default_rng(k).integers(-(2**31), 2**31, 400).astype(np.int32)
    every = np.concatenate(
        [
            bits.view(np.float32),
            np.repeat(np.float32([0.5, -0.0, 0, 1, 3]), 9),
            np.float32([largest]),
        ]
    )
    values = np.sort(
        np.asarray(ordered(every[np.isfinite(every) & (every <= np.float32(largest))]))
    )[::-1].copy()
    for low in (values[-1], values[k - 1] - 5, values[k - 1]):
        for low_first in (False, True):
            found = int(jitted_search(k, low, values[0], values, low_first))
            assert (values >= found).sum() == (values >= values[k - 1]).sum()
