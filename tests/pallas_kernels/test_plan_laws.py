"""Every field of the plans of decode, extend and latent attention, as plain Python makes them of
the same rows. Many batches are planned in one call, and no kernel is compiled."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.draw import mosaic_block
from pallas_kernels.latent_decode import mosaic_gpu as latent_decode
from pallas_kernels.latent_extend import mosaic_gpu as latent_extend
from pallas_kernels.latent_extend.reference import token_rows
from pallas_kernels.paged_decode import mosaic_gpu as paged_decode
from pallas_kernels.paged_decode.plan import ROW_FIELDS
from pallas_kernels.paged_decode.plan import SPLIT_FIELDS as DECODE_FIELDS
from pallas_kernels.paged_decode.plan import make_plan as make_decode
from pallas_kernels.paged_extend.plan import ITEM_FIELDS, Cut
from pallas_kernels.paged_extend.plan import SPLIT_FIELDS as EXTEND_FIELDS
from pallas_kernels.paged_extend.plan import make_plan as make_extend

BATCHES = 300  # of one call
NO_WINDOW = 10**6  # tokens: wider than any row
whole_or_split = pytest.mark.parametrize("no_split", [False, True], ids=["split", "whole"])


class Share(NamedTuple):
    """One split's part of a line of tiles, and the units (rows or heads of items) that it reads."""

    low: int
    high: int
    first: int
    end: int
    owner: int
    followers: int


def shares_of(sizes: list[int], splits: int, min_tiles: int, no_split: bool) -> list[Share]:
    """The shares of units of so many tiles: each tile of the line is dealt on its own."""
    unit_of = [unit for unit, size in enumerate(sizes) for _ in range(size)]
    starts = [sum(sizes[:unit]) for unit in range(len(sizes))]
    total = len(unit_of)
    used = min(splits, max(1, -(-total // min_tiles)))
    cuts = [min(split, used) * total // used for split in range(splits + 1)]
    if no_split:
        begins = {starts[unit] for unit in unit_of} | {total}
        cuts = [min(begin for begin in begins if begin >= cut) for cut in cuts]
    reader = {
        tile: split for split in range(splits) for tile in range(cuts[split], cuts[split + 1])
    }
    found = []
    for split, (low, high) in enumerate(itertools.pairwise(cuts)):
        if low == high:
            found.append(Share(low, high, 0, 0, 0, 0))
            continue
        first, last = unit_of[low], unit_of[high - 1]
        readers = {reader[tile] for tile in range(total) if unit_of[tile] == last}
        followers = len(readers) - 1 if min(readers) == split else 0
        found.append(Share(low, high, first, last + 1, reader[starts[first]], followers))
    return found


# Decode


class Decode(NamedTuple):
    """The rows of one step and how they are cut."""

    lengths: np.ndarray
    tile: int
    min_tiles: int
    window: int


ROWS, SPLITS = 6, 7


@functools.cache
def decode_batches() -> list[Decode]:
    rng = np.random.default_rng(5)
    found = []
    for index in range(BATCHES):
        lengths = rng.integers(0, int(rng.choice([3, 70, 900])), ROWS).astype(np.int32)
        lengths[rng.random(ROWS) < 0.3] = 0  # not in use
        window = int(rng.choice([1, 17, 64, 200, NO_WINDOW]))
        if index < 3:  # nothing at all, one row alone, and whole tiles
            lengths[:] = ([0] * ROWS, [0, 0, 400, 0, 0, 0], [128] * ROWS)[index]
        found.append(Decode(lengths, int(rng.choice([16, 64])), int(rng.integers(1, 6)), window))
    return found


@functools.cache
def decode_plans(no_split: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    def one(lengths: Any, tile: Any, min_tiles: Any, window: Any) -> Any:
        sizes = {"tile": tile, "min_tiles": min_tiles, "window": window}
        return make_decode(lengths, splits=SPLITS, flags=3, no_split=no_split, **sizes)

    columns = (np.array(column, np.int32) for column in zip(*decode_batches(), strict=True))
    rows, splits = (np.asarray(x) for x in jax.jit(jax.vmap(one))(*columns))
    return list(zip(rows, splits, strict=True))


def decode_tiles(case: Decode) -> list[list[int]]:
    """The tiles of each row that hold a token which its query sees."""
    return [
        sorted({token // case.tile for token in range(max(n - case.window, 0), n)})
        for n in case.lengths.tolist()
    ]


@whole_or_split
def test_a_decode_plan_lays_the_seen_tiles_of_all_rows_in_one_line(no_split: bool) -> None:
    for case, (rows, _) in zip(decode_batches(), decode_plans(no_split), strict=True):
        at = 0
        for length, tiles, row in zip(
            case.lengths.tolist(), decode_tiles(case), rows.tolist(), strict=True
        ):
            begin, end, tokens, zero = row
            assert (begin, end, tokens) == (at, at + len(tiles), length)
            assert list(range(begin - zero, end - zero)) == tiles
            at = end


@whole_or_split
def test_a_decode_plan_has_the_shares_owners_and_followers_that_plain_python_counts(
    no_split: bool,
) -> None:
    for case, (_, splits) in zip(decode_batches(), decode_plans(no_split), strict=True):
        sizes = [len(tiles) for tiles in decode_tiles(case)]
        wanted = shares_of(sizes, SPLITS, case.min_tiles, no_split)
        for share, fields in zip(wanted, splits.tolist(), strict=True):
            assert tuple(fields[:4]) == share[:4], case
            assert fields[9] == share.followers, case
            if share.high > share.low:
                assert fields[8] == share.owner, case


@whole_or_split
def test_a_split_of_decode_carries_the_fields_of_its_first_row(no_split: bool) -> None:
    for rows, splits in decode_plans(no_split):
        for low, high, first, *rest in splits.tolist():
            if high > low:
                assert rest[1 : 1 + ROW_FIELDS] == rows[first].tolist()


@whole_or_split
def test_flags_of_a_decode_plan_are_zero_and_as_many_as_asked_for(no_split: bool) -> None:
    for _, splits in decode_plans(no_split):
        assert splits.shape == (SPLITS, DECODE_FIELDS + 3)
        assert not splits[:, DECODE_FIELDS:].any()


def test_followers_of_decode_are_the_splits_that_name_another_as_owner() -> None:
    for _, splits in decode_plans(False):
        busy = splits[splits[:, 1] > splits[:, 0]]
        foreign = sum(int(fields[8] != split) for split, fields in enumerate(busy))
        assert foreign == splits[:, 9].sum()


def test_rows_in_one_piece_have_neither_followers_nor_foreign_owners() -> None:
    for _, splits in decode_plans(True):
        assert not splits[:, 9].any()
        for split, fields in enumerate(splits):
            assert fields[8] == split or fields[1] == fields[0]


def test_a_row_is_read_in_one_piece_or_by_neighbouring_splits() -> None:
    for case, (rows, splits) in zip(decode_batches(), decode_plans(False), strict=True):
        for begin, end, *_ in rows.tolist():
            readers = np.flatnonzero((splits[:, 0] < end) & (splits[:, 1] > begin) & (begin < end))
            assert (np.diff(readers) == 1).all(), case


def test_the_plan_of_an_empty_step_is_zero() -> None:
    for no_split in (False, True):
        rows, splits = decode_plans(no_split)[0]
        assert not rows.any()
        assert not splits[:, [0, 1, 2, 3, 9]].any()


# Extend


class Extend(NamedTuple):
    """The chunks of one step, and its window."""

    starts: np.ndarray
    lengths: np.ndarray
    kv_lengths: np.ndarray
    window: int


class Item(NamedTuple):
    at: int
    low: int
    high: int
    row: int
    position: int
    keys: int
    first: int


CUT = Cut(tokens=90, queries=24, keys=32, units=2, splits=6, min_tiles=3, kv_heads=2)


@functools.cache
def extend_batches() -> list[Extend]:
    rng = np.random.default_rng(6)
    found = []
    for index in range(BATCHES):
        lengths = rng.integers(0, 31, 3) * (rng.random(3) > 0.25) * (index > 0)
        gaps = rng.multinomial(CUT.tokens - lengths.sum(), [0.25] * 4) * (rng.random() > 0.3)
        order, starts = rng.permutation(3), np.zeros(3, int)
        at = 0
        for row, gap in zip(order, gaps[:3], strict=True):
            starts[row] = at + gap
            at += gap + lengths[row]
        prefix = rng.choice([0, 1, 31, 32, 33, 300], 3)
        window = int(rng.choice([1, 20, 100, NO_WINDOW]))
        found.append(Extend(starts, lengths, lengths + prefix, window))
    return found


@functools.cache
def extend_plans(no_split: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    def one(starts: Any, lengths: Any, kv_lengths: Any, window: Any) -> Any:
        cut = CUT._replace(no_split=no_split)
        return make_extend(starts, lengths, kv_lengths, cut=cut, window=window)

    columns = (np.array(column, np.int32) for column in zip(*extend_batches(), strict=True))
    made, splits = (np.asarray(x) for x in jax.jit(jax.vmap(one))(*columns))
    return list(zip(made, splits, strict=True))


def spans_of(case: Extend) -> Iterator[tuple[int, int, int | None]]:
    """The runs of tokens of each row, then those of no row: first token, end, row."""
    owner: list[int | None] = [None] * CUT.tokens
    for row, (start, length) in enumerate(zip(case.starts, case.lengths, strict=True)):
        owner[start : start + length] = [row] * length
        yield int(start), int(start + length), row
    ends = [0, *(int(s + n) for s, n in zip(case.starts, case.lengths, strict=True) if n)]
    for begin in ends:
        end = begin
        while end < CUT.tokens and owner[end] is None:
            end += 1
        yield begin, end, None


def items_of(case: Extend) -> list[Item]:
    """The items of all spans in order."""
    found = []
    for begin, end, row in spans_of(case):
        for low in range(begin, end, CUT.queries):
            high = min(low + CUT.queries, end)
            at = min(low, CUT.tokens - CUT.queries)
            if row is None:
                found.append(Item(at, low, high, 0, at - begin, 0, 0))
                continue
            prefix = int(case.kv_lengths[row] - case.lengths[row])
            oldest = max(prefix + low - begin - case.window + 1, 0)
            keys = prefix + high - begin
            found.append(Item(at, low, high, row, prefix + at - begin, keys, oldest // CUT.keys))
    return found


def tiles_of(item: Item) -> int:
    """Key tiles of a unit; tokens of no row take the time of one."""
    return max(-(-item.keys // CUT.keys) - item.first, 1)


@whole_or_split
def test_an_extend_plan_has_the_items_that_plain_python_cuts(no_split: bool) -> None:
    for case, (made, _) in zip(extend_batches(), extend_plans(no_split), strict=True):
        wanted, at = items_of(case), 0
        assert made.shape[1] == ITEM_FIELDS
        for item, fields in zip(wanted, made.tolist(), strict=False):
            assert (*item, at) == tuple(fields), case
            at += CUT.units * tiles_of(item)
        assert not made[len(wanted) :, :-1].any(), "places that are left over are empty"


@whole_or_split
def test_an_extend_plan_has_the_shares_owners_and_followers_that_plain_python_counts(
    no_split: bool,
) -> None:
    for case, (_, splits) in zip(extend_batches(), extend_plans(no_split), strict=True):
        sizes = [tiles_of(item) for item in items_of(case) for _ in range(CUT.units)]
        wanted = shares_of(sizes, CUT.splits, CUT.min_tiles, no_split)
        for share, fields in zip(wanted, splits.tolist(), strict=True):
            assert tuple(fields[:4]) == share[:4], case
            assert fields[5] == share.followers, case
            if share.high > share.low:
                assert fields[4] == share.owner, case


@whole_or_split
def test_a_split_of_extend_carries_the_fields_of_its_first_item(no_split: bool) -> None:
    for made, splits in extend_plans(no_split):
        assert splits.shape == (CUT.splits, EXTEND_FIELDS + CUT.kv_heads)
        for low, high, first, *rest in splits.tolist():
            if high > low:
                assert rest[3 : 3 + ITEM_FIELDS] == made[first // CUT.units].tolist()


def test_items_of_a_step_cover_every_token_once_and_lie_inside() -> None:
    for made, _ in extend_plans(False):
        written = [token for _, low, high, *_ in made.tolist() for token in range(low, high)]
        assert sorted(written) == list(range(CUT.tokens))
        assert (made[:, 0] >= 0).all() and (made[:, 0] + CUT.queries <= CUT.tokens).all()


def test_no_item_of_a_step_depends_on_where_units_are_cut() -> None:
    for (split, _), (whole, _) in zip(extend_plans(False), extend_plans(True), strict=True):
        np.testing.assert_array_equal(split, whole)


# Latent attention


@functools.cache
def expanded_of(room: int) -> Callable[..., Any]:
    return jax.jit(jax.vmap(lambda pages: latent_extend._shortest(pages, room)))


@pytest.mark.parametrize("room", [0, 5, 12])
def test_rows_are_expanded_from_the_shortest_on_while_their_pages_fit(room: int) -> None:
    pages = np.random.default_rng(room).integers(0, 7, (64, 5)).astype(np.int32)
    for counts, fits in zip(pages.tolist(), np.asarray(expanded_of(room)(pages)), strict=True):
        left, wanted = room, [False] * len(counts)
        for row in sorted(range(len(counts)), key=lambda row: counts[row]):  # a stable sort
            left -= counts[row]
            wanted[row] = left >= 0
        assert fits.tolist() == wanted


def test_expanded_pages_are_those_of_the_rows_one_after_another() -> None:
    room, rng = 9, np.random.default_rng(3)
    table = rng.permutation(20).reshape(4, 5).astype(np.int32)
    counts = np.array([[2, 0, 5, 1], [0, 0, 0, 0], [5, 4, 0, 0], [1, 1, 1, 1]], np.int32)
    place = jax.jit(jax.vmap(lambda own: latent_extend._pages(jnp.asarray(table), own, room)))
    for own, found, tables in zip(counts, *(np.asarray(x) for x in place(counts)), strict=True):
        wanted = [page for row, n in enumerate(own) for page in table[row, :n]]
        assert found[: len(wanted)].tolist() == wanted
        assert (tables >= 0).all() and (tables < room).all()
        for row, n in enumerate(own):
            assert found[tables[row, :n]].tolist() == table[row, :n].tolist()


def test_each_token_of_a_chunk_sees_its_prefix_and_itself() -> None:
    case = extend_batches()[7]
    table = jnp.arange(12).reshape(3, 4)
    rows = (case.starts, case.lengths, case.kv_lengths)
    tables, seen = token_rows(table, *(jnp.asarray(x) for x in rows), tokens=CUT.tokens)
    wanted = [0] * CUT.tokens
    for row, (start, length, keys) in enumerate(zip(*rows, strict=True)):
        for index in range(length):
            wanted[start + index] = int(keys - length + index + 1)
            assert tables[start + index].tolist() == table[row].tolist()
    assert seen.tolist() == wanted


@pytest.mark.parametrize(("heads", "tiles"), [(8, 1), (64, 1), (128, 2)])
def test_heads_of_latent_decode_share_the_grid_by_tiles_of_64(heads: int, tiles: int) -> None:
    lengths = jax.ShapeDtypeStruct((3,), np.int32)
    made = jax.eval_shape(functools.partial(latent_decode.plan, heads=heads), lengths)
    assert made.rows_B4.shape == (3, ROW_FIELDS)
    assert made.splits_SF.shape == (latent_decode.BLOCKS // tiles, DECODE_FIELDS + tiles)


# Sizes


@pytest.mark.parametrize("vocab", [1, 128, 4096, 4097, 151936])
def test_chunks_of_a_draw_cover_all_logits_and_none_is_empty_for_all_warpgroups(
    vocab: int,
) -> None:
    for groups in (1, 2, 4):
        tuning = mosaic_block.Tuning(groups=groups, lines=8)
        spec = mosaic_block.Spec(B=1, V=vocab, banned=0, tuning=tuning, interpret=None)
        covered = spec.steps * spec.size * groups
        assert vocab <= covered < vocab + spec.size * groups
        assert 1 <= spec.candidates <= groups


@pytest.mark.parametrize("itemsize", [1, 2])
def test_query_heads_of_a_decode_are_dealt_to_blocks_that_hold_them(itemsize: int) -> None:
    most = 64 if itemsize == 2 else paged_decode.NARROW_HEADS
    for group in range(1, 129):
        tiles, each = paged_decode.tiles_of(4 * group, 4, itemsize)
        assert (tiles - 1) * each < group <= tiles * each
        assert each <= most
        padded = paged_decode.padded_heads(each)
        assert padded >= max(8, each) and padded & (padded - 1) == 0
        assert padded == 8 or padded < 2 * each
