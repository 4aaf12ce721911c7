"""Split plans of extend: each is checked against the tokens, keys and units that plain Python
counts for the same rows."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_extend import mosaic_gpu
from pallas_kernels.paged_extend.plan import (
    ITEM_FIELDS,
    SPLIT_FIELDS,
    Cut,
    ExtendPlan,
    make_plan,
)

TOKENS, KEYS = 200, 64


class Row(NamedTuple):
    start: int
    length: int
    prefix: int


class Work(NamedTuple):
    """One unit's key tiles in one split."""

    split: int
    unit: int
    begin: int
    end: int
    ours: bool
    merges: int


@functools.cache
def planned(queries: int, units: int, no_split: bool) -> Any:
    cut = Cut(TOKENS, queries, KEYS, units, splits=7, min_tiles=2, kv_heads=2, no_split=no_split)
    return jax.jit(functools.partial(make_plan, cut=cut))


def plan_of(
    rows: list[Row], cut: tuple[int, int], window: int | None, no_split: bool = False
) -> ExtendPlan:
    starts, lengths, prefixes = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    made = planned(*cut, no_split)(starts, lengths, lengths + prefixes, window=window)
    return ExtendPlan(*(np.asarray(x) for x in made))


@st.composite
def batches(draw: Any) -> list[Row]:
    """Three rows in order with gaps between them; some are not in use."""
    rows, at = [], 0
    for left in (3, 2, 1):
        at += draw(st.sampled_from([0, 0, 1, 17]))
        most = (TOKENS - at) // left - 20
        length = draw(st.one_of(st.just(0), st.just(1), st.integers(0, max(most, 0))))
        rows.append(Row(at, length, draw(st.sampled_from([0, 1, 63, 64, 500]))))
        at += length
    return draw(st.permutations(rows))


cuts = st.sampled_from([(128, 1), (36, 3)])
windows = st.sampled_from([None, 100])


def items_of(plan: ExtendPlan) -> list[dict[str, int]]:
    names = ("at", "low", "high", "row", "position", "keys", "first", "line")
    return [dict(zip(names, map(int, fields), strict=True)) for fields in plan.items_I8]


def work_of(plan: ExtendPlan, units: int) -> list[Work]:
    """What a kernel makes of the plan: the same walk over units, in Python."""
    found = []
    for split, fields in enumerate(plan.splits_SF.tolist()):
        low, high, u0, u1, _, followers = fields[:6]
        item = dict(zip(items_of(plan)[0], fields[6:SPLIT_FIELDS], strict=True))
        for unit in range(u0, u1):
            if unit > u0:
                item = items_of(plan)[unit // units]
            last = -(-item["keys"] // KEYS)
            tiles = max(last - item["first"], 1)
            there = item["line"] + unit % units * tiles
            begin = item["first"] + max(low - there, 0)
            end = min(item["first"] + high - there, last)
            ours = there >= low
            merges = followers if ours and there + tiles > high else 0
            found.append(Work(split, unit, begin, end, ours, merges))
    return found


@pytest.mark.slow
@settings(max_examples=50)
@given(rows=batches(), cut=cuts, window=windows)
def test_every_token_belongs_to_one_item_of_its_row_or_to_none(
    rows: list[Row], cut: tuple[int, int], window: int | None
) -> None:
    owner = np.full(TOKENS, -2)
    for item in items_of(plan_of(rows, cut, window)):
        own = slice(item["low"], item["high"])
        assert 0 <= item["at"] <= item["low"] or item["low"] == item["high"]
        assert item["high"] <= item["at"] + cut[0]
        assert (owner[own] == -2).all(), "two items store the same token"
        owner[own] = item["row"] if item["keys"] else -1
    wanted = np.full(TOKENS, -1)
    for number, row in enumerate(rows):
        wanted[row.start : row.start + row.length] = number
    np.testing.assert_array_equal(owner, wanted)


@settings(max_examples=50)
@given(rows=batches(), cut=cuts, window=windows)
def test_an_items_last_query_sees_the_keys_up_to_itself(
    rows: list[Row], cut: tuple[int, int], window: int | None
) -> None:
    for item in items_of(plan_of(rows, cut, window)):
        if not item["keys"]:
            continue
        row = rows[item["row"]]
        before_chunk = row.prefix - row.start
        assert item["position"] == before_chunk + item["at"]
        assert item["keys"] == before_chunk + item["high"]
        oldest = before_chunk + item["low"] - ((window or 10**6) - 1)
        assert item["first"] == max(oldest, 0) // KEYS


@settings(max_examples=50)
@given(rows=batches(), cut=cuts, window=windows, no_split=st.booleans())
def test_every_key_tile_of_every_unit_is_read_exactly_once(
    rows: list[Row], cut: tuple[int, int], window: int | None, no_split: bool
) -> None:
    plan = plan_of(rows, cut, window, no_split)
    items, units = items_of(plan), cut[1]
    read: dict[int, list[int]] = {}
    for work in work_of(plan, units):
        read.setdefault(work.unit, []).extend(range(work.begin, work.end))
    for number, item in enumerate(items):
        for unit in range(number * units, (number + 1) * units):
            if item["high"] > item["low"]:
                assert read.pop(unit) == list(range(item["first"], -(-item["keys"] // KEYS)))
    assert not read, "units that do not exist"


@settings(max_examples=50)
@given(rows=batches(), cut=cuts, window=windows, no_split=st.booleans())
def test_every_unit_has_one_owner_which_merges_what_followers_leave(
    rows: list[Row], cut: tuple[int, int], window: int | None, no_split: bool
) -> None:
    plan = plan_of(rows, cut, window, no_split)
    by_unit: dict[int, list[Work]] = {}
    for work in work_of(plan, cut[1]):
        by_unit.setdefault(work.unit, []).append(work)
    for found in by_unit.values():
        assert [work.ours for work in found] == [True] + [False] * (len(found) - 1)
        assert found[0].merges == len(found) - 1
        owner = found[0].split
        assert [work.split for work in found] == list(range(owner, owner + len(found)))
        for follower in found[1:]:
            home = plan.splits_SF[follower.split, 4]
            assert home == owner, "a follower raises the flag of another split"
        assert not no_split or len(found) == 1


@settings(max_examples=50)
@given(rows=batches(), cut=cuts, window=windows)
def test_shares_differ_by_one_tile(
    rows: list[Row], cut: tuple[int, int], window: int | None
) -> None:
    plan = plan_of(rows, cut, window)
    shares = plan.splits_SF[:, 1] - plan.splits_SF[:, 0]
    busy = shares[shares > 0]
    assert busy.max() - busy.min() <= 1
    assert shares[: len(busy)].all() and not shares[len(busy) :].any()
    assert not plan.splits_SF[:, SPLIT_FIELDS:].any(), "flags start at zero"
    assert plan.splits_SF.shape == (7, SPLIT_FIELDS + 2)
    assert plan.items_I8.shape[1] == ITEM_FIELDS


@settings(max_examples=25)
@given(rows=batches(), cut=cuts)
def test_items_do_not_depend_on_how_the_line_is_cut(rows: list[Row], cut: tuple[int, int]) -> None:
    split, together = (plan_of(rows, cut, None, no_split) for no_split in (False, True))
    np.testing.assert_array_equal(split.items_I8, together.items_I8)
    assert split.splits_SF[:, 1].max() == together.splits_SF[:, 1].max()


def test_a_step_without_rows_in_use_zeroes_all_its_tokens() -> None:
    plan = plan_of([Row(0, 0, 0), Row(0, 0, 40), Row(9, 0, 0)], (36, 1), None)
    items = [item for item in items_of(plan) if item["high"] > item["low"]]
    assert all(item["keys"] == 0 for item in items)
    assert sum(item["high"] - item["low"] for item in items) == TOKENS


def test_one_token_is_one_item_of_one_tile() -> None:
    rows = [Row(0, 1, 0), Row(1, 0, 0), Row(1, 0, 0)]
    live = [item for item in items_of(plan_of(rows, (36, 1), None)) if item["keys"]]
    assert [(item["low"], item["high"], item["keys"], item["first"]) for item in live] == [
        (0, 1, 1, 0)
    ]


def test_an_item_at_the_end_of_the_array_is_moved_back_inside() -> None:
    rows = [Row(TOKENS - 5, 5, 70), Row(0, 0, 0), Row(0, 0, 0)]
    (item,) = [item for item in items_of(plan_of(rows, (36, 1), None)) if item["keys"]]
    assert item["at"] == TOKENS - 36 and (item["low"], item["high"]) == (TOKENS - 5, TOKENS)
    assert item["position"] == 70 - (36 - 5) and item["keys"] == 75


@pytest.mark.parametrize(
    ("tokens", "group", "groups", "share"),
    [
        (1, 7, 2, 7),
        (512, 7, 2, 7),
        (513, 7, 2, 1),
        (64, 40, 1, 20),
        (64, 64, 2, 32),
        (64, 1, 2, 1),
        (2048, 8, 2, 1),
        (100, 5, 1, 5),
    ],
)
def test_heads_share_tiles_in_short_steps_alone(
    tokens: int, group: int, groups: int, share: int
) -> None:
    tuning = mosaic_gpu.Tuning(groups=groups)
    assert mosaic_gpu.shared_heads(tokens, group, tuning) == share
    assert group % share == 0 and share <= mosaic_gpu.MOST_SHARED


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens"),
    [
        pytest.param(*each, tokens, marks=[] if tokens in fast else pytest.mark.slow)
        for *each, fast in ((14, 2, (5, 3000)), (32, 8, (100,)), (8, 8, (600,)))
        for tokens in (5, 100, 600, 3000)
    ],
)
def test_the_back_ends_plan_covers_all_tokens_with_units_of_all_heads(
    heads: int, kv_heads: int, tokens: int
) -> None:
    tuning = mosaic_gpu.Tuning()
    ints = (jnp.array([x], jnp.int32) for x in (0, tokens, tokens + 1000))
    how: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": 128}
    plan = jax.jit(functools.partial(mosaic_gpu.plan, tokens=tokens, tuning=tuning, **how))(*ints)
    share = mosaic_gpu.shared_heads(tokens, heads // kv_heads, tuning)
    assert plan.splits_SF.shape == (tuning.blocks // kv_heads, SPLIT_FIELDS + kv_heads)
    stored = sum(item["high"] - item["low"] for item in items_of(plan))
    assert stored == tokens
    assert heads // kv_heads % share == 0
    units = heads // kv_heads // share
    items = sum(item["high"] > item["low"] for item in items_of(plan))
    assert plan.splits_SF[:, 3].max() == items * units


@pytest.mark.parametrize("window", [1, 64, 65, 1000])
def test_a_window_leaves_out_tiles_that_no_query_of_an_item_sees(window: int) -> None:
    rows = [Row(0, 40, 1000), Row(40, 0, 0), Row(40, 0, 0)]
    for item in items_of(plan_of(rows, (36, 3), window)):
        if item["keys"]:
            oldest_seen = 1000 + item["low"] - window + 1
            assert item["first"] == max(oldest_seen, 0) // KEYS
            assert item["first"] * KEYS <= max(oldest_seen, 0)
