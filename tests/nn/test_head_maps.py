"""What families do to heads before attention, against float64 NumPy; also where heads are stored
wider, ordered otherwise or several times."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.head_maps import (
    Clipped,
    HeadLayerNorm,
    HeadNorm,
    NormedHeads,
    ScaledQueries,
    TurnedNorms,
    WholeRMSNorm,
)
from jaxllm.nn.heads import Heads
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import RMSNorm
from jaxllm.nn.rope import QueryScaledRope, Rotation, StaticRope

TOKENS, EPS = 5, 1e-4
PLAIN = Heads(4, 2, 6)
SHARDED = Heads(4, 2, 6, 4)  # each key head on two shards
WIDER = Heads(4, 2, 6, 1, (0, 2, 4, 1, 3, 5), 10)  # pairs, and four zeros
LAYOUTS = {"plain": PLAIN, "sharded": SHARDED, "wider": WIDER}


def init(dtype: jax.typing.DTypeLike = jnp.float32) -> Init:
    return Init(nnx.Rngs(0), dtype)


def still() -> Rotation:
    return Rotation(jnp.ones((TOKENS, 3)), jnp.zeros((TOKENS, 3)))


def checkpoint(heads: int, seed: int) -> np.ndarray:
    """Rows [T, heads, 6] as the checkpoint numbers their dimensions."""
    return np.random.default_rng(seed).normal(1.0, 2.0, (TOKENS, heads, 6))


def stored(x: np.ndarray, heads: Heads, keys: bool) -> np.ndarray:
    """[T, X, C, H]: the same rows as a layer holds them."""
    order = np.array(heads.key_order or range(heads.dim))
    wide = np.where(order >= 0, x[..., order], 0.0)
    shards = heads.shards // heads.repeat if keys else heads.shards
    wide = wide.reshape(TOKENS, shards, -1, heads.stored_dim)
    return np.repeat(wide, heads.repeat, axis=1) if keys else wide


def filled(norm: HeadNorm, weight: np.ndarray) -> HeadNorm:
    """The norm with the weight that its rule makes of the checkpoint's."""
    (rule,) = norm.rules("n")
    (piece,) = rule.pieces
    assert piece.name == "n.weight" and weight.size == np.prod(piece.source)
    value = np.repeat(piece.arranged(weight.reshape(piece.source)), piece.repeat, axis=0)
    norm.weight[...] = jnp.asarray(value, jnp.float32)
    return norm


def whole(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The definition of `WholeRMSNorm`."""
    mean = (x**2).mean((1, 2), keepdims=True)
    return x / np.sqrt(mean + EPS) * weight


def single(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The definition of `HeadLayerNorm`."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + EPS) * weight


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "definition"), [(WholeRMSNorm, whole), (HeadLayerNorm, single)])
def test_a_norm_of_heads_is_its_definition_in_every_layout(
    kind: type[HeadNorm], definition, layout: str, keys: bool
) -> None:
    heads = LAYOUTS[layout]
    count = heads.kv if keys else heads.query
    x, weight = checkpoint(count, 1), np.random.default_rng(2).normal(1.0, 0.5, (count, 6))
    norm = filled(kind(init(), heads, EPS, keys=keys), weight)
    found = norm(jnp.asarray(stored(x, heads, keys), jnp.float32), DenseContext())
    expected = stored(definition(x, weight), heads, keys)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [WholeRMSNorm, HeadLayerNorm])
def test_norms_of_16_bit_heads_round_once(kind: type[HeadNorm]) -> None:
    norm = kind(init(jnp.bfloat16), PLAIN, EPS, keys=False)
    x = jnp.asarray(stored(checkpoint(4, 3), PLAIN, False) * 100, jnp.bfloat16)
    exact = kind(init(), PLAIN, EPS, keys=False)(x.astype(jnp.float32), DenseContext())
    assert norm(x, DenseContext()).dtype == jnp.bfloat16
    np.testing.assert_array_equal(norm(x, DenseContext()), exact.astype(jnp.bfloat16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_queries_and_keys_are_normed_and_values_stay(layout: str) -> None:
    heads = LAYOUTS[layout]
    module = NormedHeads(init(), heads, EPS, HeadLayerNorm)
    q, k, v = checkpoint(4, 1), checkpoint(2, 2), checkpoint(2, 3)
    one = np.ones((1, 6))
    rows = [stored(q, heads, False), stored(k, heads, True), stored(v, heads, True)]
    rotation = still()
    given = jnp.asarray(np.concatenate(rows, axis=2), jnp.float32)
    found, left = module(given, heads.query_per_shard, rotation, DenseContext())
    expected = [stored(single(q, one), heads, False), stored(single(k, one), heads, True), rows[2]]
    np.testing.assert_allclose(found, np.concatenate(expected, axis=2), rtol=1e-4, atol=1e-5)
    assert left is rotation


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """[T, heads, 6]: dimension i turns together with dimension i + 3."""
    left, right = x[..., :3], x[..., 3:]
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


@pytest.mark.parametrize("width", [None, 10])
def test_heads_turn_before_these_norms_and_not_again(width: int | None) -> None:
    heads = Heads(4, 2, 6, 1, (), width)
    q, k, v = checkpoint(4, 1), checkpoint(2, 2), checkpoint(2, 3)
    weights = np.random.default_rng(4).normal(1.0, 0.5, (2, 6))
    norms = [RMSNorm(init(), heads.stored_dim, EPS, order=heads.key_order) for _ in weights]
    for norm, weight in zip(norms, weights, strict=True):
        (rule,) = norm.rules("n")
        norm.weight[...] = jnp.asarray(rule.pieces[0].arranged(weight), jnp.float32)
    rotation = StaticRope((1.0, 0.3, 0.1))(jnp.arange(TOKENS), None)
    rows = np.concatenate([stored(x, heads, False) for x in (q, k, v)], axis=2)
    found, left = TurnedNorms(6, *norms)(
        jnp.asarray(rows, jnp.float32), 4, rotation, DenseContext()
    )
    cos, sin = (np.asarray(x, np.float64) for x in rotation[:2])
    q, k = rms(turned(q, cos, sin), weights[0]), rms(turned(k, cos, sin), weights[1])
    expected = np.concatenate([stored(x, heads, False) for x in (q, k, v)], axis=2)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(left.cos_TF, np.ones((TOKENS, 3)))
    np.testing.assert_array_equal(left.sin_TF, np.zeros((TOKENS, 3)))


def test_queries_grow_with_the_logarithm_of_their_position() -> None:
    rope = QueryScaledRope(StaticRope((1.0, 0.3, 0.1)), beta=0.5, original=2)
    position = jnp.array([0, 1, 2, 5, 9])
    rotation = rope(position, None)
    factor = 1 + 0.5 * np.log1p(np.array([0, 0, 1, 2, 4]))
    np.testing.assert_allclose(rotation.query_T, factor, rtol=1e-6)
    for mine, plain in zip(rotation[:2], rope.turning(position, None)[:2], strict=True):
        np.testing.assert_array_equal(mine, plain)
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(TOKENS, 1, 8, 6)), jnp.float32)
    found, left = ScaledQueries()(rows, 4, rotation, DenseContext())
    np.testing.assert_allclose(found[:, :, :4], rows[:, :, :4] * factor[:, None, None, None], 1e-6)
    np.testing.assert_array_equal(found[:, :, 4:], rows[:, :, 4:])
    assert left is rotation


def test_rows_are_clipped_on_both_sides() -> None:
    rows, rotation = jnp.array([-9.0, -2.0, 0.5, 2.0, 9.0]).reshape(5, 1, 1, 1), still()
    found, left = Clipped(2.0)(rows, 1, rotation, DenseContext())
    np.testing.assert_array_equal(found.ravel(), [-2.0, -2.0, 0.5, 2.0, 2.0])
    assert left is rotation
