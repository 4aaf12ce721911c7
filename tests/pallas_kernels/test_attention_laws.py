"""Laws that attention over pages keeps, for both ops and both back ends in plain JAX: what changes
nothing, what changes the result in a known way, and what float64 says of random batches."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import paged_decode, paged_extend
from pallas_kernels.layout import dense_attention
from pallas_kernels.paged_decode import cases as decode_cases
from pallas_kernels.paged_extend import cases as extend_cases
from pallas_kernels.quantised import SCALE_DTYPE, quantise

DECODE = decode_cases.Case(name="decode", lengths=(5, 0, 70, 130), head_dim=16)
EXTEND = extend_cases.Case(name="extend", rows=((70, 5), (0, 0), (3, 30)), gap=2, head_dim=16)
GIVEN = {
    "decode": (paged_decode.decode_attention, decode_cases.inputs(DECODE)),
    "extend": (paged_extend.extend_attention, extend_cases.inputs(EXTEND)),
}
ops = pytest.mark.parametrize("op", GIVEN)
backends = pytest.mark.parametrize(
    "backend", ["reference", pytest.param("xla", marks=pytest.mark.slow)]
)
PLAIN = {"scale": 0.25}


@functools.cache
def jitted(op: str, backend: str, **static: Any) -> Any:
    return jax.jit(functools.partial(GIVEN[op][0], backend=backend, **static))


def run(
    op: str, backend: str, *args: Any, sinks: Any = None, more: Any = None, **static: Any
) -> Any:
    """The op over the case's arguments, the first of them replaced by `args`."""
    given = [*args, *GIVEN[op][1].args[len(args) :]]
    return np.asarray(jitted(op, backend, **PLAIN | static)(*given, sinks=sinks, **(more or {})))


def in_use(op: str) -> np.ndarray:
    """Which tokens some row owns."""
    return GIVEN[op][1].expected.any(axis=(1, 2))


@ops
@backends
def test_a_window_wider_than_every_row_changes_nothing(op: str, backend: str) -> None:
    np.testing.assert_allclose(
        run(op, backend, window=10_000), run(op, backend), rtol=1e-6, atol=1e-6
    )


@ops
@backends
def test_a_softcap_far_above_all_scores_changes_nothing(op: str, backend: str) -> None:
    np.testing.assert_allclose(run(op, backend, softcap=1e4), run(op, backend), atol=1e-4)


@ops
@backends
def test_sinks_far_below_all_scores_change_nothing(op: str, backend: str) -> None:
    low = np.full(4, -1e4, np.float32)
    np.testing.assert_allclose(run(op, backend, sinks=low), run(op, backend), atol=1e-6)


@ops
@backends
def test_sinks_far_above_all_scores_take_all_the_weight(op: str, backend: str) -> None:
    assert np.abs(run(op, backend, sinks=np.full(4, 100.0, np.float32))).max() < 1e-20


@ops
@backends
def test_a_sink_is_of_its_query_head_alone(op: str, backend: str) -> None:
    sinks = np.array([-1e4, 100.0, -1e4, -1e4], np.float32)
    plain, out = run(op, backend), run(op, backend, sinks=sinks)
    np.testing.assert_allclose(out[:, [0, 2, 3]], plain[:, [0, 2, 3]], atol=1e-6)
    assert np.abs(out[:, 1]).max() < 1e-20


@ops
@backends
def test_outputs_are_linear_in_the_values(op: str, backend: str) -> None:
    q, k, v, *_ = GIVEN[op][1].args
    np.testing.assert_allclose(
        run(op, backend, q, k, v * 3), 3 * run(op, backend), rtol=1e-5, atol=1e-6
    )


@ops
@backends
def test_equal_values_come_out_as_they_are(op: str, backend: str) -> None:
    q, k, v, *_ = GIVEN[op][1].args
    out = run(op, backend, q, k, np.where(np.isnan(v), v, 2.5))
    np.testing.assert_allclose(out[in_use(op)], 2.5, rtol=1e-6)
    assert not out[~in_use(op)].any()


@ops
@backends
def test_a_window_of_one_gives_the_newest_value_whatever_the_query(op: str, backend: str) -> None:
    q, k, v, *_ = GIVEN[op][1].args
    out = run(op, backend, np.zeros_like(q), k, v, window=1)
    newest = run(op, backend, q, k, v, window=1)
    np.testing.assert_allclose(out, newest, atol=1e-6)  # one key: its value, whatever the query


@ops
@backends
def test_a_constant_added_to_all_keys_changes_no_softmax(op: str, backend: str) -> None:
    q, k, _, *_ = GIVEN[op][1].args
    shift = np.linspace(-1, 1, k.shape[-1], dtype=np.float32)
    np.testing.assert_allclose(run(op, backend, q, k + shift), run(op, backend), atol=2e-5)


@ops
@backends
def test_queries_and_scale_trade_factors(op: str, backend: str) -> None:
    q = GIVEN[op][1].args[0]
    np.testing.assert_allclose(
        run(op, backend, q * 2, scale=0.125), run(op, backend), rtol=1e-5, atol=1e-6
    )


@ops
@backends
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -1e30])
def test_places_beyond_a_rows_length_may_hold_anything(
    op: str, backend: str, garbage: float
) -> None:
    q, k, v, *_ = GIVEN[op][1].args
    clean = np.isnan(k)
    out = run(op, backend, q, np.where(clean, garbage, k), np.where(clean, garbage, v))
    np.testing.assert_array_equal(out, run(op, backend))


@ops
@backends
def test_where_pages_lie_changes_nothing(op: str, backend: str) -> None:
    q, k, v, table, *_ = GIVEN[op][1].args
    order = np.random.default_rng(3).permutation(len(k))
    moved = np.argsort(order).astype(np.int32)[table]
    np.testing.assert_array_equal(run(op, backend, q, k[order], v[order], moved), run(op, backend))


@ops
@backends
@pytest.mark.parametrize("before", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_first_page_counts_pages_of_the_layers_before(op: str, backend: str, before: int) -> None:
    q, k, v, *_ = GIVEN[op][1].args
    others = np.full((before, *k.shape[1:]), np.nan, np.float32)
    pools = [np.concatenate([others, x, others]) for x in (k, v)]
    first = {"first_page": jnp.array([before], jnp.int32)}
    np.testing.assert_array_equal(run(op, backend, q, *pools, more=first), run(op, backend))


@ops
@backends
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_8_bit_pages_mean_their_numbers_times_their_scales(
    op: str, backend: str, kv_dtype: str
) -> None:
    q, k, v, *_ = GIVEN[op][1].args
    (k8, ks), (v8, vs) = (quantise(jnp.asarray(np.nan_to_num(x)), kv_dtype) for x in (k, v))
    scales = jnp.stack([ks, vs], axis=2).astype(SCALE_DTYPE)
    out = run(op, backend, q, k8, v8, more={"scales": scales})
    factors = np.asarray(scales, np.float32)[..., None]
    exact = [np.asarray(x, np.float32) * factors[:, :, side] for side, x in enumerate((k8, v8))]
    np.testing.assert_allclose(out, run(op, backend, q, *exact), atol=1e-5)


@ops
@backends
def test_scales_of_unseen_places_may_be_nan(op: str, backend: str) -> None:
    q, k, v, *_ = GIVEN[op][1].args
    hidden = np.isnan(k[..., 0])
    pools = [jnp.asarray(np.nan_to_num(x), "float8_e4m3fn") for x in (k, v)]
    ones = np.ones((*hidden.shape[:2], 2, hidden.shape[2]), np.float32)
    marked = np.where(hidden[:, :, None], np.nan, ones)
    out, wanted = (
        run(op, backend, q, *pools, more={"scales": jnp.asarray(x, SCALE_DTYPE)})
        for x in (marked, ones)
    )
    np.testing.assert_array_equal(out, wanted)


@backends
def test_a_chunk_of_one_token_is_a_decode(backend: str) -> None:
    q, k, v, table, lengths = GIVEN["decode"][1].args
    live = (lengths > 0).astype(np.int32)
    starts = np.arange(len(q), dtype=np.int32)
    for options in ({}, {"window": 1}):
        step = run("extend", backend, q, k, v, table, starts, live, lengths, **options)
        np.testing.assert_allclose(step, run("decode", backend, **options), atol=2e-6)


@backends
def test_the_order_of_rows_does_not_matter(backend: str) -> None:
    q, k, v, table, lengths = GIVEN["decode"][1].args
    order = np.array([2, 0, 3, 1])
    out = run("decode", backend, q[order], k, v, table[order], lengths[order])
    np.testing.assert_array_equal(out, run("decode", backend)[order])


@backends
def test_heads_of_one_group_share_keys_and_other_groups_do_not(backend: str) -> None:
    q, k, v, *_ = GIVEN["decode"][1].args
    same = np.repeat(q[:, :1], 4, axis=1)
    out = run("decode", backend, same)
    np.testing.assert_array_equal(out[:, 0], out[:, 1])
    np.testing.assert_array_equal(out[:, 2], out[:, 3])
    assert np.abs(out[:, 0] - out[:, 2]).max() > 0.1


def test_attention_over_two_halves_merges_by_their_sums() -> None:
    """Outputs over disjoint keys, weighted by their sums of weights, are the output over all."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((n, 2, 16)) for n in (1, 96, 96))
    together = dense_attention(q, k, v, scale=0.25, window=None, softcap=None)
    parts, sums = [], []
    for half in (slice(0, 40), slice(40, 96)):
        parts.append(dense_attention(q, k[half], v[half], scale=0.25, window=None, softcap=None))
        sums.append(np.exp(np.einsum("qnh,snh->qns", q, k[half]) * 0.25).sum(axis=-1))
    weights = np.stack(sums) / np.sum(sums, axis=0)
    merged = sum(w[..., None] * part for w, part in zip(weights, parts, strict=True))
    np.testing.assert_allclose(merged, together, atol=1e-12)


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=4, max_size=4),
    seed=st.integers(0, 10_000),
    sinks=st.booleans(),
    backend=st.sampled_from(["reference", "xla"]),
)
def test_random_decodes_equal_float64(
    lengths: list[int], seed: int, sinks: bool, backend: str
) -> None:
    # The longest row fixes the widths, so that few programs are compiled
    case = decode_cases.Case(
        name="random",
        lengths=(*lengths, 90),
        head_dim=16,
        window=40,
        softcap=4.0,
        sinks=sinks,
    )
    made = decode_cases.inputs(case, seed)
    pool = np.full((40, *made.pages.k.shape[1:]), np.nan, np.float32)
    k, v = pool.copy(), pool.copy()
    k[: len(made.pages.k)], v[: len(made.pages.v)] = made.pages.k, made.pages.v
    static = {key: case.options[key] for key in ("scale", "window", "softcap")}
    logits = case.options["sinks"] if sinks else np.full(4, -1e30, np.float32)
    run = jitted("decode", backend, **static)
    out = run(made.q, k, v, made.pages.table, made.lengths, sinks=logits)
    np.testing.assert_allclose(out, made.expected, rtol=2e-4, atol=1e-5)


@settings(max_examples=20)
@given(
    rows=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), min_size=3, max_size=3),
    seed=st.integers(0, 10_000),
    backend=st.sampled_from(["reference", "xla"]),
)
def test_random_chunks_equal_float64(rows: list[tuple[int, int]], seed: int, backend: str) -> None:
    case = extend_cases.Case(
        name="random", rows=(*rows, (60, 12)), head_dim=16, window=30, softcap=4.0
    )
    made = extend_cases.inputs(case, seed)
    q = np.full((64, 4, 16), np.nan, np.float32)
    q[: len(made.q)] = made.q
    pool = np.full((40, *made.pages.k.shape[1:]), np.nan, np.float32)
    k, v = pool.copy(), pool.copy()
    k[: len(made.pages.k)], v[: len(made.pages.v)] = made.pages.k, made.pages.v
    static = {key: case.options[key] for key in ("scale", "window", "softcap")}
    out = np.asarray(jitted("extend", backend, **static)(q, k, v, *made.args[3:]))
    np.testing.assert_allclose(out[: len(made.q)], made.expected, rtol=2e-4, atol=1e-5)
    assert not out[len(made.q) :].any(), "tokens of no row give zeros"


@backends
@pytest.mark.parametrize("page", [1, pytest.param(2, marks=pytest.mark.slow), 64])
def test_page_boundaries_fall_anywhere(backend: str, page: int) -> None:
    lengths = (page, page + 1, max(page - 1, 1), 2 * page, 3 * page + 1)
    case = decode_cases.Case(name="pages", lengths=lengths, head_dim=16, page_size=page)
    made = decode_cases.inputs(case)
    op = jax.jit(functools.partial(GIVEN["decode"][0], backend=backend, **case.options))
    np.testing.assert_allclose(op(*made.args), made.expected, rtol=2e-5, atol=2e-6)


@ops
@backends
def test_inputs_are_left_as_they_are(op: str, backend: str) -> None:
    args = [jnp.asarray(x) for x in GIVEN[op][1].args]
    before = [np.array(x).tobytes() for x in args]
    jitted(op, backend, **PLAIN)(*args)
    assert [np.array(x).tobytes() for x in args] == before
