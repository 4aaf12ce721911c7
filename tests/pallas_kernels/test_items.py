"""Work items of ragged steps against loops over rows and tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.items import (
    chunk_items,
    decode_items,
    pack_chunks,
    pack_decode,
    sinks_of_places,
    unpack_chunks,
    unpack_decode,
)

TOKENS, ROWS = 24, 4
queries_of_an_item = pytest.mark.parametrize("queries", [1, 4, 8, 32])
jitted_items = jax.jit(chunk_items, static_argnums=(3, 4))


@functools.partial(jax.jit, static_argnums=2)
def there_and_back(
    q: jax.Array, rows: tuple[jax.Array, ...], queries: int
) -> tuple[jax.Array, jax.Array]:
    """Queries as items, and these unpacked again."""
    chunks = chunk_items(*rows, TOKENS, queries)
    packed = pack_chunks(q, chunks, kv_heads=3)
    return packed, unpack_chunks(packed, chunks)


@st.composite
def ragged_rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts, lengths and KV lengths of `ROWS` rows whose chunks lie in `TOKENS` tokens, in any
    order and with gaps. A row may have no token."""
    cuts = sorted(draw(st.lists(st.integers(0, TOKENS), min_size=ROWS, max_size=ROWS)))
    lengths = np.diff(cuts, prepend=0).tolist()
    prefixes = draw(st.lists(st.integers(0, 300), min_size=ROWS, max_size=ROWS))
    spare = TOKENS - sum(lengths)
    starts, at = np.zeros(ROWS, np.int32), draw(st.integers(0, spare))
    for row in draw(st.permutations(range(ROWS))):
        starts[row] = at
        at += lengths[row]
    given_lengths = np.array(lengths, np.int32)
    return starts, given_lengths, np.array(prefixes, np.int32) + given_lengths


def wanted_items(
    lengths: np.ndarray, kv_lengths: np.ndarray, queries: int
) -> list[tuple[int, int, int]]:
    """Row, position and keys of each item in use, one row after the other."""
    return [
        (row, kv - length + first, kv - length + min(first + queries, length))
        for row, (length, kv) in enumerate(zip(lengths.tolist(), kv_lengths.tolist(), strict=True))
        for first in range(0, length, queries)
    ]


@queries_of_an_item
@given(rows=ragged_rows())
@settings(max_examples=40)
def test_chunks_are_cut_into_the_items_of_their_rows(
    queries: int, rows: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    chunks = jitted_items(*rows, TOKENS, queries)
    found = list(zip(*(np.asarray(x).tolist() for x in chunks.items), strict=True))
    wanted = wanted_items(rows[1], rows[2], queries)
    assert len(found) == TOKENS // queries + ROWS
    assert found[: len(wanted)] == wanted
    assert {keys for _, _, keys in found[len(wanted) :]} <= {0}, "items not in use see no key"


@queries_of_an_item
@given(rows=ragged_rows())
@settings(max_examples=40)
def test_every_token_of_a_row_has_one_place_and_others_have_none(
    queries: int, rows: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    starts, lengths, _ = rows
    chunks = jitted_items(*rows, TOKENS, queries)
    place, token = np.asarray(chunks.place_T), np.asarray(chunks.token_WQ)
    own = {
        int(t) for start, n in zip(starts, lengths, strict=True) for t in range(start, start + n)
    }
    assert {t for t in range(TOKENS) if place[t] >= 0} == own
    assert len({int(place[t]) for t in own}) == len(own)
    for t in own:
        assert token[place[t] // queries, place[t] % queries] == t
    assert token.min() >= 0 and token.max() < TOKENS, "gathers stay inside the step"


@queries_of_an_item
@given(rows=ragged_rows())
@settings(max_examples=15)
def test_packed_chunks_unpack_to_the_same_queries_and_to_zeros(
    queries: int, rows: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    q = np.random.default_rng(0).standard_normal((TOKENS, 6, 2)).astype(np.float32)
    packed, got = there_and_back(q, rows, queries)
    assert packed.shape == (TOKENS // queries + ROWS, 3, 2 * queries, 2)
    own = np.zeros(TOKENS, bool)
    for start, length in zip(rows[0], rows[1], strict=True):
        own[start : start + length] = True
    np.testing.assert_array_equal(np.asarray(got)[own], q[own])
    assert not np.asarray(got)[~own].any()


def test_a_place_holds_the_query_head_and_token_that_the_page_says() -> None:
    """Place r of KV head k is query head k·G + r // queries of token r % queries."""
    heads, queries = 6, 4
    q = np.arange(8 * heads, dtype=np.float32).reshape(8, heads, 1)
    chunks = chunk_items(*(jnp.array([x], jnp.int32) for x in (0, 8, 8)), 8, queries)
    packed = np.asarray(pack_chunks(jnp.asarray(q), chunks, kv_heads=3))
    for item in range(2):
        for k in range(3):
            for r in range(2 * queries):
                token, head = item * queries + r % queries, k * 2 + r // queries
                assert packed[item, k, r, 0] == q[token, head, 0]


def test_a_decode_item_is_the_newest_token_of_its_row() -> None:
    items = decode_items(jnp.array([1, 0, 17, 300], jnp.int32))
    assert np.asarray(items.row_W).tolist() == [0, 1, 2, 3]
    assert np.asarray(items.position_W).tolist() == [0, 0, 16, 299]
    assert np.asarray(items.keys_W).tolist() == [1, 0, 17, 300]
    assert {x.dtype for x in items} == {jnp.dtype("int32")}


@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), (8, 8), (28, 4), (6, 3)])
@pytest.mark.parametrize("multiple", [1, 8, 16])
def test_packed_decodes_unpack_and_are_padded_with_zeros(
    heads: int, kv_heads: int, multiple: int
) -> None:
    q = np.random.default_rng(1).standard_normal((3, heads, 5)).astype(np.float32)
    packed = pack_decode(jnp.asarray(q), kv_heads, multiple)
    group = heads // kv_heads
    assert packed.shape == (3, kv_heads, -(-group // multiple) * multiple, 5)
    assert not np.asarray(packed)[:, :, group:].any()
    np.testing.assert_array_equal(np.asarray(packed)[:, :, 0], q[:, ::group])
    np.testing.assert_array_equal(np.asarray(unpack_decode(packed, heads)), q)


@pytest.mark.parametrize("queries", [1, 4])
def test_every_place_has_the_sink_of_its_query_head(queries: int) -> None:
    sinks = np.arange(6, dtype=np.float16)
    places = 2 * queries + 3
    found = np.asarray(sinks_of_places(jnp.asarray(sinks), 3, queries, places))
    assert found.shape == (3, places) and found.dtype == np.float32
    for k in range(3):
        for r in range(2 * queries):
            assert found[k, r] == sinks[k * 2 + r // queries]
    assert not found[:, 2 * queries :].any()
    assert sinks_of_places(None, 3, queries, places) is None
