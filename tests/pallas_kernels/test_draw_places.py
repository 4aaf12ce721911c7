"""The draw's Hopper kernel in the interpreter and on a card: which tokens, how often, and that rows
are independent. What `test_draw.py` interprets, too, is slow there."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.draw import BROKEN, DrawRows, draw, mosaic_gpu
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
from tests.chi_square import chi_square, limit, pooled
from tests.pallas_kernels.places import (
    CARD,
    jitted,
    launch_options,
    pick,
    places,
    poison_outputs,
    slow_places,
)

SMALL = mosaic_gpu.Tuning(groups=2, lines=1, stages=2)
THREE = SMALL._replace(groups=3)
VOCABULARIES = (1024, 8192 + 128, 128256, 151936, 152064)
reference = jax.jit(functools.partial(draw, backend="reference"))
card = pytest.mark.gpu


def drawn(
    place: str,
    logits_BV: np.ndarray,
    rows: DrawRows,
    races: bool = True,
    tuning: mosaic_gpu.Tuning = SMALL,
) -> np.ndarray:
    """Tokens of the kernel; on the card with its real sizes and outputs that start as NaN."""
    given = jnp.asarray(logits_BV), jax.tree.map(jnp.asarray, rows)
    poison_outputs(place, jax.ShapeDtypeStruct((len(logits_BV),), jnp.int32))
    tuning = mosaic_gpu.Tuning() if place == CARD else tuning
    return np.asarray(
        jitted(mosaic_gpu.draw)(*given, tuning=tuning, **launch_options(place, races))
    )


def assert_possible(tokens: np.ndarray, logits_BV: np.ndarray, options: list[Options]) -> None:
    """Every token is one that its row may draw, up to float32's rounding at an edge."""
    for row, (token, one) in enumerate(zip(tokens, options, strict=True)):
        assert 0 <= token < logits_BV.shape[1], (row, token, one)
        slack = 0.0 if one.temperature == 0 else ROUNDING
        exact = possible(logits_BV[row], one)
        assert (exact | possible(logits_BV[row], one, slack))[token], (row, token, one)


@slow_places
def test_rows_of_all_options_draw_what_they_allow(place: str) -> None:
    kinds: Any = pick(place, ["clustered"], LOGITS)
    for kind in kinds:
        options = pick(place, list(OPTIONS.values())[4:10], list(OPTIONS.values()) * 4)
        given = logits(kind, len(options), pick(place, 1152, 152064))
        for seed in range(pick(place, 1, 5)):
            assert_possible(drawn(place, given, rows_of(options, given, seed)), given, options)


@card
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("batch", [1, 3, 132, 133, 320])
def test_every_batch_and_vocabulary_draws_what_it_may_on_a_card(
    batch: int, vocabulary: int
) -> None:
    table = list(OPTIONS.values())
    options = [table[i % len(table)] for i in range(batch)]
    given = logits("head", batch, vocabulary)
    assert_possible(drawn(CARD, given, rows_of(options, given)), given, options)


@places
def test_greedy_tokens_are_those_of_the_reference(place: str) -> None:
    options = [Options(temperature=0.0), Options(temperature=0.0, best_banned=True)] * 3
    for kind in pick(place, ["ties"], LOGITS):
        given = logits(kind, 6, pick(place, 1152, 152064), seed=2)
        rows = rows_of(options, given)
        np.testing.assert_array_equal(drawn(place, given, rows), np.asarray(reference(given, rows)))


@slow_places
def test_broken_rows_are_reported_and_disturb_no_other(place: str) -> None:
    V = pick(place, 1152, 152064)
    options = [OPTIONS[name] for name in ("plain", "greedy", "top_p", "plain", "two filters")]
    given = logits("flat", 5, V)
    rows = rows_of(options, given)
    clean = drawn(place, given, rows)
    given[0, V - 1], given[1, V // 2], given[3] = np.nan, np.inf, -np.inf
    tokens = drawn(place, given, rows)
    assert tokens[[0, 1, 3]].tolist() == [BROKEN] * 3
    np.testing.assert_array_equal(tokens[[2, 4]], clean[[2, 4]])


@slow_places
def test_a_draw_repeats_and_depends_on_its_own_row_alone(place: str) -> None:
    names = ("plain", "top_p", "two filters", "min_p")
    options = [OPTIONS[name] for name in names] * pick(place, 1, 16)
    given = logits("spread", len(options), pick(place, 1152, 152064), seed=1)
    rows = rows_of(options, given)
    together = drawn(place, given, rows)
    for _ in range(pick(place, 1, 10)):
        np.testing.assert_array_equal(drawn(place, given, rows), together)
    some = [3, 0]
    alone = drawn(place, given[some], jax.tree.map(lambda x: x[np.array(some)], rows))
    np.testing.assert_array_equal(alone, together[some])


@pytest.mark.slow
@places
def test_one_token_that_is_left_is_drawn_whatever_the_filters(place: str) -> None:
    V = pick(place, 1152, 152064)
    options = [Options(top_k=1), Options(top_p=1e-6), Options(min_p=1.0), Options(temperature=3.0)]
    given = np.full((4, V), -np.inf, np.float32)
    wanted = [0, V // 3, V - 129, V - 1]
    given[np.arange(4), wanted] = [5.0, -1e4, 0.0, 1e-3]
    rows = rows_of(options, np.zeros_like(given))
    rows = dataclasses.replace(rows, banned_BK=np.full((4, 2), -1, np.int32))
    assert drawn(place, given, rows).tolist() == wanted


@slow_places
def test_every_one_of_equal_logits_may_be_drawn_by_top_k(place: str) -> None:
    V, times = pick(place, 640, 8192 + 128), pick(place, 16, 2048)
    tied = [3, 259, 300, V - 1]
    row = np.full(V, -4.0, np.float32)
    row[tied] = 2.0
    given = np.repeat(row[None], times, axis=0)
    tokens = drawn(place, given, rows_of([Options(top_k=2)] * times, given), races=False)
    assert set(tokens.tolist()) <= set(tied) and len(set(tokens.tolist())) > 1
    if place == CARD:
        exact = np.where(np.isin(np.arange(V), tied), 0.25, 0.0)
        statistic, freedom = chi_square(tokens, exact)
        assert statistic < limit(freedom)


DISTRIBUTED = {
    name: OPTIONS[name] for name in ("plain", "hot", "top_p", "top_k", "two filters", "min_p")
} | {"often again": Options(temperature=2.0, top_p=0.4)}


@slow_places
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_draws_follow_the_exact_distribution(place: str, name: str) -> None:
    times, options = pick(place, 64, 20_000), DISTRIBUTED[name]
    row = logits("head", 1, pick(place, 640, 8192 + 128))
    given = np.repeat(row, times, axis=0)
    rows = rows_of([options] * times, given, seed=4)
    tokens = drawn(place, given, rows, races=False, tuning=THREE)
    statistic, freedom = chi_square(*pooled(tokens, probabilities(row[0], options)))
    assert statistic < limit(freedom)


@card
def test_consecutive_keys_draw_independently_on_a_card() -> None:
    times = 20_000
    row = np.full(1024, -np.inf, np.float32)
    row[[5, 6, 600, 1000]] = [0.0, 0.5, 1.0, -0.5]
    given = np.repeat(row[None], times, axis=0)
    keys = np.stack([np.zeros(times), np.arange(times)], axis=1).astype(np.uint32)
    rows = dataclasses.replace(rows_of([Options()] * times, given), key_B2=keys)
    place_of = {5: 0, 6: 1, 600: 2, 1000: 3}
    tokens = np.array([place_of[int(token)] for token in drawn(CARD, given, rows)])
    probs = probabilities(row[[5, 6, 600, 1000]], Options())
    statistic, freedom = chi_square(
        tokens[:-1:2] * 4 + tokens[1::2], np.outer(probs, probs).ravel()
    )
    assert freedom == 15 and statistic < limit(freedom)


@card
@pytest.mark.parametrize("seed", range(3))
def test_random_options_draw_what_they_allow_on_a_card(seed: int) -> None:
    rng = np.random.default_rng(seed)
    V = 152064
    options = [
        Options(
            temperature=float(rng.choice([0.1, 0.7, 1.0, 3.0])),
            top_k=int(rng.choice([0, 1, 7, 300, 5000, V - 1, V])),
            top_p=float(rng.choice([1e-6, 0.5, 0.9, 0.999, 1.0])),
            min_p=float(rng.choice([0.0, 1e-6, 0.05, 0.5])),
            best_banned=bool(rng.integers(2)),
        )
        for _ in range(64)
    ]
    given = np.concatenate([logits(LOGITS[i % len(LOGITS)], 1, V, seed + i) for i in range(64)])
    assert_possible(drawn(CARD, given, rows_of(options, given, seed)), given, options)
