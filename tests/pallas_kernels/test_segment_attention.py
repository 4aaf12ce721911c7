"""Attention within segments: every back end against every pair of tokens at once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.segment_attention import Segments, mosaic_gpu, segment_attention
from pallas_kernels.segment_attention.cases import CASES, SCALE, Case, Inputs, expected, inputs
from pallas_kernels.segment_attention.plan import SIZE, plan
from tests.pallas_kernels.places import (
    card,
    launch_options,
    pick,
    places,
    poison_outputs,
    relative_error,
    shape_of,
    slow_places,
)

RAGGED = Case(name="", lengths=(150, 3, 90), rest=40, heads=2, kv_heads=1)


def segments(case: Case, given: Inputs) -> Segments:
    """Where a case's segments lie."""
    longest = max(case.lengths, default=1)
    return Segments(jnp.asarray(given.first), jnp.asarray(given.end), longest)


by_name = functools.partial(pytest.mark.parametrize, "case", ids=lambda case: case.name)


@by_name(CASES)
def test_tokens_see_their_own_segment_within_the_window(case: Case) -> None:
    given = inputs(case)
    options = {"scale": SCALE, "window": case.window, "backend": "reference"}
    found = segment_attention(*map(jnp.asarray, given[:3]), segments(case, given), **options)
    np.testing.assert_allclose(np.asarray(found), expected(given, case.window), atol=1e-5)


def poisoned(value: float, dtype: str, backend: str) -> tuple[np.ndarray, np.ndarray]:
    """Outputs where a segment, and what lies behind all of them, hold `value`; and the right ones
    of the others, NaN in that segment."""
    given = inputs(RAGGED)
    rounded = [np.array(jnp.asarray(x, dtype), np.float64) for x in given[:3]]
    wanted, own = expected(Inputs(*rounded, *given[3:]), None), slice(150, 153)
    wanted[own] = np.nan
    for x in rounded:
        x[own] = x[-RAGGED.rest :] = value
    arrays = (jnp.asarray(x, dtype) for x in rounded)
    options = {"scale": SCALE, "backend": backend}
    found = segment_attention(*arrays, segments(RAGGED, given), **options)
    return np.asarray(found, np.float64), wanted


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_segment(value: float) -> None:
    np.testing.assert_allclose(*poisoned(value, "float32", "reference"), atol=1e-5)


def test_no_array_has_the_scores_of_all_pairs() -> None:
    tokens, longest = 4096, 128
    x = jax.ShapeDtypeStruct((tokens, 2, 8), jnp.float32)
    bound = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    run = functools.partial(segment_attention, scale=1.0, backend="reference")
    made = jax.make_jaxpr(run)(x, x, x, Segments(bound, bound, longest))
    assert f"{tokens},{tokens}" not in str(made)


def error(place: str, case: Case, dtype: str = "bfloat16") -> float:
    """Of the Hopper kernel over rounded inputs, with an output that starts as NaN."""
    given = inputs(case)
    rounded = [jnp.asarray(x, dtype) for x in given[:3]]
    poison_outputs(place, shape_of(rounded[0]))
    run = functools.partial(
        mosaic_gpu.segment_attention,
        scale=SCALE,
        window=case.window,
        **launch_options(place),
    )
    found = jax.jit(run)(*rounded, segments(case, given))
    exact = Inputs(*(np.asarray(x, np.float64) for x in rounded), *given[3:])
    return relative_error(found, expected(exact, case.window))


@pytest.fixture
def few_blocks(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So few thread blocks that each has several units, even of a small case."""
    monkeypatch.setattr(mosaic_gpu, "BLOCKS", pick(place, 2, mosaic_gpu.BLOCKS))


@places
@pytest.mark.usefixtures("few_blocks")
def test_a_hopper_block_takes_several_units_of_ragged_segments(place: str) -> None:
    assert error(place, RAGGED) < 5e-3


@slow_places
@pytest.mark.usefixtures("few_blocks")
def test_on_hopper_what_is_not_finite_stays_in_its_segment(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = functools.partial(mosaic_gpu.segment_attention, **launch_options(place))
    monkeypatch.setattr(mosaic_gpu, "segment_attention", run)
    np.testing.assert_allclose(*poisoned(np.nan, "float16", "mosaic_gpu"), atol=2e-3)


@slow_places
@by_name(CASES)
@pytest.mark.usefixtures("few_blocks")
def test_the_hopper_kernel_equals_float64(place: str, case: Case) -> None:
    assert error(place, case, "float16") < 1e-3


@pytest.mark.parametrize("place", [card])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_ragged_batches_of_several_seeds_are_right_on_the_card(
    place: str, head_dim: int, window: int | None
) -> None:
    for seed in range(3):
        lengths = tuple(map(int, np.random.default_rng(seed).integers(1, 700, 9)))
        case = Case(name="", lengths=lengths, rest=100, heads=4, head_dim=head_dim, window=window)
        assert error(place, case) < 5e-3


@by_name(CASES)
def test_a_plan_meets_every_key_that_is_seen_and_masks_where_one_is_not(case: Case) -> None:
    given = inputs(case)
    made = plan(segments(case, given), window=case.window)
    place = np.arange(-(-case.tokens // SIZE) * SIZE)
    seen_TS = (place >= made.begin_T[:, None]) & (place < made.end_T[:, None])
    reach = np.abs(place[:, None] - place) <= (len(place) if case.window is None else case.window)
    first, end = (np.pad(x, (0, len(place) - case.tokens)) for x in (given.first, given.end))
    wanted = (place >= first[:, None]) & (place < end[:, None]) & reach
    np.testing.assert_array_equal(seen_TS, wanted)
    for i, (low, full_low, full_high, high) in enumerate(np.asarray(made.tiles_I4)):
        assert 0 <= low <= full_low <= full_high <= high
        tiles = seen_TS[i * SIZE : (i + 1) * SIZE].reshape(SIZE, -1, SIZE)
        met = np.flatnonzero(tiles.any(axis=(0, 2)))
        assert [low, high] == [*met[:1], *(met[-1:] + 1)] or (low == high and not len(met))
        full = np.flatnonzero(tiles.all(axis=(0, 2)))
        assert list(range(full_low, full_high)) == list(full)


LOW = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)


@pytest.mark.parametrize(("tokens", "head_dim", "window"), [(64, 64, None), (8192, 128, 64)])
def test_the_hopper_kernel_lowers_for_cuda(tokens: int, head_dim: int, window: int | None) -> None:
    x, bound = LOW((tokens, 12, head_dim)), jax.ShapeDtypeStruct((tokens,), jnp.int32)
    run = functools.partial(mosaic_gpu.segment_attention, scale=0.1, window=window)
    traced = jax.jit(run).trace(x, x, x, Segments(bound, bound, 512))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        (LOW((8, 4, 64)), jax.ShapeDtypeStruct((8, 4, 64), "float32"), "k float32"),
        (LOW((8, 4, 80)), LOW((8, 4, 80)), "head_dim 64, 96 or 128"),
        (LOW((8, 4, 64)), LOW((8, 3, 64)), "which divide the query heads"),
    ],
)
def test_a_refusal_names_what_was_given(q: Any, k: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"mosaic_gpu segment_attention takes .*{message}"):
        mosaic_gpu.check(q, k, k)
