"""The prefix index: what a hash covers, longest hits, and counters."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.cache.prefix import PrefixIndex


def hashes(tokens: list[int], page_size: int = 4, root: bytes = b"model") -> list[bytes]:
    out: list[bytes] = []
    PrefixIndex(page_size, root).extend(out, tokens)
    return out


def lookup(index: PrefixIndex, tokens: list[int]) -> tuple[list[int], list[bytes]]:
    """Pages that hold the start of `tokens`, of which one at least is left to compute, and the
    hashes of all its full pages; counts the query."""
    keys: list[bytes] = []
    index.extend(keys, tokens)
    pages = index.match(keys, max(0, len(tokens) - 1) // index.page_size)
    index.count(len(tokens), len(pages) * index.page_size)
    return pages, keys


def test_only_full_pages_have_a_hash() -> None:
    assert [len(hashes(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_is_sha256_over_the_parent_and_little_endian_token_ids() -> None:
    root = hashlib.sha256(b"jaxllm/root/1;page=2;id=5:model").digest()
    first = hashlib.sha256(
        b"jaxllm/page/1;parent=" + root + b";tokens=" + struct.pack("<2i", 1, 70000)
    ).digest()
    second = hashlib.sha256(
        b"jaxllm/page/1;parent=" + first + b";tokens=" + struct.pack("<2i", 3, 4)
    ).digest()
    assert hashes([1, 70000, 3, 4], page_size=2) == [first, second]


def test_a_hash_covers_every_token_before_its_page() -> None:
    a, b = hashes([1, 2, 3, 4, 5, 6, 7, 8]), hashes([9, 2, 3, 4, 5, 6, 7, 8])
    assert a[0] != b[0] and a[1] != b[1]


def test_equal_pages_at_different_depths_have_different_hashes() -> None:
    first, second = hashes([1, 1, 1, 1, 1, 1, 1, 1])
    assert first != second


@pytest.mark.parametrize(("other"), [{"root": b"other"}, {"root": b"modelx"}, {"root": b""}])
def test_indexes_with_different_roots_share_no_hash(other: dict[str, bytes]) -> None:
    assert not set(hashes([1, 2, 3, 4])) & set(hashes([1, 2, 3, 4], **other))


def root(salt: str | None = None, adapter: bytes | None = None) -> bytes:
    return PrefixIndex(4, b"model").root(salt, adapter)


def test_salts_and_adapters_begin_chains_of_their_own_by_tagged_bytes() -> None:
    everyone = hashlib.sha256(b"jaxllm/root/1;page=4;id=5:model").digest()
    assert root() == everyone
    assert (
        root("ab")
        == hashlib.sha256(
            b"jaxllm/request/1;parent=" + everyone + b";salt=2:ab;adapter=none;owner=none"
        ).digest()
    )
    different = [
        root(),
        root("ab"),
        root("a", b"b"),
        root(None, b"ab"),
        root("none"),
        root("ab;adapter=none"),
        root("a", b";salt=1:a"),
    ]
    different += [
        PrefixIndex(4, b"model").root(salt, None, owner)
        for salt, owner in ((None, "ab"), ("ab", "ab"), ("a", "b"))
    ]
    assert len(set(different)) == len(different)


def test_requests_of_different_salts_find_nothing_of_each_other() -> None:
    index, tokens = PrefixIndex(4, b"model"), [1, 2, 3, 4, 5]
    mine: list[bytes] = []
    index.extend(mine, tokens, index.root("mine", None))
    index.register(mine[0], 7)
    for salt, pages in (("mine", [7]), ("yours", []), (None, [])):
        found: list[bytes] = []
        index.extend(found, tokens, index.root(salt, None))
        assert index.match(found, 1) == pages


def test_what_is_forgotten_is_found_no_more_and_may_be_written_anew() -> None:
    index = PrefixIndex(4, b"model")
    index.register(b"a", 1)
    index.register(b"b", 2)
    index.forget([b"b", b"unknown"])
    assert index.pages == {1: b"a"}
    index.register(b"c", 2)


def test_page_sizes_share_no_hash() -> None:
    assert not set(hashes([1] * 8, page_size=4)) & set(hashes([1] * 8, page_size=8))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.lists(st.integers(0, 40), max_size=3))
def test_hashing_in_parts_equals_hashing_at_once(tokens: list[int], cuts: list[int]) -> None:
    index = PrefixIndex(4, b"model")
    parts: list[bytes] = []
    for end in [*sorted(cuts), len(tokens)]:
        start = 4 * len(parts)
        if start < end:
            index.extend(parts, tokens[start:end])
    assert parts == hashes(tokens)


def test_a_lookup_finds_the_longest_chain_from_the_start() -> None:
    index = PrefixIndex(4, b"model")
    tokens = list(range(20))
    keys = hashes(tokens)
    for i, page in ((0, 7), (1, 5), (3, 6)):  # page 2 of the prefix is missing
        index.register(keys[i], page)
    assert lookup(index, tokens) == ([7, 5], keys)


def test_a_lookup_leaves_a_token_to_compute() -> None:
    index = PrefixIndex(4, b"model")
    tokens = list(range(8))
    for page, key in enumerate(hashes(tokens)):
        index.register(key, page)
    assert lookup(index, tokens)[0] == [0]
    assert lookup(index, [*tokens, 9])[0] == [0, 1]
    assert lookup(index, [])[0] == []


def test_lookups_count_the_tokens_asked_for_and_found() -> None:
    index = PrefixIndex(4, b"model")
    index.register(hashes([1, 2, 3, 4])[0], 0)
    lookup(index, [1, 2, 3, 4, 5])
    lookup(index, [9, 9])
    assert (index.queries, index.hits) == (7, 4)


def test_of_two_pages_with_equal_contents_the_first_stays() -> None:
    index = PrefixIndex(4, b"model")
    index.register(b"key", 1)
    index.register(b"key", 2)
    assert index.pages == {1: b"key"} and 2 not in index
    index.evict(2)
    assert index.match([b"key"], 1) == [1]


def test_registering_a_page_again_changes_nothing() -> None:
    index = PrefixIndex(4, b"model")
    index.register(b"key", 1)
    index.register(b"key", 1)
    assert len(index) == 1


def test_a_page_cannot_hold_two_prefixes() -> None:
    index = PrefixIndex(4, b"model")
    index.register(b"key", 1)
    with pytest.raises(ValueError, match="page 1 already holds another prefix"):
        index.register(b"other", 1)


def test_an_evicted_page_can_hold_another_prefix() -> None:
    index = PrefixIndex(4, b"model")
    index.register(b"key", 1)
    index.evict(1)
    index.evict(1)
    index.register(b"other", 1)
    assert index.match([b"key"], 1) == [] and index.match([b"other"], 1) == [1]


def test_clearing_forgets_everything() -> None:
    index = PrefixIndex(4, b"model")
    index.register(b"key", 1)
    index.clear()
    assert len(index) == 0 and 1 not in index


def test_a_page_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="page_size"):
        PrefixIndex(0, b"")
