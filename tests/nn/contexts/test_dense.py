"""Plain causal attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.nn.contexts.dense import DenseContext
from pallas_kernels.rope_write import HeadRows


def qkv(
    tokens: int, heads: int = 4, kv: int = 2, seed: int = 0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 3)
    return tuple(
        jax.random.normal(key, (tokens, n, 8)) for key, n in zip(keys, (heads, kv, kv), strict=True)
    )


def attend(
    context: DenseContext,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    angles = (jnp.full((len(q), q.shape[-1] // 2), x, jnp.float32) for x in (1, 0))
    rows = HeadRows(
        jnp.concatenate([q, k, v], axis=1),
        *angles,
        bias=None,
        norms=None,
        eps=0.0,
        queries=q.shape[1],
    )
    return context.attend(0, rows, scale=0.5, window=window, softcap=softcap)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_each_token_attends_to_the_window_that_ends_with_itself(
    window: int | None, softcap: float | None
) -> None:
    q, k, v = qkv(9)
    found = attend(DenseContext(), q, k, v, window, softcap)
    for t in range(9):
        first = 0 if window is None else max(0, t - window + 1)
        for n in range(4):
            score = np.asarray(k)[first : t + 1, n // 2] @ np.asarray(q)[t, n] * 0.5
            score = score if softcap is None else softcap * np.tanh(score / softcap)
            weight = np.exp(score - score.max())
            np.testing.assert_allclose(
                found[t, n], weight / weight.sum() @ np.asarray(v)[first : t + 1, n // 2], atol=1e-5
            )


def test_packed_sequences_do_not_see_each_other() -> None:
    q, k, v = qkv(10)
    packed = attend(DenseContext(jnp.array([0] * 4 + [1] * 6)), q, k, v)
    np.testing.assert_allclose(packed[:4], attend(DenseContext(), q[:4], k[:4], v[:4]), atol=1e-6)
    np.testing.assert_allclose(packed[4:], attend(DenseContext(), q[4:], k[4:], v[4:]), atol=1e-6)


@pytest.mark.slow
def test_bfloat16_softmax_is_float32_inside() -> None:
    q, k, v = (x.astype(jnp.bfloat16) for x in qkv(200))
    exact = attend(DenseContext(), *(x.astype(jnp.float32) for x in (q, k, v)))
    found = attend(DenseContext(), q, k, v)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=0.03)


def test_gradients_are_finite_under_jit_and_vmap() -> None:
    q, k, v = (jnp.stack([a, b]) for a, b in zip(qkv(6), qkv(6, seed=1), strict=True))
    segment = jnp.array([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]])

    @jax.jit
    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(lambda s, *x: attend(DenseContext(s), *x))(segment, q, k, v) ** 2)

    gradients = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
    assert all(bool(jnp.isfinite(g).all()) and float(jnp.abs(g).max()) > 0 for g in gradients)


def test_prompt_lengths_follow_segments() -> None:
    assert DenseContext().prompt_length_T is None
    assert DenseContext(jnp.array([0, 0, 1, 1, 1])).prompt_length_T.tolist() == [2, 2, 3, 3, 3]
    assert (
        DenseContext(jnp.array([0, 1, 1]), jnp.array([3] * 3)).prompt_length_T.tolist() == [3] * 3
    )
