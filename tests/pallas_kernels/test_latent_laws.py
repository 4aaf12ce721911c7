"""Laws of attention over latents, its absorbed queries, and how a step is divided."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.backends import UnknownBackend
from pallas_kernels.latent_decode import (
    BACKENDS,
    UpProjections,
    absorbed,
    latent_decode,
    mosaic_gpu,
    projected,
)
from pallas_kernels.latent_decode.cases import CASES, Case, inputs
from pallas_kernels.latent_decode.mosaic_flash import BLOCK, Spec
from pallas_kernels.latent_extend import BACKENDS as EXTEND_BACKENDS
from pallas_kernels.latent_extend import mosaic_gpu as extend
from pallas_kernels.latent_extend.reference import token_rows
from pallas_kernels.paged_decode.plan import SPLIT_FIELDS

LAW = Case(name="law", lengths=(1, 40, 0, 129), heads=4, poison=0.0)


@jax.jit
def attend(q: Any, pages: Any, table: Any, lengths: Any, scale: Any = 0.25) -> jax.Array:
    """The reference with the value width of `LAW`."""
    options = {"backend": "reference", "scale": scale, "value_dim": LAW.value_dim}
    return latent_decode(q, pages, table, lengths, **options)


@pytest.fixture(scope="module")
def made() -> tuple[np.ndarray, ...]:
    return inputs(LAW).args


def test_a_row_of_one_token_gives_its_latent_to_every_head(made: tuple[np.ndarray, ...]) -> None:
    q, pages, table, lengths = made
    out = attend(q, pages, table, lengths)
    latent = pages[table[0, 0], 0, : LAW.value_dim]
    np.testing.assert_allclose(out[0], np.tile(latent, (LAW.heads, 1)), rtol=1e-6)


def test_a_row_that_is_not_in_use_gives_zeros(made: tuple[np.ndarray, ...]) -> None:
    assert not np.any(attend(*made)[2])


def test_queries_of_zero_give_the_mean_of_the_latents(made: tuple[np.ndarray, ...]) -> None:
    q, pages, table, lengths = made
    out = attend(np.zeros_like(q), pages, table, lengths)
    tokens = pages[table[3]].reshape(-1, LAW.width)[: lengths[3], : LAW.value_dim]
    np.testing.assert_allclose(out[3, 0], tokens.mean(axis=0), rtol=1e-4, atol=1e-6)


def test_equal_queries_give_equal_heads(made: tuple[np.ndarray, ...]) -> None:
    q, pages, table, lengths = made
    out = np.asarray(attend(np.repeat(q[:, :1], LAW.heads, axis=1), pages, table, lengths))
    np.testing.assert_array_equal(out, np.repeat(out[:, :1], LAW.heads, axis=1))


def test_queries_and_scale_trade_factors(made: tuple[np.ndarray, ...]) -> None:
    q, *rest = made
    np.testing.assert_array_equal(attend(q * 2, *rest, 0.125), attend(q, *rest, 0.25))


def test_the_part_behind_the_value_weighs_and_is_not_summed(made: tuple[np.ndarray, ...]) -> None:
    q, pages, table, lengths = made
    plain = q.copy()
    plain[..., LAW.value_dim :] = 0
    other = pages.copy()
    other[..., LAW.value_dim :] += 3
    np.testing.assert_array_equal(
        attend(plain, other, table, lengths), attend(plain, pages, table, lengths)
    )
    moved = pages.copy()
    moved[table[1, 0], 0, LAW.value_dim :] += 3
    changed = attend(q, moved, table, lengths) != attend(q, pages, table, lengths)
    assert np.any(changed[1]) and not np.any(changed[3])


def test_a_constant_on_every_turned_key_changes_no_softmax(made: tuple[np.ndarray, ...]) -> None:
    q, pages, table, lengths = made
    moved = pages.copy()
    moved[..., LAW.value_dim :] += np.linspace(-1, 1, LAW.width - LAW.value_dim, dtype=np.float32)
    np.testing.assert_allclose(
        attend(q, moved, table, lengths), attend(q, pages, table, lengths), rtol=2e-4, atol=2e-5
    )


def test_heads_are_independent(made: tuple[np.ndarray, ...]) -> None:
    q, *rest = made
    order = np.array([2, 0, 3, 1])
    np.testing.assert_allclose(attend(q[:, order], *rest), attend(*made)[:, order], rtol=1e-6)


def test_pages_in_another_order_give_the_same_bits(made: tuple[np.ndarray, ...]) -> None:
    q, pages, table, lengths = made
    order = np.random.default_rng(1).permutation(len(pages))
    moved = np.empty_like(pages)
    moved[order] = pages
    np.testing.assert_array_equal(
        attend(q, moved, order[table].astype(np.int32), lengths), attend(*made)
    )


def test_tokens_beyond_a_row_may_be_anything(made: tuple[np.ndarray, ...]) -> None:
    q, pages, table, lengths = made
    poisoned = pages.copy()
    poisoned[table[1, 2], 40 % LAW.page_size :] = np.nan
    np.testing.assert_array_equal(attend(q, poisoned, table, lengths), attend(*made))


def test_the_output_has_the_type_of_the_queries(made: tuple[np.ndarray, ...]) -> None:
    q, pages, table, lengths = made
    out = attend(jnp.asarray(q, jnp.bfloat16), jnp.asarray(pages, jnp.bfloat16), table, lengths)
    assert out.dtype == jnp.bfloat16 and out.shape == (*q.shape[:2], LAW.value_dim)


def up_of(heads: int, plain: int, rank: int, value: int, seed: int = 0) -> UpProjections:
    rng = np.random.default_rng(seed)
    keys, values = (rng.standard_normal((heads, n, rank)) for n in (plain, value))
    return UpProjections(jnp.asarray(keys, jnp.float32), jnp.asarray(values, jnp.float32))


@pytest.mark.parametrize(("plain", "turned"), [(5, 3), (4, 0), (1, 6)])
def test_an_absorbed_query_scores_a_latent_as_the_query_scores_its_key(
    plain: int, turned: int
) -> None:
    up, rng = up_of(3, plain, 8, 2), np.random.default_rng(1)
    q = rng.standard_normal((4, 3, plain + turned)).astype(np.float32)
    latent, rope = rng.standard_normal((7, 8)), rng.standard_normal((7, turned))
    keys = np.einsum("sv,nev->sne", latent, np.asarray(up.keys_NEV, np.float64))
    keys = np.concatenate([keys, np.repeat(rope[:, None], 3, axis=1)], axis=-1)
    wanted = np.einsum("tnh,snh->tns", q, keys)
    entry = np.concatenate([latent, rope], axis=-1)
    got = np.einsum("tnw,sw->tns", np.asarray(absorbed(jnp.asarray(q), up), np.float64), entry)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_the_turned_part_of_a_query_passes_as_it_is() -> None:
    q = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 9)), jnp.float32)
    out = absorbed(q, up_of(3, 5, 8, 2))
    assert out.shape == (2, 3, 8 + 4)
    np.testing.assert_array_equal(out[..., 8:], q[..., 5:])


def test_a_sum_of_latents_projects_to_the_sum_of_values() -> None:
    up, rng = up_of(3, 5, 8, 2), np.random.default_rng(2)
    weights, latents = rng.dirichlet(np.ones(6), (4, 3)), rng.standard_normal((6, 8))
    summed = jnp.asarray(np.einsum("tns,sv->tnv", weights, latents), jnp.float32)
    values = np.einsum("sv,nfv->snf", latents, np.asarray(up.values_NFV, np.float64))
    wanted = np.einsum("tns,snf->tnf", weights, values)
    np.testing.assert_allclose(projected(summed, up), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_projections_keep_the_type(dtype: str) -> None:
    up = jax.tree.map(lambda x: x.astype(dtype), up_of(2, 4, 8, 6))
    assert absorbed(jnp.zeros((1, 2, 7), dtype), up).dtype == dtype
    assert projected(jnp.zeros((1, 2, 8), dtype), up).dtype == dtype


@pytest.mark.parametrize(("heads", "tiles"), [(8, 1), (64, 1), (256, 4)])
def test_blocks_are_shared_among_tiles_of_heads(heads: int, tiles: int) -> None:
    made = mosaic_gpu.plan(np.array([10_000, 3], np.int32), heads=heads)
    splits, fields = made.splits_SF.shape
    assert splits == mosaic_gpu.BLOCKS // tiles
    assert fields == SPLIT_FIELDS + tiles, "each tile of heads has a flag of its own"


def test_more_tiles_of_heads_than_blocks_leave_one_split() -> None:
    made = mosaic_gpu.plan(np.array([900], np.int32), heads=256, blocks=2)
    assert made.splits_SF.shape[0] == 1


def test_flags_of_a_plan_start_at_zero() -> None:
    made = mosaic_gpu.plan(np.array([5000, 0, 70], np.int32), heads=128)
    assert not np.any(made.splits_SF[:, -2:])


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=4, max_size=4), st.booleans())
def test_splits_cover_the_tiles_of_all_rows_in_order(lengths: list[int], no_split: bool) -> None:
    made = mosaic_gpu.plan(np.array(lengths, np.int32), heads=16, no_split=no_split)
    low, high = np.asarray(made.splits_SF[:, 0]), np.asarray(made.splits_SF[:, 1])
    assert (high >= low).all() and low[0] == 0
    assert high.max() == sum(-(-n // 64) for n in lengths)
    np.testing.assert_array_equal(low[1:], high[:-1])


def spec(**changed: Any) -> Spec:
    sizes = {"B": 3, "N": 128, "heads": 64, "W": 576, "V": 512, "C": 64}
    return Spec(**(sizes | {"dtype": jnp.bfloat16, "scale": 0.1, "interpret": None} | changed))


@pytest.mark.parametrize(("page", "copies"), [(16, 4), (32, 2), (64, 1), (128, 1)])
def test_a_tile_is_copied_page_by_page_where_pages_are_smaller(page: int, copies: int) -> None:
    assert spec(C=page).copies == copies


@pytest.mark.parametrize("width", [64, 192, 512, 576])
def test_blocks_of_columns_cover_a_width_once(width: int) -> None:
    columns = [c for one in spec().blocks(width) for c in range(one.start, one.start + one.size)]
    assert columns == list(range(width))
    assert all(one.size == BLOCK for one in spec().blocks(width))


@pytest.mark.parametrize("value", [128, 256, 512])
def test_two_consumers_have_half_of_the_value_each(value: int) -> None:
    sides = [spec(V=value).columns(side) for side in (0, 1)]
    assert [(one.start, one.size) for one in sides] == [(0, value // 2), (value // 2, value // 2)]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7)), min_size=3, max_size=3))
def test_each_token_sees_its_prefix_and_itself(rows: list[tuple[int, int]]) -> None:
    prefix, chunk = (np.array(x, np.int32) for x in zip(*rows, strict=True))
    starts, table = np.array([1, 9, 17], np.int32), np.arange(12, dtype=np.int32).reshape(3, 4)
    table_TM, seen_T = token_rows(table, starts, chunk, prefix + chunk, 26)
    wanted, owners = np.zeros(26, int), np.full(26, -1)
    for row in range(3):
        for i in range(chunk[row]):
            wanted[starts[row] + i] = prefix[row] + i + 1
            owners[starts[row] + i] = row
    np.testing.assert_array_equal(seen_T, wanted)
    np.testing.assert_array_equal(np.asarray(table_TM)[owners >= 0], table[owners[owners >= 0]])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=5, max_size=5), st.integers(0, 40))
def test_the_rows_with_fewest_pages_fit_and_the_next_would_not(pages: list[int], room: int) -> None:
    chosen = np.asarray(extend._shortest(np.array(pages, np.int32), room))
    own = np.array(pages)
    assert own[chosen].sum() <= room
    order = np.argsort(own, kind="stable")
    count = int(chosen.sum())
    np.testing.assert_array_equal(np.sort(order[:count]), np.flatnonzero(chosen))
    assert count == 5 or own[order[: count + 1]].sum() > room


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_expanded_pages_lie_one_row_after_another(pages: list[int]) -> None:
    table = np.arange(12, dtype=np.int32).reshape(3, 4) + 50
    page_E, table_RM = (np.asarray(x) for x in extend._pages(table, np.array(pages, np.int32), 13))
    assert page_E.shape == (13,) and (table_RM < 13).all()
    for row, count in enumerate(pages):
        np.testing.assert_array_equal(page_E[table_RM[row, :count]], table[row, :count])
    owned = [table_RM[row, i] for row, count in enumerate(pages) for i in range(count)]
    assert owned == list(range(sum(pages)))


@pytest.mark.parametrize(
    ("tokens", "rows", "pages"),
    [(64, 4, 6), (2048, 64, 128), (4096, 64, 192), (8192, 64, 256), (10000, 64, 313)],
)
def test_short_steps_have_room_for_a_page_more_a_row(tokens: int, rows: int, pages: int) -> None:
    assert extend.room_of(tokens, rows, 64) == pages


@pytest.mark.parametrize(("tokens", "slabs"), [(32, 1), (33, 2)])
def test_absorbed_tokens_come_in_slabs(
    tokens: int, slabs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extend, "SLAB", 32)
    one = np.array([4], np.int32)
    sizes = {"tokens": tokens, "heads": 8, "widths": (96, 64), "page_size": 64, "no_split": True}
    made = extend.plan(np.zeros((1, 2), np.int32), one * 0, one, one, **sizes)
    size = -(-tokens // slabs)
    assert made.absorbed.seen_ST.shape == (slabs, size) and size <= extend.SLAB
    assert made.absorbed.first_S.tolist() == [0, tokens - size][:slabs]
    assert np.asarray(made.absorbed.seen_ST)[0, :5].tolist() == [1, 2, 3, 4, 0]
    assert np.count_nonzero(made.absorbed.seen_ST) == 4


def test_heads_that_are_too_wide_are_absorbed() -> None:
    one = np.array([4], np.int32)
    sizes = {"tokens": 16, "heads": 8, "page_size": 64}
    wide = extend.plan(np.zeros((1, 2), np.int32), one * 0, one, one, widths=(320, 128), **sizes)
    assert wide.expanded is None and wide.absorbed.seen_ST[0, 3] == 4


def test_names_of_cases_are_unique_and_their_inputs_repeat() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for first, second in zip(inputs(CASES[0]).args, inputs(CASES[0]).args, strict=True):
        np.testing.assert_array_equal(first, second)
    assert np.any(inputs(CASES[0]).q != inputs(CASES[0], seed=1).q)


def test_rows_of_a_case_that_are_not_in_use_expect_zeros() -> None:
    made = inputs(CASES[2])
    assert not np.any(made.expected[made.lengths == 0])
    assert np.all(np.any(made.expected[made.lengths > 0], axis=(1, 2)))


@pytest.mark.parametrize("backends", [BACKENDS, EXTEND_BACKENDS], ids=["decode", "extend"])
def test_both_ops_name_the_same_back_ends_and_refuse_others(backends: Any) -> None:
    assert list(backends) == ["reference", "xla", "mosaic_gpu"]
    with pytest.raises(UnknownBackend, match="has no back end 'triton'; choose one of: reference"):
        backends["triton"]
