"""Attention within segments, against every pair of tokens at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.segment_attention import segment_attention

LENGTHS = (1, 130, 7, 60, 128)  # then tokens of padding


def every_pair(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, segment: np.ndarray, window: int | None
) -> np.ndarray:
    """The definition with all scores in memory, in float64."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1).astype(np.float64) for x in (k, v))
    score = 0.3 * np.einsum("tnh,snh->nts", q.astype(np.float64), k)
    place = np.arange(len(segment))
    seen = segment[:, None] == segment[None, :]
    seen &= np.abs(place[:, None] - place[None, :]) <= (len(segment) if window is None else window)
    weight = np.exp(np.where(seen, score, -np.inf))
    return np.einsum("nts,snh->tnh", weight / weight.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("window", [None, 0, 5, 200])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_tokens_see_their_own_segment_within_the_window(window: int | None, kv_heads: int) -> None:
    rng, tokens = np.random.default_rng(0), 400
    segment = np.repeat(np.arange(len(LENGTHS) + 1), [*LENGTHS, tokens - sum(LENGTHS)])
    q = rng.standard_normal((tokens, 4, 8), np.float32)
    k, v = (rng.standard_normal((tokens, kv_heads, 8), np.float32) for _ in "kv")
    found = segment_attention(
        *map(jnp.asarray, (q, k, v, segment)), longest=130, scale=0.3, window=window
    )
    used = sum(LENGTHS)  # padding is one segment, which may be longer than any prompt
    expected = every_pair(q, k, v, segment, window)
    np.testing.assert_allclose(np.asarray(found)[:used], expected[:used], atol=2e-6)
    assert np.isfinite(np.asarray(found)).all()


def test_no_array_has_the_scores_of_all_pairs() -> None:
    tokens, longest = 4096, 128
    x = jax.ShapeDtypeStruct((tokens, 2, 8), jnp.float32)
    segment = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    text = str(
        jax.make_jaxpr(
            lambda q, k, v, s: segment_attention(q, k, v, s, longest=longest, scale=1.0)
        )(x, x, x, segment)
    )
    assert f"{tokens},{tokens}" not in text
