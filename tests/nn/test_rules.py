"""Modules say which checkpoint tensors fill them."""

from __future__ import annotations

import math

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

from jaxllm.nn.attention import Attention, Sinks
from jaxllm.nn.embedding import Embedding
from jaxllm.nn.heads import Heads
from jaxllm.nn.linear import Init, Linear
from jaxllm.nn.mlp import GatedMLP
from jaxllm.nn.norm import RMSNorm
from jaxllm.nn.rules import Piece, Rows, Rule

WIDTH = 6


def init() -> Init:
    return Init(nnx.Rngs(0), jnp.float32)


def filled(rule: Rule, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """The parameter that a rule makes, by the definition of `Piece`."""
    parts = [
        np.repeat(piece.arranged(tensors[piece.name]), piece.repeat, axis=0)
        for piece in rule.pieces
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def stored(rule: Rule) -> dict[str, np.ndarray]:
    """A checkpoint with the tensors of a rule, every number different."""
    tensors, at = {}, 0
    for piece in rule.pieces:
        size = math.prod(piece.source)
        tensors[piece.name] = np.arange(at, at + size).reshape(piece.source)
        at += size
    return tensors


def test_a_plain_map_takes_a_matrix_with_flat_axes() -> None:
    linear = Linear(init(), (WIDTH,), (4, 2), ("embed", "heads", "head_dim"), bias=True)
    weight, bias = linear.rules("o")
    assert weight == Rule("weight", (Piece("o.weight", (WIDTH, 8), (WIDTH, 4, 2)),))
    assert bias == Rule("bias", (Piece("o.bias", (WIDTH,), (WIDTH,)),))


def test_sinks_take_a_tensor_without_a_suffix() -> None:
    (rule,) = Sinks(init(), 4).rules("layers.0.sinks")
    assert rule == Rule("weight", (Piece("layers.0.sinks", (4,), (4,)),))


def test_a_map_without_bias_has_one_rule() -> None:
    linear = Linear(init(), (3,), (4,), ("mlp", "embed"))
    assert [rule.parameter for rule in linear.rules("x")] == ["weight"]


def test_a_fused_map_needs_a_name_for_each_part_or_one_for_all() -> None:
    axes = ("shard", None, None, "embed")
    linear = Linear(init(), (2, 3, 2), (4,), axes, parts=(Rows(1), Rows(2)))
    with pytest.raises(ValueError, match="argument"):
        list(linear.rules("gate", "up", "down"))
    (rule,) = linear.rules("both")
    assert [(p.name, p.source, p.view, p.start) for p in rule.pieces] == [
        ("both.weight", (12, 4), (2, 1, 2, 4), 0),
        ("both.weight", (12, 4), (2, 2, 2, 4), 1),
    ]
    (rule,) = linear.rules("gate", "up")
    assert rule.pieces == (
        Piece("gate.weight", (4, 4), (2, 1, 2, 4)),
        Piece("up.weight", (8, 4), (2, 2, 2, 4), start=1),
    )


def test_norms_and_embeddings_are_stored_as_they_are() -> None:
    assert list(RMSNorm(init(), 4, 1e-6).rules("n")) == [
        Rule("weight", (Piece("n.weight", (4,), (4,)),))
    ]
    assert list(Embedding(init(), 10, 4, None).rules("e")) == [
        Rule("weight", (Piece("e.weight", (10, 4), (10, 4)),))
    ]


@st.composite
def layouts(draw: st.DrawFn) -> Heads:
    """Heads that divide over their shards."""
    shards = draw(st.sampled_from([1, 2, 4, 8]))
    kv = draw(st.sampled_from([1, 2, 3, 4, 8]))
    group = draw(st.integers(1, 3))
    heads = Heads(kv * group * shards, kv, draw(st.sampled_from([2, 4])), shards)
    hypothesis.assume(heads.problem() is None)
    return heads


@hypothesis.given(layouts())
@hypothesis.settings(max_examples=40)
def test_every_shard_gets_its_query_heads_and_the_kv_heads_that_serve_them(heads: Heads) -> None:
    attention = nnx.eval_shape(lambda: Attention(init(), heads, WIDTH, qkv_bias=True))
    for rule in attention.qkv.rules("q", "k", "v"):
        tensors = stored(rule)
        found = filled(rule, tensors)
        assert found.shape == getattr(attention.qkv, rule.parameter).get_value().shape
        query, key, value = (
            tensors[f"{name}.{rule.parameter}"].reshape(-1, heads.dim, *found.shape[3:])
            for name in "qkv"
        )
        group = heads.query // heads.kv
        for x in range(heads.shards):
            first, n = x * heads.query_per_shard, heads.query_per_shard
            np.testing.assert_array_equal(found[x, :n], query[first : first + n])
            serving = [(first + i) // group for i in range(n)]
            own = sorted(set(serving))
            np.testing.assert_array_equal(found[x, n : n + heads.kv_per_shard], key[own])
            np.testing.assert_array_equal(found[x, n + heads.kv_per_shard :], value[own])


@pytest.mark.parametrize("order", [(), (0, 3, 2, 1)])
def test_wider_heads_have_zeros_after_each_half_and_nothing_else_changes(
    order: tuple[int, ...],
) -> None:
    narrow, wide = (
        nnx.eval_shape(
            lambda width=width: Attention(
                init(), Heads(4, 2, 4, 2, order, width), WIDTH, qkv_bias=True
            )
        )
        for width in (None, 10)
    )
    for before, after in zip(
        (*narrow.qkv.rules("q", "k", "v"), *narrow.out.rules("o")),
        (*wide.qkv.rules("q", "k", "v"), *wide.out.rules("o")),
        strict=True,
    ):
        tensors = stored(before)
        one, two = filled(before, tensors), filled(after, tensors)
        axis = -2 if before.pieces[0].name == "q.weight" else -1
        one, two = (np.moveaxis(x, axis, -1) for x in (one + 1, two + 1))  # zeros are ones now
        assert [piece.source for piece in after.pieces] == [p.source for p in before.pieces]
        halves = two.reshape(*two.shape[:-1], 2, 5)
        np.testing.assert_array_equal(halves[..., :2].reshape(one.shape), one)
        assert (halves[..., 2:] == 1).all()


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_every_shard_gets_the_gate_and_up_rows_of_the_same_neurons(shards: int) -> None:
    mlp = nnx.eval_shape(lambda: GatedMLP(init(), WIDTH, 8, shards, "silu", bias=True))
    for rule in mlp.gate_up.rules("gate", "up"):
        tensors = stored(rule)
        found = filled(rule, tensors)
        for x in range(shards):
            part = slice(x * 8 // shards, (x + 1) * 8 // shards)
            for side, name in enumerate(("gate", "up")):
                np.testing.assert_array_equal(
                    found[x, side], tensors[f"{name}.{rule.parameter}"][part]
                )


@hypothesis.given(layouts())
@hypothesis.settings(max_examples=20)
def test_a_rule_uses_every_number_of_the_checkpoint(heads: Heads) -> None:
    attention = nnx.eval_shape(lambda: Attention(init(), heads, WIDTH, out_bias=True))
    for rule in (*attention.qkv.rules("q", "k", "v"), *attention.out.rules("o")):
        tensors = stored(rule)
        found = filled(rule, tensors)
        assert set(found.ravel()) == {n for tensor in tensors.values() for n in tensor.ravel()}
        assert found.size == sum(math.prod(piece.source) * piece.repeat for piece in rule.pieces)
