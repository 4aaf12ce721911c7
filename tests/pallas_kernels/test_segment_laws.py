"""Laws of attention within segments, and how its kernel walks over tiles of keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.backends import UnknownBackend
from pallas_kernels.segment_attention import BACKENDS, Segments, mosaic_gpu, segment_attention
from pallas_kernels.segment_attention.cases import CASES, SCALE, Case, expected, inputs
from pallas_kernels.segment_attention.plan import SIZE, plan

LENGTHS, TOKENS = (5, 1, 30, 9), 50  # and five tokens of no segment
LONGEST = 30
HEADS, KV_HEADS, DIM = 4, 2, 8


def segments_of(lengths: tuple[int, ...], tokens: int, longest: int = LONGEST) -> Segments:
    """Segments side by side from token 0; later tokens belong to none."""
    ends = np.cumsum(lengths)
    first, end = np.zeros((2, tokens), np.int32)
    for length, stop in zip(lengths, ends, strict=True):
        first[stop - length : stop], end[stop - length : stop] = stop - length, stop
    return Segments(jnp.asarray(first), jnp.asarray(end), longest)


OWN = segments_of(LENGTHS, TOKENS)
attend_jit = jax.jit(segment_attention, static_argnames=("scale", "window", "backend"))


def attend(q: Any, k: Any, v: Any, window: int | None = None, where: Segments = OWN) -> np.ndarray:
    return np.asarray(attend_jit(q, k, v, where, scale=SCALE, window=window, backend="reference"))


@pytest.fixture(scope="module")
def qkv() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return tuple(rng.standard_normal((TOKENS, n, DIM)).astype(np.float32) for n in heads)


def by_head(v: np.ndarray) -> np.ndarray:
    """Values as each query head meets them."""
    return np.repeat(v, HEADS // KV_HEADS, axis=1)


def test_a_segment_of_one_token_gives_its_value(qkv: tuple[np.ndarray, ...]) -> None:
    np.testing.assert_allclose(attend(*qkv)[5], by_head(qkv[2])[5], rtol=1e-6)


def test_tokens_of_no_segment_get_zeros(qkv: tuple[np.ndarray, ...]) -> None:
    assert not attend(*qkv)[sum(LENGTHS) :].any()


def test_a_window_of_zero_gives_each_token_its_own_value(qkv: tuple[np.ndarray, ...]) -> None:
    out, live = attend(*qkv, window=0), slice(0, sum(LENGTHS))
    np.testing.assert_allclose(out[live], by_head(qkv[2])[live], rtol=1e-6)


def test_a_window_as_wide_as_the_longest_segment_hides_nothing(
    qkv: tuple[np.ndarray, ...],
) -> None:
    np.testing.assert_allclose(attend(*qkv, window=LONGEST), attend(*qkv), rtol=1e-6, atol=1e-7)


def test_a_bound_on_lengths_that_is_too_large_changes_nothing(qkv: tuple[np.ndarray, ...]) -> None:
    loose = segments_of(LENGTHS, TOKENS, longest=TOKENS)
    np.testing.assert_allclose(attend(*qkv, where=loose), attend(*qkv), rtol=1e-5, atol=1e-6)


def test_equal_values_come_out_as_they_are(qkv: tuple[np.ndarray, ...]) -> None:
    q, k, _ = qkv
    out = attend(q, k, np.full_like(k, 1.5))
    np.testing.assert_allclose(out[: sum(LENGTHS)], 1.5, rtol=1e-6)


def test_queries_of_zero_give_the_mean_of_the_segment(qkv: tuple[np.ndarray, ...]) -> None:
    q, k, v = qkv
    out = attend(np.zeros_like(q), k, v)
    np.testing.assert_allclose(out[6], by_head(v)[6:36].mean(axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(out[35], out[6], rtol=1e-5)


def test_a_window_averages_the_tokens_on_either_side(qkv: tuple[np.ndarray, ...]) -> None:
    q, k, v = qkv
    out = attend(np.zeros_like(q), k, v, window=2)
    for token, near in ((20, slice(18, 23)), (6, slice(6, 9)), (35, slice(33, 36))):
        np.testing.assert_allclose(out[token], by_head(v)[near].mean(axis=0), rtol=1e-4, atol=1e-6)


def test_outputs_are_linear_in_the_values(qkv: tuple[np.ndarray, ...]) -> None:
    q, k, v = qkv
    np.testing.assert_allclose(attend(q, k, -4 * v), -4 * attend(q, k, v), rtol=1e-6)


def test_a_constant_added_to_all_keys_changes_no_softmax(qkv: tuple[np.ndarray, ...]) -> None:
    q, k, v = qkv
    shift = np.linspace(-1, 1, DIM, dtype=np.float32)
    np.testing.assert_allclose(attend(q, k + shift, v), attend(*qkv), rtol=1e-3, atol=1e-5)


def test_both_directions_are_alike(qkv: tuple[np.ndarray, ...]) -> None:
    """Reversed tokens in reversed segments give reversed outputs, windows included."""
    count = sum(LENGTHS)
    back = [np.concatenate([x[:count][::-1], x[count:]]) for x in qkv]
    where = segments_of(LENGTHS[::-1], TOKENS)
    for window in (None, 3):
        got = attend(*back, window=window, where=where)[:count][::-1]
        wanted = attend(*qkv, window=window)[:count]
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_the_order_of_keys_in_a_segment_does_not_matter(qkv: tuple[np.ndarray, ...]) -> None:
    q, k, v = qkv
    order = np.arange(TOKENS)
    order[6:36] = np.random.default_rng(1).permutation(order[6:36])
    np.testing.assert_allclose(attend(q, k[order], v[order]), attend(*qkv), rtol=1e-5, atol=1e-6)


def test_a_segment_depends_on_no_other(qkv: tuple[np.ndarray, ...]) -> None:
    other = [x.copy() for x in qkv]
    for x in other:
        x[6:36] *= -3
    got, wanted = attend(*other), attend(*qkv)
    rest = np.r_[0:6, 36:TOKENS]
    np.testing.assert_array_equal(got[rest], wanted[rest])
    assert np.any(got[6:36] != wanted[6:36])


def test_query_heads_of_a_group_share_keys_and_values(qkv: tuple[np.ndarray, ...]) -> None:
    q, k, v = qkv
    changed = np.concatenate([k[:, :1], k[:, 1:] + 1 + k[:, 1:] ** 2], axis=1)
    differs = (attend(q, changed, v) != attend(q, k, v)).any(axis=(0, 2))
    assert differs.tolist() == [False, False, True, True]


def test_outputs_have_the_type_of_the_queries(qkv: tuple[np.ndarray, ...]) -> None:
    low = [jnp.asarray(x, jnp.bfloat16) for x in qkv]
    out = attend(*low)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), attend(*qkv), atol=0.05)


def test_an_unknown_back_end_is_named_with_those_that_exist(qkv: tuple[np.ndarray, ...]) -> None:
    with pytest.raises(UnknownBackend, match="segment_attention has no back end 'xla'; choose one"):
        segment_attention(*qkv, OWN, scale=1.0, backend="xla")
    assert BACKENDS.planner("mosaic_gpu") is plan and BACKENDS.planner("reference") is None


@st.composite
def units(draw: st.DrawFn) -> mosaic_gpu.Unit:
    """A unit whose tiles without a mask lie anywhere among its tiles."""
    low, full_low, full_high, high = sorted(draw(st.tuples(*[st.integers(0, 12)] * 4)))
    zero = np.int32(0)
    sides = (np.int32(x) for x in (low, full_low, full_high, high))
    return mosaic_gpu.Unit(zero, zero, *sides, zero, zero)


@settings(max_examples=40, deadline=None)
@given(units())
def test_a_unit_meets_every_tile_once_and_those_without_a_mask_first(unit: mosaic_gpu.Unit) -> None:
    met = [int(unit.tile(np.int32(j))) for j in range(unit.tiles)]
    assert sorted(met) == list(range(unit.low, unit.high))
    assert met[: unit.full] == list(range(unit.full_low, unit.full_high))
    rest = met[unit.full :]
    assert rest == sorted(rest)


@pytest.mark.parametrize(("tokens", "heads", "units"), [(128, 2, 2), (1024, 12, 96)])
def test_units_are_tiles_of_queries_times_heads(tokens: int, heads: int, units: int) -> None:
    sizes = {"K": 1, "G": heads, "H": 64, "dtype": "bfloat16", "scale": 1.0, "softcap": None}
    spec = mosaic_gpu.Spec(T=tokens, blocks=4, interpret=None, **sizes)
    assert spec.units == units and spec.N == heads
    assert spec.stages == mosaic_gpu.STAGES[64]


@pytest.mark.parametrize("dim", mosaic_gpu.STAGES)
def test_queries_and_rings_fit_shared_memory(dim: int) -> None:
    slots = mosaic_gpu.QUERIES + 2 * mosaic_gpu.STAGES[dim]
    assert slots * SIZE * dim * 2 <= 226 * 1024


def test_threads_ask_for_no_more_registers_than_there_are() -> None:
    producer, consumer = mosaic_gpu.REGISTERS
    assert 128 * (producer + mosaic_gpu.GROUPS * consumer) <= 65536


@pytest.mark.parametrize(("tokens", "padded"), [(1, SIZE), (SIZE, SIZE), (SIZE + 1, 2 * SIZE)])
def test_a_plan_has_whole_tiles_and_tokens_beyond_see_nothing(tokens: int, padded: int) -> None:
    made = plan(segments_of((tokens,), tokens, tokens), window=None)
    assert made.begin_T.shape == made.end_T.shape == (padded,)
    assert made.tiles_I4.shape == (padded // SIZE, 4)
    assert not np.any(made.end_T[tokens:]) and np.all(made.end_T[:tokens] == tokens)


def test_a_plan_without_segments_meets_no_tile() -> None:
    made = plan(segments_of((), 200), window=None)
    assert not any(np.any(array) for array in (made.begin_T, made.end_T))
    assert np.all(np.ptp(made.tiles_I4, axis=1) == 0)


def test_names_of_cases_are_unique_and_their_segments_lie_side_by_side() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        made = inputs(case)
        sizes = (made.end - made.first)[: sum(case.lengths)]
        wanted = np.repeat(np.array(case.lengths, int), np.array(case.lengths, int))
        np.testing.assert_array_equal(sizes, wanted)
        assert not made.end[sum(case.lengths) :].any()


def test_the_oracle_weighs_by_exponentials_of_scores() -> None:
    made = inputs(Case(name="", lengths=(2,), heads=1, kv_heads=1, head_dim=2))
    score = SCALE * made.q[0, 0].astype(np.float64) @ made.k[:, 0].T
    weight = np.exp(score) / np.exp(score).sum()
    np.testing.assert_allclose(expected(made, None)[0, 0], weight @ made.v[:, 0], rtol=1e-6)
