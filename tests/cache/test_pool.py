"""Page accounting: references, the order of reuse, and the self-check."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.cache.pool import OutOfPages, PagePool, PoolError
from jaxllm.cache.prefix import PrefixIndex


def cached_pool(num_pages: int) -> tuple[PagePool, PrefixIndex, list[int]]:
    """A pool whose pages are all in use and registered, page i under the hash b"i"."""
    index = PrefixIndex(4, b"")
    pool = PagePool(num_pages, 4, index)
    pages = pool.allocate(num_pages)
    for page in pages:
        index.register(b"%d" % page, page)
    return pool, index, pages


def test_a_fresh_pool_hands_out_every_page_once() -> None:
    pool = PagePool(5, 16)
    assert (pool.free, pool.usage) == (5, 0)
    assert sorted(pool.allocate(2) + pool.allocate(3)) == [0, 1, 2, 3, 4]
    assert (pool.free, pool.usage) == (0, 1)


def test_asking_for_more_than_is_free_hands_out_nothing() -> None:
    pool = PagePool(3, 16)
    pool.allocate(1)
    with pytest.raises(OutOfPages, match="3 KV pages are needed, but 2 of 3 are free"):
        pool.allocate(3)
    assert pool.free == 2


def test_a_reset_takes_everything_back_whatever_was_true() -> None:
    pool, index, pages = cached_pool(3)
    pool.release(pages[:1])
    pool._references[2] = 7
    pool.reset()
    pool.check()
    assert (pool.free, len(index)) == (3, 0)


def test_a_released_page_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = PagePool(2, 16)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.release(pages)
    assert pool.free == 1 and pool.references(pages[0]) == 1
    pool.release(pages)
    assert pool.free == 2


def test_releasing_a_free_page_is_an_error() -> None:
    pool = PagePool(2, 16)
    with pytest.raises(PoolError, match="page 1 is released, but no table holds it"):
        pool.release([1])


def test_sharing_a_blank_page_is_an_error() -> None:
    pool = PagePool(2, 16)
    with pytest.raises(PoolError, match="page 0 is shared, but no table holds it"):
        pool.share([0])


def test_a_released_page_with_a_hash_stays_findable_until_it_is_handed_out() -> None:
    pool, index, pages = cached_pool(1)
    pool.release(pages)
    assert index.match([b"0"], 1) == [0]
    pool.allocate(1)
    assert index.match([b"0"], 1) == []


def test_a_cached_page_can_be_taken_back_into_use() -> None:
    pool, index, pages = cached_pool(2)
    pool.release(pages)
    pool.share([0])
    assert pool.free == 1
    assert pool.allocate(1) == [1]
    assert index.match([b"0"], 1) == [0]
    pool.check([[0], [1]])


def test_cached_pages_are_evicted_least_recently_released_first() -> None:
    pool, _, _ = cached_pool(4)
    for page in (2, 0, 3, 1):
        pool.release([page])
    assert pool.allocate(4) == [2, 0, 3, 1]


def test_use_makes_a_cached_page_recent_again() -> None:
    pool, _, pages = cached_pool(3)
    pool.release(pages)
    pool.share([0])
    pool.release([0])
    assert pool.allocate(3) == [1, 2, 0]


def test_a_prefix_released_tail_first_keeps_its_head_longest() -> None:
    pool, index, pages = cached_pool(3)
    pool.release(reversed(pages))
    pool.allocate(1)
    assert index.match([b"0", b"1", b"2"], 3) == [0, 1]


def test_blank_pages_are_handed_out_before_cached_ones() -> None:
    index = PrefixIndex(4, b"")
    pool = PagePool(3, 4, index)
    index.register(b"0", *pool.allocate(1))
    pool.release([0])
    assert sorted(pool.allocate(2)) == [1, 2]
    assert 0 in index


def test_pages_forgotten_by_the_index_are_still_handed_out() -> None:
    pool, index, pages = cached_pool(3)
    pool.release(pages)
    index.clear()
    pool.check()
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_an_index_of_another_page_size_is_refused() -> None:
    with pytest.raises(ValueError, match="pages of 8 tokens, the pool of 4"):
        PagePool(2, 4, PrefixIndex(8, b""))


@pytest.mark.parametrize(("pages", "size"), [(0, 4), (4, 0)])
def test_a_pool_of_nothing_is_refused(pages: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(pages, size)


def test_pages_for_rounds_up() -> None:
    pool = PagePool(1, 4)
    assert [pool.pages_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_the_check_finds_a_leaked_page() -> None:
    pool = PagePool(3, 4)
    pool.allocate(1)
    with pytest.raises(PoolError, match="references differ from page tables"):
        pool.check([])


def test_the_check_finds_a_table_with_a_page_that_is_free() -> None:
    with pytest.raises(PoolError, match="references differ from page tables"):
        PagePool(3, 4).check([[1]])


def test_the_check_finds_a_page_twice_in_one_table() -> None:
    pool = PagePool(3, 4)
    pages = pool.allocate(1)
    pool.share(pages)
    with pytest.raises(PoolError, match="holds a page twice"):
        pool.check([pages * 2])


def test_the_check_finds_a_page_outside_the_pool() -> None:
    with pytest.raises(PoolError, match="references differ"):
        PagePool(3, 4).check([[7]])


def test_the_check_finds_a_page_that_is_free_and_used() -> None:
    pool = PagePool(3, 4)
    pages = pool.allocate(1)
    pool._blank.append(pages[0])
    with pytest.raises(PoolError, match="free and used"):
        pool.check([pages])


def test_the_check_finds_a_lost_page() -> None:
    pool = PagePool(3, 4)
    pool._blank.pop()
    with pytest.raises(PoolError, match="neither free nor used: \\[0\\]"):
        pool.check()


def test_the_check_finds_a_blank_page_that_the_index_still_offers() -> None:
    index = PrefixIndex(4, b"")
    pool = PagePool(3, 4, index)
    index.register(b"key", 2)
    with pytest.raises(PoolError, match="hold nothing: \\[2\\]"):
        pool.check()


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7), st.integers(0, 5)), max_size=40),
)
def test_any_order_of_holding_and_letting_go_keeps_the_books(
    num_pages: int, moves: list[tuple[int, int, int]]
) -> None:
    index = PrefixIndex(4, b"")
    pool = PagePool(num_pages, 4, index)
    tables: list[list[int]] = []
    for move, number, key in moves:
        if move == 0 and number <= pool.free:
            tables.append(pool.allocate(number))
        elif move == 1 and tables:
            pool.release(reversed(tables.pop(number % len(tables))))
        elif move == 2 and tables and tables[number % len(tables)]:
            page = tables[number % len(tables)][0]
            if page not in index:
                index.register(b"%d" % key, page)
        elif move == 3:
            pages = index.match([b"%d" % key], 1)
            pool.share(pages)
            tables.append(pages)
        pool.check(tables)
    for table in tables:
        pool.release(table)
    pool.check()
    assert pool.free == num_pages


def test_pages_behind_a_window_are_evicted_first_as_long_as_they_are_as_many() -> None:
    pool, _, _ = cached_pool(6)
    pool.release([5, 4])
    pool.release_out_of_window([0, 1, 2, 3])
    assert pool.free == 6
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(3) == [5, 3, 4]


def test_a_page_behind_a_window_can_be_taken_back_into_use_and_is_then_like_others() -> None:
    pool, index, _ = cached_pool(3)
    pool.release_out_of_window([0, 1])
    pool.share([0])
    pool.check([[0], [2]])
    pool.release([0])
    pool.check([[2]])
    assert pool.allocate(1) == [1] and index.find(b"0") == 0


def test_the_map_of_a_pool_counts_held_cached_and_shared_pages_in_each_cell() -> None:
    pool, _, pages = cached_pool(10)
    pool.release(pages[2:9])
    pool.share(pages[:1] + pages[:1])
    per_cell, cells = pool.occupancy(4)
    assert per_cell == 3
    assert cells.tolist() == [[2, 0, 0, 1], [1, 3, 3, 0], [3, 0, 0, 1]]
    assert pool.occupancy(1000)[1].shape == (3, 10)


@given(st.integers(1, 300), st.integers(1, 40), st.data())
@settings(max_examples=50, deadline=None)
def test_a_map_of_any_size_has_every_page_once(
    num_pages: int, cells: int, data: st.DataObject
) -> None:
    pool, _, pages = cached_pool(num_pages)
    pool.release(pages[: data.draw(st.integers(0, num_pages))])
    per_cell, (held, cached, most) = pool.occupancy(cells)
    assert len(held) == -(-num_pages // per_cell) <= cells
    assert int(held.sum() + cached.sum()) == num_pages
    assert int(cached.sum()) == pool.free
    assert ((most > 0) == (held > 0)).all()
