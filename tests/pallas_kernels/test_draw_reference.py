"""The draw's reference: filters against a sort in float64, the exact distribution, and rows that
are broken, tied or have one token left."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.draw import BROKEN, DrawRows, draw
from pallas_kernels.draw.cases import (
    LOGITS,
    ROUNDING,
    Options,
    logits,
    possible,
    probabilities,
    rows_of,
)
from pallas_kernels.draw.reference import apply_filters, gumbel
from tests.chi_square import chi_square, limit, pooled

V, B = 48, 6
reference = jax.jit(functools.partial(draw, backend="reference"), static_argnames="filters")
jitted_filters = jax.jit(apply_filters)
any_options = st.builds(
    Options,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, V - 1, V, V + 1, 2**31 - 1]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
)


def allowed(logits_V: np.ndarray, options: Options) -> np.ndarray:
    """Tokens that min_p, then top_k, then top_p keep, by the definition: sort, cut, and keep ties.

    A second oracle, independent of `cases.possible`.
    """
    scaled = logits_V.astype(np.float64) / np.float64(np.float32(options.temperature))
    weight = np.exp(scaled - scaled.max())
    keep = weight >= np.float64(np.float32(options.min_p))
    keep &= np.isfinite(scaled)
    order = sorted(np.flatnonzero(keep), key=lambda token: -scaled[token])
    if 0 < options.top_k < len(order):
        smallest = scaled[order[options.top_k - 1]]
        order = [token for token in order if scaled[token] >= smallest]
    if options.top_p < 1:
        wanted = np.float64(np.float32(options.top_p)) * weight[order].sum()
        mass, last = 0.0, scaled[order[0]]
        for token in order:
            if mass >= wanted:
                break
            mass, last = mass + weight[token], scaled[token]
        order = [token for token in order if scaled[token] >= last]
    out = np.zeros(len(logits_V), bool)
    out[order] = True
    return out


def kept_by_the_filters(logits_BV: np.ndarray, options: list[Options]) -> np.ndarray:
    """The tokens that `filtered` leaves, a mask `[B, V]`."""
    temperature = np.array([one.temperature for one in options], np.float32)
    scaled = logits_BV / temperature[:, None]
    return np.isfinite(np.asarray(jitted_filters(scaled, rows_of(options, logits_BV))))


@given(
    kinds=st.lists(st.sampled_from(LOGITS), min_size=B, max_size=B),
    options=st.lists(any_options, min_size=B, max_size=B),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=150)
def test_filters_keep_what_a_sort_in_float64_keeps(
    kinds: list[str], options: list[Options], seed: int
) -> None:
    given_logits = np.concatenate([logits(kind, 1, V, seed + i) for i, kind in enumerate(kinds)])
    kept = kept_by_the_filters(given_logits, options)
    for row, one in enumerate(options):
        exact, loose = allowed(given_logits[row], one), possible(given_logits[row], one, ROUNDING)
        assert not (kept[row] & ~(exact | loose)).any(), (row, one)
        narrow = dataclasses.replace(
            one,
            top_p=one.top_p if one.top_p == 1 else one.top_p * (1 - 4 * ROUNDING),
            min_p=min(1.0, one.min_p * (1 + 4 * ROUNDING)),
        )
        assert not (allowed(given_logits[row], narrow) & ~kept[row]).any(), (row, one)


@given(kind=st.sampled_from(LOGITS), options=any_options, seed=st.integers(0, 2**20))
@settings(max_examples=150)
def test_the_cases_oracle_agrees_with_the_definition(
    kind: str, options: Options, seed: int
) -> None:
    row = logits(kind, 1, V, seed)[0]
    wide = possible(row, options, 1e-9)
    assert not (possible(row, options) & ~wide).any()
    assert not (allowed(row, options) & ~wide).any()
    exact = probabilities(row, options)
    assert exact.sum() == pytest.approx(1) and (exact >= 0).all()


FILTERS = (
    Options(),
    Options(temperature=0.4),
    Options(temperature=2.5),
    Options(top_k=3),
    Options(top_p=0.7),
    Options(min_p=0.2),
    Options(top_k=5, top_p=0.8),
    Options(top_k=4, min_p=0.1),
    Options(top_p=0.95, min_p=0.1),
    Options(temperature=0.7, top_k=8, top_p=0.9, min_p=0.02),
    Options(best_banned=True),
    Options(top_k=4, best_banned=True),
)


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_draws_follow_the_exact_distribution(options: Options) -> None:
    times = 6000
    row = logits("flat", 1, 16, seed=3)
    given_logits = np.repeat(row, times, axis=0)
    tokens = np.asarray(reference(given_logits, rows_of([options] * times, given_logits, seed=1)))
    statistic, freedom = chi_square(*pooled(tokens, probabilities(row[0], options)))
    assert freedom > 0 and statistic < limit(freedom)


def test_the_statistic_notices_a_filter_that_is_left_out() -> None:
    times = 6000
    row = logits("flat", 1, 16, seed=3)
    given_logits = np.repeat(row, times, axis=0)
    tokens = np.asarray(reference(given_logits, rows_of([Options()] * times, given_logits)))
    statistic, freedom = chi_square(tokens, probabilities(row[0], Options(temperature=1.2)))
    assert statistic > 2 * limit(freedom)


def test_neighbouring_keys_give_independent_draws() -> None:
    """Pairs of draws by consecutive keys follow the product of their distributions."""
    times = 12_000
    row = np.array([[0.0, 0.5, 1.0, -0.5]], np.float32)
    given_logits = np.repeat(row, times, axis=0)
    keys = np.stack([np.zeros(times), np.arange(times)], axis=1).astype(np.uint32)
    rows = dataclasses.replace(rows_of([Options()] * times, given_logits), key_B2=keys)
    tokens = np.asarray(reference(given_logits, rows))
    probs = probabilities(row[0], Options())
    pairs = tokens[:-1:2] * 4 + tokens[1::2]
    statistic, freedom = chi_square(pairs, np.outer(probs, probs).ravel())
    assert freedom == 15 and statistic < limit(freedom)


@given(seed=st.integers(0, 2**20), order=st.permutations(range(B)))
@settings(max_examples=40)
def test_a_draw_does_not_depend_on_its_place_or_its_neighbours(seed: int, order: list[int]) -> None:
    rng = np.random.default_rng(seed)
    options = [FILTERS[i] for i in rng.integers(0, len(FILTERS), B)]
    given_logits = logits("spread", B, V, seed)
    rows = rows_of(options, given_logits, seed)
    tokens = np.asarray(reference(given_logits, rows))
    moved = jax.tree.map(lambda x: x[np.array(order)], rows)
    np.testing.assert_array_equal(np.asarray(reference(given_logits[order], moved)), tokens[order])
    others = given_logits.copy()
    others[1:] = rng.standard_normal(others[1:].shape) * 30
    assert int(np.asarray(reference(others, rows))[0]) == int(tokens[0])


def test_the_same_key_draws_the_same_token_and_keys_differ() -> None:
    given_logits = np.repeat(logits("flat", 1, V), 64, axis=0)
    rows = rows_of([Options()] * 64, given_logits, seed=5)
    one_key = dataclasses.replace(rows, key_B2=np.repeat(rows.key_B2[:1], 64, axis=0))
    assert len(set(np.asarray(reference(given_logits, one_key)).tolist())) == 1
    assert len(set(np.asarray(reference(given_logits, rows)).tolist())) > 10


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 17, V - 1])
@pytest.mark.parametrize(
    "options", [Options(), Options(temperature=0.0), Options(top_k=2)], ids=str
)
def test_a_row_with_nan_or_infinity_anywhere_is_broken_and_no_other(
    value: float, place: int, options: Options
) -> None:
    given_logits = logits("flat", B, V)
    clean = np.asarray(reference(given_logits, rows_of([options] * B, given_logits)))
    given_logits[2, place] = value
    tokens = np.asarray(reference(given_logits, rows_of([options] * B, logits("flat", B, V))))
    assert tokens[2] == BROKEN
    others = np.arange(B) != 2
    np.testing.assert_array_equal(tokens[others], clean[others])
    assert (tokens[others] >= 0).all()


def test_a_row_of_minus_infinity_is_broken() -> None:
    given_logits = np.full((B, V), -np.inf, np.float32)
    given_logits[1:, 4] = -1e30
    tokens = np.asarray(reference(given_logits, rows_of([Options()] * B, np.zeros((B, V)))))
    assert tokens.tolist() == [BROKEN] + [4] * (B - 1)


@given(options=any_options, token=st.integers(0, V - 1), seed=st.integers(0, 2**20))
@settings(max_examples=60)
def test_the_only_finite_token_is_drawn_whatever_the_options(
    options: Options, token: int, seed: int
) -> None:
    given_logits = np.full((B, V), -np.inf, np.float32)
    given_logits[:, token] = np.random.default_rng(seed).standard_normal(B) * 1e3
    rows = rows_of([options] * B, np.zeros((B, V), np.float32), seed)
    assert np.asarray(reference(given_logits, rows)).tolist() == [token] * B


@pytest.mark.parametrize(
    "options",
    [Options(top_k=1), Options(top_k=3), Options(top_p=1e-6), Options(min_p=1.0)],
    ids=str,
)
def test_ties_at_the_threshold_are_all_kept_and_equally_likely(options: Options) -> None:
    times = 4000
    row = np.full(16, -1.0, np.float32)
    row[[2, 5, 11, 15]] = 3.0
    given_logits = np.repeat(row[None], times, axis=0)
    tokens = np.asarray(reference(given_logits, rows_of([options] * times, given_logits)))
    assert set(tokens.tolist()) == {2, 5, 11, 15}
    statistic, freedom = chi_square(tokens, np.where(row == 3, 0.25, 0.0))
    assert freedom == 3 and statistic < limit(freedom)


def test_zero_and_minus_zero_are_a_tie() -> None:
    row = np.full(16, -5.0, np.float32)
    row[[3, 9]] = [0.0, -0.0]
    given_logits = np.repeat(row[None], 200, axis=0)
    tokens = np.asarray(reference(given_logits, rows_of([Options(top_k=1)] * 200, given_logits)))
    assert set(tokens.tolist()) == {3, 9}


def test_without_filters_rows_that_ask_for_none_draw_the_same() -> None:
    options = [Options(), Options(temperature=0.0), Options(temperature=0.3)] * 2
    given_logits = logits("spread", B, V)
    rows = rows_of(options, given_logits)
    np.testing.assert_array_equal(
        np.asarray(reference(given_logits, rows, filters=True)),
        np.asarray(reference(given_logits, rows, filters=False)),
    )


def test_every_token_may_be_banned_but_one() -> None:
    given_logits = logits("flat", 2, 8)
    rows = rows_of([Options(), Options(temperature=0.0)], given_logits)
    banned = np.array([[7, 1, 2, 3, 4, 5, 6, -1], [0, 1, 2, 3, 4, 5, 6, 7]], np.int32)
    tokens = np.asarray(reference(given_logits, dataclasses.replace(rows, banned_BK=banned)))
    assert tokens.tolist() == [0, BROKEN]


def test_gumbel_variables_follow_their_distribution() -> None:
    x = np.sort(np.asarray(jax.jit(gumbel, static_argnums=1)(np.array([3, 4], np.uint32), 200_000)))
    assert np.isfinite(x).all()
    exact = np.exp(-np.exp(-x.astype(np.float64)))
    distance = np.abs(exact - np.arange(1, len(x) + 1) / len(x)).max()
    assert distance < 2.2 / len(x) ** 0.5  # Kolmogorov–Smirnov, one honest sample in ten thousand
    assert 9 < x[-1] < 25, "the largest of 200,000 is near log(200,000) = 12"
    assert len(np.unique(x[-1000:])) > 990, "the largest, which win draws, are finely resolved"


def test_a_broken_row_is_an_int32_below_every_token() -> None:
    rows = rows_of([Options()], np.zeros((1, 4), np.float32))
    assert isinstance(rows, DrawRows)
    token = reference(np.full((1, 4), np.nan, np.float32), rows)
    assert token.dtype == np.int32 and int(token[0]) == BROKEN < 0
