"""Split plans of decode: each is checked against a plan that plain Python makes of the same rows,
and by running attention along it in float64."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.layout import dense_attention
from pallas_kernels.paged_decode import mosaic_gpu
from pallas_kernels.paged_decode.plan import ROW_FIELDS, SPLIT_FIELDS, DecodePlan, make_plan

TILE = 64
LONGEST = 40 * TILE
planned = jax.jit(
    functools.partial(make_plan, tile=TILE, flags=2),
    static_argnames=("splits", "merge", "no_split"),
)
rows = st.lists(
    st.one_of(
        st.just(0),
        st.integers(1, LONGEST),
        st.sampled_from([1, TILE - 1, TILE, TILE + 1, 2 * TILE, LONGEST]),
    ),
    min_size=8,  # one number of rows, since each compiles
    max_size=8,
)
sizes = st.sampled_from([(5, 1), (5, 3), (13, 1), (13, 2)])
windows = st.sampled_from([None, 1, 100])
merges = st.sampled_from([0, 4, 30])


class Piece(NamedTuple):
    """A run of tiles of one row in one split."""

    split: int
    row: int
    begin: int  # tiles of the row, counted from position 0
    end: int
    owner: int
    is_owner: bool


def plan_of(
    lengths: list[int],
    size: tuple[int, int],
    window: int | None,
    no_split: bool = False,
    merge: int = 0,
) -> DecodePlan:
    """The plan as NumPy arrays."""
    splits, min_tiles = size
    made = planned(
        jnp.asarray(lengths, jnp.int32),
        splits=splits,
        min_tiles=min_tiles,
        window=window,
        merge=merge,
        no_split=no_split,
    )
    return DecodePlan(*(np.asarray(x) for x in made))


def pieces_of(plan: DecodePlan) -> list[Piece]:
    """What a kernel makes of the plan: the same walk over rows, in Python."""
    found = []
    for split, (low, high, r0, r1, *fields) in enumerate(plan.splits_SF.tolist()):
        *first_row, home, _ = fields[: SPLIT_FIELDS - 4]
        for row in range(r0, r1):
            begin, end, _, zero = first_row if row == r0 else plan.rows_B4[row].tolist()
            if end > begin:
                ours = begin >= low
                tiles = max(low, begin) - zero, min(high, end) - zero
                found.append(Piece(split, row, *tiles, split if ours else home, ours))
    return found


def tiles_of(length: int, window: int | None) -> range:
    """Tiles that a row's query sees some token of."""
    first = 0 if window is None else max(length - window, 0)
    return range(first // TILE, -(-length // TILE))


@settings(max_examples=60)
@given(lengths=rows, size=sizes, window=windows, no_split=st.booleans(), merge=merges)
def test_every_tile_of_every_row_is_read_exactly_once(
    lengths: list[int], size: tuple[int, int], window: int | None, no_split: bool, merge: int
) -> None:
    read: dict[int, list[int]] = {row: [] for row in range(len(lengths))}
    for piece in pieces_of(plan_of(lengths, size, window, no_split, merge)):
        assert piece.end > piece.begin, "a piece without tiles would store a row of nothing"
        read[piece.row] += range(piece.begin, piece.end)
    for row, length in enumerate(lengths):
        assert sorted(read[row]) == list(tiles_of(length, window))


@settings(max_examples=60)
@given(lengths=rows, size=sizes, window=windows)
def test_shares_differ_by_one_tile_and_respect_the_smallest(
    lengths: list[int], size: tuple[int, int], window: int | None
) -> None:
    splits, min_tiles = size
    plan = plan_of(lengths, size, window)
    shares = plan.splits_SF[:, 1] - plan.splits_SF[:, 0]
    total = sum(len(tiles_of(length, window)) for length in lengths)
    assert shares.sum() == total and (shares >= 0).all()
    busy = shares[shares > 0]
    if len(busy):
        assert busy.max() - busy.min() <= 1
        assert len(busy) == min(splits, max(1, -(-total // min_tiles)), total)
        assert (shares[: len(busy)] > 0).all(), "splits in use come first"


@settings(max_examples=60)
@given(lengths=rows, size=sizes, window=windows, merge=merges)
def test_every_row_has_one_owner_that_awaits_as_many_followers_as_raise_its_flag(
    lengths: list[int], size: tuple[int, int], window: int | None, merge: int
) -> None:
    plan = plan_of(lengths, size, window, merge=merge)
    pieces = pieces_of(plan)
    raised: dict[int, int] = {}
    for row, length in enumerate(lengths):
        mine = [piece for piece in pieces if piece.row == row]
        assert [piece.is_owner for piece in mine] == [True] * bool(length) + [False] * (
            len(mine) - 1
        )
        owners = {piece.owner for piece in mine}
        assert len(owners) == bool(length)
        # Parts are read one after the other from the owner's next split on
        assert [piece.split for piece in mine] == list(
            range(mine[0].split, mine[0].split + len(mine)) if mine else []
        )
        if len(mine) > 1:
            owner = mine[0].split
            assert owner not in raised, "an owner awaits the followers of one row alone"
            raised[owner] = len(mine) - 1
    awaited = {
        split: int(fields[SPLIT_FIELDS - 1])
        for split, fields in enumerate(plan.splits_SF)
        if fields[SPLIT_FIELDS - 1]
    }
    assert awaited == raised


@settings(max_examples=100)
@given(lengths=rows, size=sizes, window=windows, merge=merges)
def test_rows_are_whole_where_the_longest_share_grows_by_no_more_than_a_merge(
    lengths: list[int], size: tuple[int, int], window: int | None, merge: int
) -> None:
    whole, equal = (plan_of(lengths, size, window, no_split=how) for how in (True, False))
    longest_whole, longest = (
        int((plan.splits_SF[:, 1] - plan.splits_SF[:, 0]).max()) for plan in (whole, equal)
    )
    wanted = whole if merge and longest_whole <= longest + merge else equal
    made = plan_of(lengths, size, window, merge=merge)
    assert pieces_of(made) == pieces_of(wanted)
    np.testing.assert_array_equal(made.splits_SF, wanted.splits_SF)


def test_equal_rows_are_whole_and_a_long_one_is_split() -> None:
    assert all(piece.is_owner for piece in pieces_of(plan_of([640] * 8, (5, 1), None, merge=4)))
    long = pieces_of(plan_of([640] * 7 + [64000], (5, 1), None, merge=4))
    assert not all(piece.is_owner for piece in long)


def test_the_only_row_of_a_batch_is_split_however_long_a_merge_takes() -> None:
    assert len(pieces_of(plan_of([640], (5, 1), None, merge=99))) == 5


@settings(max_examples=40)
@given(lengths=rows, size=sizes, window=windows)
def test_without_splits_every_row_lies_in_one_split_in_order(
    lengths: list[int], size: tuple[int, int], window: int | None
) -> None:
    plan = plan_of(lengths, size, window, no_split=True)
    pieces = pieces_of(plan)
    assert [piece.row for piece in pieces] == [row for row, n in enumerate(lengths) if n]
    assert all(piece.is_owner for piece in pieces)
    assert [piece.split for piece in pieces] == sorted(piece.split for piece in pieces)
    assert not plan.splits_SF[:, SPLIT_FIELDS - 1].any()


@settings(max_examples=40)
@given(lengths=rows, size=sizes, window=windows, no_split=st.booleans())
def test_fields_of_a_splits_first_row_are_those_of_the_row_and_flags_are_zero(
    lengths: list[int], size: tuple[int, int], window: int | None, no_split: bool
) -> None:
    plan = plan_of(lengths, size, window, no_split)
    assert plan.rows_B4.shape == (len(lengths), ROW_FIELDS)
    assert plan.splits_SF.shape == (size[0], SPLIT_FIELDS + 2)
    assert not plan.splits_SF[:, SPLIT_FIELDS:].any()
    np.testing.assert_array_equal(plan.rows_B4[:, 2], lengths)
    for low, high, r0, r1, *rest in plan.splits_SF.tolist():
        if high > low:
            assert rest[:ROW_FIELDS] == plan.rows_B4[r0].tolist()
            assert 0 <= r0 < r1 <= len(lengths)
        else:
            assert r0 == r1 == 0


def merged(
    plan: DecodePlan, q: np.ndarray, k: list[np.ndarray], v: list[np.ndarray], window: int | None
) -> np.ndarray:
    """Attention along the plan in float64: each piece alone, then owners add followers' parts."""
    parts: dict[int, list[tuple[np.ndarray, float]]] = {}
    for piece in pieces_of(plan):
        length = len(k[piece.row])
        first = 0 if window is None else max(length - window, 0)
        seen = slice(max(piece.begin * TILE, first), min(piece.end * TILE, length))
        scores = k[piece.row][seen] @ q[piece.row]
        top = scores.max()
        weights = np.exp(scores - top)
        out = weights @ v[piece.row][seen] / weights.sum()
        parts.setdefault(piece.row, []).append((out, top + np.log(weights.sum())))
    result = np.zeros_like(q)
    for row, found in parts.items():
        sums = np.array([lse for _, lse in found])
        weights = np.exp(sums - sums.max())
        result[row] = weights @ np.array([out for out, _ in found]) / weights.sum()
    return result


@settings(max_examples=25)
@given(lengths=rows, size=sizes, window=windows, no_split=st.booleans(), seed=st.integers(0, 99))
def test_merged_splits_give_attention_over_all_keys(
    lengths: list[int], size: tuple[int, int], window: int | None, no_split: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((len(lengths), 4))
    k, v = ([rng.standard_normal((n, 4)) for n in lengths] for _ in range(2))
    out = merged(plan_of(lengths, size, window, no_split), q, k, v, window)
    for row, length in enumerate(lengths):
        wanted = np.zeros(4)
        if length:
            wanted = dense_attention(
                q[row][None, None],
                k[row][:, None],
                v[row][:, None],
                scale=1.0,
                window=window,
                softcap=None,
            )[0, 0]
        np.testing.assert_allclose(out[row], wanted, atol=1e-12)


def test_rows_that_are_not_in_use_have_no_tiles() -> None:
    plan = plan_of([0, 0, 0], (5, 1), None)
    assert not plan.splits_SF.any() and pieces_of(plan) == []
    assert (plan.rows_B4[:, 0] == plan.rows_B4[:, 1]).all()


def test_one_token_needs_one_split() -> None:
    plan = plan_of([1, 0, 0], (13, 2), None)
    assert pieces_of(plan) == [Piece(0, 0, 0, 1, 0, True)]


def test_a_row_of_exactly_one_tile_does_not_reach_into_a_second() -> None:
    assert [(p.begin, p.end) for p in pieces_of(plan_of([TILE], (5, 1), None))] == [(0, 1)]
    assert [p.end - p.begin for p in pieces_of(plan_of([TILE + 1], (5, 1), None))] == [1, 1]


@pytest.mark.parametrize(
    ("length", "window", "first"),
    [(200, 100, 1), (200, 72, 2), (200, 73, 1), (200, 1, 3), (192, 64, 2), (64, 64, 0), (5, 9, 0)],
)
def test_a_window_starts_at_the_tile_of_its_oldest_token(
    length: int, window: int, first: int
) -> None:
    pieces = pieces_of(plan_of([length], (4, 1), window))
    assert min(piece.begin for piece in pieces) == first
    assert max(piece.end for piece in pieces) == -(-length // TILE)


def test_lengths_of_millions_of_tokens_do_not_overflow() -> None:
    lengths = [2**21, 1, 2**21 - 7, 0, 2**20]
    pieces = pieces_of(plan_of(lengths, (13, 2), None))
    for row, length in enumerate(lengths):
        mine = [piece for piece in pieces if piece.row == row]
        assert sum(piece.end - piece.begin for piece in mine) == -(-length // TILE)
    assert {piece.split for piece in pieces} == set(range(13))


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("cluster", [0, 1, 2, 8])
def test_the_back_ends_plan_has_one_flag_a_block_and_fills_the_card(
    kv_heads: int, cluster: int
) -> None:
    tuning = mosaic_gpu.Tuning(cluster=cluster)
    how: dict[str, Any] = {"heads": 8, "kv_heads": kv_heads, "head_dim": 128, "tuning": tuning}
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32)
    plan = jax.eval_shape(functools.partial(mosaic_gpu.plan, **how), lengths)
    splits, fields = plan.splits_SF.shape
    assert fields == SPLIT_FIELDS + kv_heads * max(1, cluster)
    blocks = splits * kv_heads * max(1, cluster)
    assert blocks <= max(tuning.blocks, kv_heads * cluster)
    # Clusters of 8 leave some multiprocessors of a graphics cluster without one
    least = {0: 0.9, 1: 0.9, 2: 0.9, 8: 0.48}[cluster]
    assert blocks >= least * tuning.blocks


@pytest.mark.parametrize("no_split", [False, True])
def test_the_plan_is_the_same_inside_and_outside_of_a_jit(no_split: bool) -> None:
    lengths = jnp.array([300, 0, 70, 64], jnp.int32)
    how: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 128, "window": 100}
    how |= {"no_split": no_split, "tuning": mosaic_gpu.Tuning(blocks=10)}
    inside = jax.jit(functools.partial(mosaic_gpu.plan, **how))(lengths)
    jax.tree.map(np.testing.assert_array_equal, inside, mosaic_gpu.plan(lengths, **how))


@pytest.mark.parametrize("dtype", ["int32", "int16", "uint8"])
def test_lengths_of_any_integer_type_make_the_same_plan(dtype: str) -> None:
    lengths = np.array([200, 0, 64])
    how: dict[str, Any] = {"tile": TILE, "splits": 3, "min_tiles": 1, "window": 50, "flags": 1}
    made = make_plan(jnp.asarray(lengths, dtype), **how)
    wanted = make_plan(jnp.asarray(lengths, "int32"), **how)
    assert made.splits_SF.dtype == jnp.int32 and made.rows_B4.dtype == jnp.int32
    jax.tree.map(np.testing.assert_array_equal, made, wanted)
