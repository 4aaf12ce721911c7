"""The oracles of the attention cases: sequences in pages, and attention in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.layout import Pages, dense_attention, in_pages

K, H = 2, 3


def sequences(lengths: list[int], seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((length, K, H)).astype(np.float32) for length in lengths]


def read_back(pages: np.ndarray, table: np.ndarray, length: int, size: int) -> np.ndarray:
    """The first `length` tokens of a row `[length, K, H]`, read through its table."""
    places = [(table[j // size], j % size) for j in range(length)]
    return np.array([pages[page, :, offset] for page, offset in places]).reshape(length, K, H)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    size=st.sampled_from([1, 4, 16]),
    spare=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40)
def test_sequences_are_read_back_through_their_tables(
    lengths: list[int], size: int, spare: int, seed: int
) -> None:
    k, v = sequences(lengths, seed), sequences(lengths, seed + 1)
    pages = in_pages(k, v, size, spare, np.nan, seed)
    needs = [-(-length // size) for length in lengths]
    assert pages.table.shape == (len(lengths), max(needs) + spare)
    assert pages.table.min() >= 0 and pages.table.max() < len(pages.k)
    for row, length in enumerate(lengths):
        for pool, wanted in ((pages.k, k[row]), (pages.v, v[row])):
            np.testing.assert_array_equal(read_back(pool, pages.table[row], length, size), wanted)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5), seed=st.integers(0, 2**31))
@settings(max_examples=40)
def test_rows_share_no_page_and_the_rest_of_the_pool_is_poison(
    lengths: list[int], seed: int
) -> None:
    size = 4
    found = in_pages(sequences(lengths, seed), sequences(lengths, seed), size, 1, -7.0, seed)
    own = [
        int(page)
        for row, length in enumerate(lengths)
        for page in found.table[row, : -(-length // size)]
    ]
    assert len(set(own)) == len(own)
    assert len(found.k) == len(own) + 3
    assert (found.k == -7.0).all(axis=(1, 3)).sum() == len(found.k) * size - sum(lengths)


def test_pages_keep_the_type_of_their_sequences() -> None:
    k = [x.astype(np.float16) for x in sequences([3], 0)]
    found = in_pages(k, k, 4, 0, 0.0, 0)
    assert isinstance(found, Pages)
    assert (found.k.dtype, found.v.dtype, found.table.dtype) == (np.float16, np.float16, np.int32)


def attention(
    seed: int, **options: object
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((3, 4, H))
    k, v = rng.standard_normal((2, 7, K, H))
    given = {"scale": 0.5, "window": None, "softcap": None, **options}
    return q, k, v, dense_attention(q, k, v, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_attention_is_the_softmax_of_each_query_over_its_prefix(seed: int) -> None:
    q, k, v, got = attention(seed)
    for i in range(3):
        for head in range(4):
            keys = slice(0, 7 - 3 + i + 1)
            scores = 0.5 * (k[keys, head // 2] @ q[i, head])
            weights = np.exp(scores) / np.exp(scores).sum()
            np.testing.assert_allclose(got[i, head], weights @ v[keys, head // 2], rtol=1e-12)


def test_a_window_of_one_gives_each_query_its_own_value() -> None:
    _, _, v, got = attention(1, window=1)
    np.testing.assert_allclose(got, np.repeat(v[4:], 2, axis=1), rtol=1e-12)


def test_a_window_as_wide_as_the_sequence_hides_nothing() -> None:
    np.testing.assert_array_equal(attention(2, window=7)[3], attention(2)[3])
    assert np.abs(attention(2, window=6)[3][-1] - attention(2)[3][-1]).max() > 1e-6


def test_a_softcap_limits_scores() -> None:
    loose, tight = attention(3, softcap=1e6)[3], attention(3, softcap=1e-9)[3]
    np.testing.assert_allclose(loose, attention(3)[3], rtol=1e-9)
    _, _, v, _ = attention(3)
    np.testing.assert_allclose(tight[2], np.repeat(v.mean(axis=0), 2, axis=0), rtol=1e-6)


def test_a_sink_takes_its_share_of_the_weights() -> None:
    _, _, _, plain = attention(4)
    np.testing.assert_allclose(attention(4, sinks=np.full(4, -np.inf))[3], plain, rtol=1e-12)
    np.testing.assert_allclose(attention(4, sinks=np.full(4, 1e3))[3], 0, atol=1e-12)
    q, k, v, got = attention(4, sinks=np.array([0.3, -1.0, 2.0, 0.0]))
    weights = np.exp(0.5 * (k[:, 1] @ q[2, 2]))
    np.testing.assert_allclose(got[2, 2], weights @ v[:, 1] / (weights.sum() + np.exp(2.0)))
