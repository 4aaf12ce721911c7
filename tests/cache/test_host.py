"""Host pages: pinned ones of swapped requests, cached ones, and the order of eviction."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.cache.host import HostTier
from jaxllm.cache.pool import PoolError

A, B, C, D = b"a", b"b", b"c", b"d"


def test_a_tier_that_caches_takes_what_is_evicted_and_finds_chains_from_their_start() -> None:
    tier = HostTier(4, 4)
    places = [tier.save(key) for key in (A, B, C)]
    assert sorted(p for p in places if p is not None) == [0, 1, 2]
    assert tier.find([A, B, D, C]) == places[:2]
    assert tier.find([D, A]) == []
    assert tier.save(A) is None, "it is here already"
    assert tier.used == 3


def test_the_least_recently_used_makes_room() -> None:
    tier = HostTier(2, 2)
    first, second = tier.save(A), tier.save(B)
    tier.find([A])
    assert tier.save(C) == second
    assert tier.find([A]) == [first] and tier.find([B]) == []


def test_what_the_device_had_in_use_until_now_is_not_the_next_to_go() -> None:
    tier = HostTier(2, 2)
    first, second = tier.save(A), tier.save(B)
    assert tier.save(A) is None, "it went to the device, and leaves it now"
    assert tier.save(C) == second
    assert tier.find([A]) == [first]


def test_of_a_chain_the_end_goes_first() -> None:
    tier = HostTier(3, 3)
    first, second, _ = (tier.save(key) for key in (A, B, C))
    tier.find([A, B, C])
    tier.save(D)
    assert tier.find([A, B, C]) == [first, second]


def test_without_a_cache_only_what_is_wanted_is_saved() -> None:
    tier = HostTier(2, 0)
    assert tier.save(A) is None
    tier.pin([A, B])
    assert tier.save(A) is not None
    assert tier.save(C) is None
    tier.unpin([A, B])
    assert tier.used == 0 and tier.find([A]) == []


def test_what_is_kept_is_not_evicted_and_may_take_the_room_of_what_is_cached() -> None:
    tier = HostTier(2, 1)
    tier.pin([A, B])
    tier.save(C)
    assert tier.save(A) is not None and tier.save(B) is not None
    assert tier.find([C]) == [] and tier.used == 2
    assert tier.save(D) is None, "no room"
    tier.pin([D])
    assert tier.save(D) is None
    tier.unpin([A])
    assert tier.find([A]) != [], "it is cached from here on"
    assert tier.save(D) is not None and tier.find([A]) == []


def test_what_two_requests_pin_stays_until_both_unpin_it_and_neither_unpins_twice() -> None:
    tier = HostTier(2, 0)
    tier.pin([A])
    tier.pin([A])
    tier.save(A)
    tier.unpin([A])
    assert tier.find([A])
    tier.unpin([A])
    assert not tier.find([A])
    with pytest.raises(PoolError, match="unpinned, but it is not pinned"):
        tier.unpin([A])


def test_what_is_forgotten_is_gone_though_it_is_kept() -> None:
    tier = HostTier(3, 3)
    tier.pin([A])
    tier.save(A)
    tier.save(B)
    tier.forget([A, D])
    assert tier.find([A]) == [] and tier.find([B]) != []
    tier.clear()
    assert tier.used == 0
    tier.check([[A]])
    tier.unpin([A])
    tier.check()


def test_the_check_finds_lost_pages_and_wrong_keepers() -> None:
    tier = HostTier(2, 2)
    tier.pin([A])
    with pytest.raises(PoolError, match="other prefixes"):
        tier.check()
    tier.check([[A]])
    tier._blank.pop()
    with pytest.raises(PoolError, match="lost or used twice"):
        tier.check([[A]])


@pytest.mark.parametrize(("pages", "cached"), [(0, 0), (2, 3), (2, -1)])
def test_impossible_sizes_are_refused(pages: int, cached: int) -> None:
    with pytest.raises(ValueError, match="cannot cache"):
        HostTier(pages, cached)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 5),
    st.lists(st.tuples(st.sampled_from("sklfpag"), st.integers(0, 6)), max_size=60),
)
def test_any_order_of_calls_keeps_the_accounts(
    pages: int, cached: int, calls: list[tuple[str, int]]
) -> None:
    tier, kept = HostTier(pages, min(cached, pages)), Counter[bytes]()
    here: dict[bytes, int] = {}
    promised: list[tuple[bytes, int]] = []  # may have been forgotten since
    for call, number in calls:
        key, new = b"%d" % number, dict[bytes, int]()
        if call == "s":
            place = tier.save(key)
            new = {} if place is None else {key: place}
        elif call == "k":
            tier.pin([key])
            kept[key] += 1
        elif call == "l" and kept[key]:
            tier.unpin([key])
            kept[key] -= 1
        elif call == "f":
            tier.forget([key])
            assert tier.find([key]) == []
        elif call == "p":
            keys = [b"%d" % each for each in range(number, 7)]
            new, pins = tier.promise(keys)
            kept.update(keys[:pins])
            assert len(tier.find(keys)) == pins and tier.promised >= {*new.values()}
            promised += new.items()
        elif call == "a" and promised:
            arrived, place = promised.pop(number % len(promised))
            waited = tier.is_promised(arrived, place)
            assert tier.arrive(arrived, place) is waited and place not in (
                tier.promised if waited else ()
            )
        elif call == "g":
            found = tier.find([key])
            assert found in ([], [here.get(key)]), "it is where it was saved"
        taken = {*new.values()}
        here = {k: p for k, p in here.items() if p not in taken} | new
        tier.check([[key] * count for key, count in kept.items() if count])


def test_room_is_made_for_what_is_on_its_way_and_nothing_that_is_kept_goes() -> None:
    tier = HostTier(4, 4)
    pages = {name: tier.save(name) for name in (b"a", b"b", b"c")}
    tier.pin([b"b"])
    # The blank one, then that of the least recently used
    promised, pins = tier.promise([b"d", b"e"])
    assert promised == {b"d": pages[b"a"], b"e": 3} and pins == 2
    assert tier.find([b"a"]) == [] and tier.find([b"c"]) == [pages[b"c"]]
    assert tier.promise([b"c", b"f", b"g"]) == ({}, 1), "it is here, and they depend on it"
    tier.check([[b"b"], [b"d", b"e"], [b"c"]])
    assert tier.save(b"h") is None, "promised pages are no room"
    tier.unpin([b"d", b"e"])
    assert tier.find([b"d", b"e"]) == [pages[b"a"], 3]
    assert tier.save(b"h") == 3 and not tier.arrive(b"e", 3), "nobody has waited for it"
    assert tier.arrive(b"d", pages[b"a"]) and not tier.promised
    tier.check([[b"b"], [b"c"]])


def test_what_others_have_left_makes_room_though_the_oldest_page_is_needed() -> None:
    tier = HostTier(4, 4)
    (first, *_) = [tier.save(key) for key in (A, B, C, D)]
    promised, pins = tier.promise([A, b"e", b"f"])
    assert [*promised] == [b"e", b"f"] and pins == 3
    assert tier.find([A]) == [first] and not tier.find([B]) and tier.find([D])
    tier.check([[A, b"e", b"f"]])


def test_contents_for_one_prefix_are_not_those_of_the_next_one_there() -> None:
    tier = HostTier(1, 1)
    assert tier.promise([b"a"]) == ({b"a": 0}, 1)
    tier.forget([b"a"])
    assert tier.promise([b"b"]) == ({b"b": 0}, 1)
    assert not tier.arrive(b"a", 0) and tier.promised == {0}
    assert tier.arrive(b"b", 0) and not tier.arrive(b"b", 0)
