"""Checkpoints store one map in several ways; all fill the same parameter."""

from __future__ import annotations

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

from jaxllm.nn.attention import Attention
from jaxllm.nn.heads import Heads
from jaxllm.nn.linear import Init, Linear
from jaxllm.nn.norm import OffsetRMSNorm, RMSNorm
from jaxllm.nn.rope import rotary_order
from jaxllm.nn.rules import Layout, Ordered, Piece, Plus, Transposed
from tests.nn.test_rules import filled

WIDTH, DIM = 6, 4


def init() -> Init:
    return Init(nnx.Rngs(0), jnp.float32)


def tensors(heads: Heads) -> dict[str, np.ndarray]:
    """Query, key and value matrices and biases, every number different."""
    rows = {"q": heads.query * DIM, "k": heads.kv * DIM, "v": heads.kv * DIM}
    rng = np.random.default_rng(0)
    return {
        f"{name}.{leaf}": rng.permutation(count * WIDTH)[: count * columns].reshape(shape)
        for name, count in rows.items()
        for leaf, columns, shape in (("weight", WIDTH, (count, WIDTH)), ("bias", 1, (count,)))
    }


def fused(apart: dict[str, np.ndarray], heads: Heads, layout: Layout) -> dict[str, np.ndarray]:
    """The same numbers as a checkpoint with this layout holds them in one tensor."""
    both = {}
    for leaf in ("weight", "bias"):
        parts = [apart[f"{name}.{leaf}"] for name in "qkv"]
        if layout is Layout.GROUPED:
            parts = [part.reshape(heads.kv, -1, *part.shape[1:]) for part in parts]
            whole = np.concatenate(parts, axis=1).reshape(-1, *parts[0].shape[2:])
        elif layout is Layout.FOUR_BLOCKS:
            query, key, value = (part.reshape(4, -1, *part.shape[1:]) for part in parts)
            whole = np.concatenate([query, value, key], axis=1).reshape(-1, *query.shape[2:])
        else:
            whole = np.concatenate(parts)
        both[f"qkv.{leaf}"] = whole.T if layout is Layout.IN_OUT else whole
    return both


@pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.name)
@pytest.mark.parametrize("order", [(), (0, 2, 1, 3)])
@pytest.mark.parametrize("sizes", [(4, 2, 1), (4, 2, 4), (4, 4, 2), (5, 1, 1)])
def test_a_fused_tensor_fills_what_its_parts_would_fill(
    sizes: tuple[int, int, int], order: tuple[int, ...], layout: Layout
) -> None:
    query, kv, shards = sizes
    heads = Heads(query, kv, DIM, shards, order)
    qkv = nnx.eval_shape(lambda: Attention(init(), heads, WIDTH, qkv_bias=True)).qkv
    apart = tensors(heads)
    expected = {rule.parameter: filled(rule, apart) for rule in qkv.rules("q", "k", "v")}
    qkv.layout = layout
    both = fused(apart, heads, layout)
    for rule in qkv.rules("qkv"):
        assert {piece.source for piece in rule.pieces} == {both[rule.pieces[0].name].shape}
        np.testing.assert_array_equal(filled(rule, both), expected[rule.parameter])


def test_a_transposed_map_has_its_inputs_first() -> None:
    linear = Linear(init(), (3,), (4,), ("mlp", "embed"), bias=True)
    linear.layout = Layout.IN_OUT
    weight, bias = linear.rules("x")
    (piece,) = weight.pieces
    assert (piece.source, piece.view, piece.inputs) == ((4, 3), (3, 4), 4)
    stored = np.arange(12).reshape(4, 3)
    np.testing.assert_array_equal(piece.arranged(stored), stored.T)
    assert bias.pieces == (Piece("x.bias", (3,), (3,)),)


def test_only_queries_and_keys_are_ordered() -> None:
    heads = Heads(2, 2, DIM, 1, (0, 2, 1, 3))
    qkv = nnx.eval_shape(lambda: Attention(init(), heads, WIDTH)).qkv
    apart = {name: array for name, array in tensors(heads).items() if name.endswith("weight")}
    (rule,) = qkv.rules("q", "k", "v")
    found = filled(rule, apart)[0]
    for at, name in ((0, "q"), (2, "k")):
        stored = apart[f"{name}.weight"].reshape(2, DIM, WIDTH)
        np.testing.assert_array_equal(found[at : at + 2], stored[:, [0, 2, 1, 3]])
    np.testing.assert_array_equal(found[4:], apart["v.weight"].reshape(2, DIM, WIDTH))


@hypothesis.given(st.integers(1, 16), st.integers(0, 16), st.booleans())
def test_dimensions_that_turn_together_lie_half_a_head_apart(
    pairs: int, passing: int, paired: bool
) -> None:
    turning, dim, half = 2 * pairs, 2 * (pairs + passing), pairs + passing
    order = rotary_order(dim, turning, paired) or tuple(range(dim))
    assert sorted(order) == list(range(dim))
    for i in range(pairs):
        together = (2 * i, 2 * i + 1) if paired else (i, i + pairs)
        assert (order[i], order[i + half]) == together
    assert all(order[i] >= turning and order[i + half] >= turning for i in range(pairs, half))


def test_whole_heads_that_turn_by_halves_keep_their_order() -> None:
    assert rotary_order(8, 8, paired=False) == ()
    assert rotary_order(4, 4, paired=True) == (0, 2, 1, 3)


def test_norms_of_heads_are_ordered_and_offsets_are_added_in_float32() -> None:
    (rule,) = RMSNorm(init(), DIM, 1e-6, "head_dim", (0, 2, 1, 3)).rules("n")
    np.testing.assert_array_equal(rule.pieces[0].arranged(np.arange(4)), [0, 2, 1, 3])
    (rule,) = RMSNorm(init(), DIM, 1e-6, "head_dim", (0, -1, 1, -1)).rules("n")
    assert rule.pieces[0].source == (2,)
    np.testing.assert_array_equal(rule.pieces[0].arranged(np.array([5, 7])), [5, 0, 7, 0])
    norm = OffsetRMSNorm(Init(nnx.Rngs(0), jnp.bfloat16), DIM, 1e-6, order=(0, 2, 1, 3))
    (rule,) = norm.rules("n")
    assert rule.pieces[0].steps == (Ordered((DIM,), 0, (0, 2, 1, 3)), Plus(1.0))
    found = rule.pieces[0].arranged(np.array([0, 1, 2, 2.0**-9], jnp.bfloat16))
    assert (found.dtype, norm.weight.dtype) == (np.float32, np.float32)
    np.testing.assert_array_equal(found, [1, 3, 2, 1 + 2.0**-9])


def test_steps_serve_arrays_of_jax_too() -> None:
    piece = Piece("x", (2, 3), (3, 2), steps=(Transposed(), Plus(1.0)))
    stored = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(piece.arranged(jnp.asarray(stored)), piece.arranged(stored))
