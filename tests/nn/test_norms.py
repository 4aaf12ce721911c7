"""Norms of every kind against their definitions, what fills their weights, and blocks that norm
sums instead of inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.cache.collective import ALONE
from jaxllm.nn.blocks import Block, Carry, ParallelBlock, ResidualNormBlock
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.embedding import Embedding
from jaxllm.nn.linear import Init, OutputHead
from jaxllm.nn.logits import Scale, Softcap
from jaxllm.nn.norm import BareLayerNorm, LayerNorm, NoNorm, Norm, OffsetRMSNorm, RMSNorm
from jaxllm.nn.rope import NoRope, StaticRope

WIDTH, TOKENS, EPS = 8, 5, 1e-3


def init(dtype: jax.typing.DTypeLike = jnp.float32) -> Init:
    return Init(nnx.Rngs(0), dtype)


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


WEIGHT, BIAS = np.asarray(random(WIDTH, seed=7)), np.asarray(random(WIDTH, seed=8))


def scaled(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)


def standard(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPS)


type Made = tuple[Norm, Callable[[np.ndarray], np.ndarray]]


def made(kind: str, dtype: jax.typing.DTypeLike = jnp.float32) -> Made:
    """A norm whose checkpoint holds WEIGHT and BIAS, and its definition."""
    kinds: dict[str, Callable[[], Made]] = {
        "none": lambda: (NoNorm(), lambda x: x),
        "rms": lambda: (RMSNorm(init(dtype), WIDTH, EPS), lambda x: scaled(x) * WEIGHT),
        "offset": lambda: (
            OffsetRMSNorm(init(dtype), WIDTH, EPS),
            lambda x: scaled(x) * (1 + WEIGHT),
        ),
        "layer": lambda: (
            LayerNorm(init(dtype), WIDTH, EPS),
            lambda x: standard(x) * WEIGHT + BIAS,
        ),
        "unbiased": lambda: (
            LayerNorm(init(dtype), WIDTH, EPS, bias=False),
            lambda x: standard(x) * WEIGHT,
        ),
        "bare": lambda: (BareLayerNorm(init(dtype), WIDTH, EPS), standard),
    }
    norm, definition = kinds[kind]()
    for rule in norm.rules("n") if hasattr(norm, "rules") else ():
        (piece,) = rule.pieces
        stored = {"n.weight": WEIGHT, "n.bias": BIAS}[piece.name]
        parameter = getattr(norm, rule.parameter)
        parameter[...] = jnp.asarray(piece.arranged(stored), parameter.dtype)
    return norm, definition


KINDS = ("none", "rms", "offset", "layer", "unbiased", "bare")


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_is_its_definition(kind: str) -> None:
    norm, definition = made(kind)
    x = random(TOKENS, WIDTH) * 3 + 1
    np.testing.assert_allclose(norm(x), definition(np.asarray(x, np.float64)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_adds_what_came_before_to_the_stream_first(kind: str) -> None:
    norm, definition = made(kind)
    x, delta = random(TOKENS, WIDTH), random(TOKENS, WIDTH, seed=1)
    total, normed = norm.add(x, delta, DenseContext())
    np.testing.assert_allclose(total, x + delta, rtol=1e-6)
    np.testing.assert_allclose(
        normed, definition(np.asarray(x + delta, np.float64)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kind", ["rms", "offset", "layer", "unbiased", "bare"])
def test_16_bit_streams_are_normed_in_float32_and_rounded_once(kind: str) -> None:
    norm, _ = made(kind, jnp.bfloat16)
    x = (random(TOKENS, WIDTH) * 300).astype(jnp.bfloat16)
    wide = nnx.clone(norm)
    for _, parameter in nnx.iter_graph(wide):
        if isinstance(parameter, nnx.Param):
            parameter.set_value(parameter[...].astype(jnp.float32))
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(norm(x), wide(x.astype(jnp.float32)).astype(jnp.bfloat16))


def test_an_offset_is_added_before_the_weight_is_rounded() -> None:
    norm = OffsetRMSNorm(init(jnp.bfloat16), WIDTH, EPS)
    assert norm.weight.dtype == jnp.float32
    (rule,) = norm.rules("n")
    (piece,) = rule.pieces
    small = np.full(WIDTH, 2.0**-12, np.float32)  # 1 + this is no number of bfloat16
    np.testing.assert_array_equal(piece.arranged(small), small + 1)
    assert piece.added == 1.0


@pytest.mark.parametrize("kind", [RMSNorm, OffsetRMSNorm])
def test_a_norm_of_wider_heads_has_zeros_where_heads_have_them(kind: type[RMSNorm]) -> None:
    order = (1, 0, -1, 2, 3, -1)
    norm = kind(init(), len(order), EPS, "head_dim", order)
    (rule,) = norm.rules("n")
    (piece,) = rule.pieces
    assert piece.source == (4,)
    offset = 1.0 if kind is OffsetRMSNorm else 0.0
    expected = np.array([20, 10, 0, 30, 40, 0]) + offset
    np.testing.assert_array_equal(piece.arranged(np.array([10.0, 20.0, 30.0, 40.0])), expected)


class Doubled(nnx.Module):
    """Stands for attention."""

    def __call__(self, layer: int, x_TD: jax.Array, rotation: Any, context: Any) -> jax.Array:
        return 2 * x_TD


def tripled(x_TD: jax.Array, context: Any) -> jax.Array:
    """Stands for a feed-forward."""
    return 3 * x_TD


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_block_that_norms_its_sums_is_its_definition(kind: str) -> None:
    norm, definition = made(kind)
    block = ResidualNormBlock(attention_norm=norm, attention=Doubled(), mlp_norm=norm, mlp=tripled)
    x, context = random(TOKENS, WIDTH), DenseContext()
    carry = block.attend(0, Carry(x), None, context)
    assert carry.delta_TD is None and carry.beside_TE is None  # nothing is left to add
    found = block.feed_forward(carry, context)
    middle = definition(3 * np.asarray(x, np.float64))
    np.testing.assert_allclose(found.settled(ALONE), definition(4 * middle), rtol=1e-4, atol=1e-5)
    again = block.feed_forward(block.attend(1, found, None, context), context)
    twice = definition(4 * definition(3 * definition(4 * middle)))
    np.testing.assert_allclose(again.settled(ALONE), twice, rtol=1e-4, atol=1e-4)


def test_a_block_of_a_model_without_norms_adds_alone() -> None:
    block = Block(attention_norm=NoNorm(), attention=Doubled(), mlp_norm=NoNorm(), mlp=tripled)
    x, context = random(TOKENS, WIDTH), DenseContext()
    found = block.feed_forward(block.attend(0, Carry(x), None, context), context)
    np.testing.assert_allclose(found.settled(ALONE), 12 * x, rtol=1e-6)


def decoder(**given: Any) -> Decoder:
    head = OutputHead(init(), 11, WIDTH, "vocab", given.pop("bias", False))
    if head.bias is not None:
        head.bias[...] = random(11, seed=4)
    block = given.pop("block", Block)(
        attention_norm=NoNorm(), attention=Doubled(), mlp_norm=NoNorm(), mlp=tripled
    )
    return Decoder(
        embed=Embedding(init(), 11, WIDTH, None),
        layers=[block],
        norm=made("rms")[0],
        head=None if given.pop("tied", False) else head,
        ropes=(NoRope(2),),
        **given,
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_of_some_tokens_are_those_of_all(tied: bool, bias: bool) -> None:
    model = decoder(tied=tied, bias=bias, logits_maps=(Scale(0.5), Softcap(0.3)))
    hidden = random(3, WIDTH)
    every = model.logits(hidden, DenseContext())
    weight = np.asarray((model.embed if tied else model.head).weight[...], np.float64)
    plain = np.asarray(hidden, np.float64) @ weight.T
    plain = plain + (np.asarray(model.head.bias[...]) if bias and not tied else 0)
    np.testing.assert_allclose(every, 0.3 * np.tanh(plain / 2 / 0.3), rtol=1e-4, atol=1e-6)
    some = model.token_logits(hidden, (7, 2, 7), DenseContext())
    np.testing.assert_allclose(some, every[:, [7, 2, 7]], rtol=1e-6)


@pytest.mark.parametrize("block", [Block, ParallelBlock])
def test_a_packed_carry_is_the_carry(block: type[Block]) -> None:
    model, context = decoder(block=block), DenseContext()
    token = jnp.array([3, 1, 4, 1, 5])
    carry = model.through_attention(token, jnp.arange(TOKENS), context)
    packed = carry.packed(ALONE)
    assert packed.shape == (TOKENS, WIDTH * (2 if block is ParallelBlock else 1))
    again = model.unpacked(packed)
    assert again.part_TD is None and again.delta_TD is None
    np.testing.assert_array_equal(again.settled(ALONE), carry.settled(ALONE))
    np.testing.assert_allclose(
        model.after_attention(again, context), model(token, jnp.arange(TOKENS), context), rtol=1e-5
    )


def test_layers_with_equal_ropes_share_their_angles() -> None:
    calls: list[float] = []

    class Counted(StaticRope):
        def __call__(self, position_T: jax.Array, prompt_length_T: jax.Array | None) -> Any:
            calls.append(self.scale)
            return super().__call__(position_T, prompt_length_T)

    one = decoder()
    ropes = (Counted((1.0,)), Counted((1.0,), 2.0), Counted((1.0,)), Counted((1.0,), 2.0))
    model = Decoder(
        embed=one.embed, layers=[one.layers[0]] * 4, norm=one.norm, head=None, ropes=ropes
    )
    model(jnp.array([1, 2]), jnp.arange(2), DenseContext())
    assert calls == [1.0, 2.0]


def test_a_decoder_has_a_rope_for_each_layer() -> None:
    one = decoder()
    model = Decoder(
        embed=one.embed, layers=[*one.layers], norm=one.norm, head=None, ropes=(NoRope(2),) * 2
    )
    with pytest.raises(ValueError, match="zip"):
        model(jnp.array([1]), jnp.arange(1), DenseContext())
