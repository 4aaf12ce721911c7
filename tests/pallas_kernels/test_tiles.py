"""Attention by tiles against the softmax in float64, and its promises to the last bit."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import tiles

Q, S, H, TILE = 3, 12, 8, 4


def arrays(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@functools.partial(jax.jit, static_argnames=("softcap", "tile"))
def by_tiles(q: Any, k: Any, v: Any, mask: Any, sinks: Any, *, softcap: Any, tile: int) -> Any:
    """Attention `[Q, H]`, a tile of `tile` keys at a time."""
    carry = tiles.start(q.shape[:-1], q.shape[-1])
    for at in range(0, k.shape[0], tile):
        part = slice(at, at + tile)
        carry = tiles.fold(carry, q, k[part], v[part], mask[:, part], softcap)
    return tiles.finish(carry, sinks)


def dense(q: Any, k: Any, v: Any, mask: Any, sinks: Any, softcap: float | None) -> np.ndarray:
    """The same in float64; a query that sees no key gives zeros."""
    scores = q.astype(np.float64) @ k.astype(np.float64).T
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    weights = np.where(mask, np.exp(scores), 0.0)
    total = weights.sum(axis=1) + (0.0 if sinks is None else np.exp(np.float64(sinks)))
    return weights @ v.astype(np.float64) / np.where(total == 0, 1, total)[:, None]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@given(seed=st.integers(0, 2**31), bits=st.integers(0, 2 ** (Q * S) - 1))
@settings(max_examples=25)
def test_any_mask_gives_the_softmax_over_the_keys_that_a_query_sees(
    softcap: float | None, with_sinks: bool, seed: int, bits: int
) -> None:
    q, k, v, sinks = arrays(seed, (Q, H), (S, H), (S, H), (Q,))
    mask = np.array([bits >> i & 1 for i in range(Q * S)], bool).reshape(Q, S)
    given_sinks = sinks if with_sinks else None
    got = np.asarray(by_tiles(q, k, v, mask, given_sinks, softcap=softcap, tile=TILE))
    wanted = dense(q, k, v, mask, given_sinks, softcap)
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)
    if not with_sinks:
        assert not got[~mask.any(axis=1)].any(), "a query that sees no key gives zeros"


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_large_and_small_scores_neither_overflow_nor_lose_digits(scale: float) -> None:
    q, k, v = arrays(1, (Q, H), (S, H), (S, H))
    mask = np.ones((Q, S), bool)
    got = np.asarray(by_tiles(q * np.float32(scale), k, v, mask, None, softcap=None, tile=TILE))
    scores = q.astype(np.float64) * np.float32(scale) @ k.astype(np.float64).T
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    wanted = weights / weights.sum(axis=1, keepdims=True) @ v
    np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-5)


def test_values_that_no_query_sees_may_be_anything() -> None:
    q, k, v = arrays(2, (Q, H), (S, H), (S, H))
    mask = np.tile(np.arange(S) % 3 == 0, (Q, 1))
    clean = by_tiles(q, k, v, mask, None, softcap=None, tile=TILE)
    for poison in (np.nan, np.inf, -np.inf):
        dirty_k, dirty_v = (np.where(mask[0][:, None], x, np.float32(poison)) for x in (k, v))
        got = by_tiles(q, dirty_k, dirty_v, mask, None, softcap=None, tile=TILE)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(clean))


def test_a_tile_without_a_visible_key_changes_no_bit() -> None:
    q, k, v = arrays(3, (Q, H), (S, H), (S, H))
    mask = np.ones((Q, S), bool)
    short = by_tiles(q, k, v, mask, None, softcap=None, tile=TILE)
    longer_k, longer_v = (np.concatenate([x, np.full_like(x, 7.0)]) for x in (k, v))
    hidden = np.concatenate([mask, np.zeros_like(mask)], axis=1)
    longer = by_tiles(q, longer_k, longer_v, hidden, None, softcap=None, tile=TILE)
    np.testing.assert_array_equal(np.asarray(longer), np.asarray(short))


def test_a_query_gives_the_same_bits_beside_any_other_queries() -> None:
    q, k, v = arrays(4, (Q, H), (S, H), (S, H))
    mask = np.tril(np.ones((Q, S), bool), S - Q)
    together = np.asarray(by_tiles(q, k, v, mask, None, softcap=None, tile=TILE))
    for i in range(Q):
        crowd = np.concatenate([q[i : i + 1], 100 * q[:2]])
        rows = np.concatenate([mask[i : i + 1], mask[:2]])
        alone = np.asarray(by_tiles(crowd, k, v, rows, None, softcap=None, tile=TILE))[0]
        np.testing.assert_array_equal(alone, together[i])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 100, 128, 129])
def test_the_fixed_tree_of_additions_is_a_sum_whose_bits_no_batch_changes(size: int) -> None:
    (x,) = arrays(size, (6, size))
    total = np.asarray(jax.jit(tiles._sum)(x))
    np.testing.assert_allclose(total, x.astype(np.float64).sum(axis=1), rtol=1e-5, atol=1e-5)
    for rows in (slice(0, 1), slice(2, 5)):
        np.testing.assert_array_equal(np.asarray(jax.jit(tiles._sum)(x[rows])), total[rows])


def test_an_infinite_sink_leaves_nothing_and_a_sink_of_minus_infinity_changes_nothing() -> None:
    q, k, v = arrays(5, (Q, H), (S, H), (S, H))
    mask = np.ones((Q, S), bool)
    plain = np.asarray(by_tiles(q, k, v, mask, None, softcap=None, tile=TILE))
    none = np.full(Q, -np.inf, np.float32)
    np.testing.assert_array_equal(
        np.asarray(by_tiles(q, k, v, mask, none, softcap=None, tile=TILE)), plain
    )
    huge = np.full(Q, 1e4, np.float32)
    assert np.abs(np.asarray(by_tiles(q, k, v, mask, huge, softcap=None, tile=TILE))).max() == 0


@pytest.mark.parametrize(("page_size", "pages"), [(8, 16), (16, 8), (128, 1), (256, 1), (48, 2)])
def test_a_tile_has_as_many_pages_as_fit_and_at_least_one(page_size: int, pages: int) -> None:
    assert tiles.pages_per_tile(page_size) == pages


def test_a_table_is_padded_to_whole_tiles_with_page_zero() -> None:
    table = jnp.arange(1, 11, dtype=jnp.int32).reshape(2, 5)
    padded = np.asarray(tiles.padded_table(table, 4))
    assert padded.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 10, 0, 0, 0]]
    assert tiles.padded_table(table, 5).shape == (2, 5)


def test_a_tile_holds_its_pages_tokens_in_order() -> None:
    pages = np.arange(5 * 2 * 4 * 3, dtype=np.float32).reshape(5, 2, 4, 3)  # [P, K, C, H]
    table = jnp.array([[4, 0, 2, 1], [3, 3, 0, 0]], jnp.int32)
    for tile in range(2):
        got = np.asarray(tiles.load_tile(jnp.asarray(pages), table, jnp.int32(tile), 2))
        for row in range(2):
            ids = np.asarray(table)[row, 2 * tile : 2 * tile + 2]
            wanted = np.concatenate([pages[i] for i in ids], axis=1)
            np.testing.assert_array_equal(got[row], wanted)


def test_entries_outside_the_pool_read_some_page_and_do_not_fail() -> None:
    pages = jnp.ones((3, 1, 4, 2))
    got = tiles.load_tile(pages, jnp.array([[7, -1]], jnp.int32), jnp.int32(0), 2)
    assert got.shape == (1, 1, 8, 2) and np.isfinite(np.asarray(got)).all()


def test_tiles_of_scaled_pages_are_multiplied_token_by_token() -> None:
    k, v = (jnp.asarray(x) for x in arrays(6, (4, 2, 4, 3), (4, 2, 4, 3)))
    scales = np.exp2(np.random.default_rng(6).integers(-3, 4, (4, 2, 2, 4))).astype(np.float32)
    table = jnp.array([[3, 1], [0, 2]], jnp.int32)
    got = tiles.load_tiles((k, v), jnp.asarray(scales), table, jnp.int32(0), 2)
    for side, (pool, found) in enumerate(zip((k, v), got, strict=True)):
        wide = pool * scales[:, :, side, :, None]
        wanted = tiles.load_tile(jnp.asarray(wide), table, jnp.int32(0), 2)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    plain = tiles.load_tiles((k, v), None, table, jnp.int32(0), 2)
    np.testing.assert_array_equal(
        np.asarray(plain[1]), np.asarray(tiles.load_tile(jnp.asarray(v), table, jnp.int32(0), 2))
    )
