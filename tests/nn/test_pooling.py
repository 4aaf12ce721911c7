"""Pools of hidden states, and what follows them, against their definitions prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.nn.blocks import Block, Carry
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.embedding import Embedding, EncoderEmbedding
from jaxllm.nn.linear import Init, OutputHead
from jaxllm.nn.norm import LayerNorm, NoNorm
from jaxllm.nn.pooling import PoolingModel, pooled
from jaxllm.nn.rope import NoRope
from jaxllm.nn.row_facts import facts_of
from jaxllm.pooling import ALL, MODES, DenseMap, Pooling

WIDTH, VOCAB = 6, 11
STARTS, LENGTHS = (0, 4, 5, 9), (4, 1, 4, 3)  # four prompts in twelve tokens
TOKENS = sum(LENGTHS)
START_R, LENGTH_R = jnp.array(STARTS), jnp.array(LENGTHS)


def init() -> Init:
    return Init(nnx.Rngs(1), jnp.float32)


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def weighted(prompt: np.ndarray) -> np.ndarray:
    """Later tokens count more: the weight of token i is i + 1."""
    weight = np.arange(1, len(prompt) + 1)[:, None]
    return (prompt * weight).sum(0) / weight.sum()


DEFINITIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "last": lambda prompt: prompt[-1],
    "cls": lambda prompt: prompt[0],
    "mean": lambda prompt: prompt.mean(0),
    "max": lambda prompt: prompt.max(0),
    "mean_sqrt_len": lambda prompt: prompt.sum(0) / np.sqrt(len(prompt)),
    "weighted_mean": weighted,
}


def prompts(hidden: Any) -> list[np.ndarray]:
    exact = np.asarray(hidden, np.float64)
    return [exact[at : at + length] for at, length in zip(STARTS, LENGTHS, strict=True)]


def test_every_mode_has_a_definition_here() -> None:
    assert set(DEFINITIONS) == set(MODES)


@pytest.mark.parametrize("mode", MODES)
def test_a_pool_is_its_definition(mode: str) -> None:
    hidden = random(TOKENS, WIDTH) - 2  # so that a largest number may be negative
    expected = [DEFINITIONS[mode](prompt) for prompt in prompts(hidden)]
    np.testing.assert_allclose(pooled((mode,), hidden, START_R, LENGTH_R), expected, rtol=1e-5)


def test_pools_stand_side_by_side_in_the_order_of_their_names() -> None:
    hidden = random(TOKENS, WIDTH)
    both = pooled(("max", "cls"), hidden, START_R, LENGTH_R)
    assert both.shape == (len(STARTS), 2 * WIDTH)
    np.testing.assert_array_equal(both[:, :WIDTH], pooled(("max",), hidden, START_R, LENGTH_R))
    np.testing.assert_array_equal(both[:, WIDTH:], hidden[jnp.array(STARTS)])


@pytest.mark.parametrize("mode", MODES)
def test_padding_rows_and_padding_tokens_change_nothing(mode: str) -> None:
    hidden = random(TOKENS + 3, WIDTH).at[TOKENS:].set(1e9)
    start, length = jnp.array([*STARTS, 0, 0]), jnp.array([*LENGTHS, 0, 0])
    found = pooled((mode,), hidden, start, length)
    np.testing.assert_array_equal(
        found[: len(STARTS)], pooled((mode,), hidden[:TOKENS], START_R, LENGTH_R)
    )
    assert np.isfinite(found).all()


class Summed(nnx.Module):
    """Stands for attention: the sum of all tokens so far."""

    def __call__(self, layer: int, x_TD: jax.Array, rotation: Any, context: Any) -> jax.Array:
        return jnp.cumsum(x_TD, axis=0)


def halved(x_TD: jax.Array, context: Any) -> jax.Array:
    """Stands for a feed-forward."""
    return x_TD / 2


def body(embed: Embedding, tied: bool = False) -> Decoder:
    norm = LayerNorm(init(), WIDTH, 1e-5, bias=False)
    norm.weight[...] = random(WIDTH, seed=3)
    block = Block(attention_norm=NoNorm(), attention=Summed(), mlp_norm=NoNorm(), mlp=halved)
    head = None if tied else OutputHead(init(), VOCAB, WIDTH, "vocab", True)
    if head is not None:
        head.bias[...] = random(VOCAB, seed=9)
    return Decoder(embed=embed, layers=[block], norm=norm, head=head, ropes=(NoRope(2),))


def hidden_of(model: Decoder, token: jax.Array) -> jax.Array:
    return model(token, jnp.arange(len(token)), DenseContext())


def model_of(pooling: Pooling, tied: bool = False) -> tuple[PoolingModel, Decoder]:
    """A pooling model, and a decoder with the same weights."""
    make = lambda: body(Embedding(init(), VOCAB, WIDTH, None), tied)
    return PoolingModel(init(), make(), pooling), make()


TOKEN_T = jnp.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])
POSITION_T = jnp.arange(TOKENS)


def results(model: PoolingModel) -> np.ndarray:
    return np.asarray(model(TOKEN_T, POSITION_T, START_R, LENGTH_R, DenseContext()))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_last_token_gives_the_same_whether_or_not_others_are_computed(
    bidirectional: bool,
) -> None:
    pooling = Pooling(
        task="embed", modes=("last",), maps=(), size=WIDTH, bidirectional=bidirectional
    )
    assert pooling.takes_chunks == (not bidirectional)
    model, decoder = model_of(pooling)
    last = [start + length - 1 for start, length in zip(STARTS, LENGTHS, strict=True)]
    np.testing.assert_allclose(
        results(model), hidden_of(decoder, TOKEN_T)[jnp.array(last)], rtol=1e-5
    )


def test_every_token_has_a_result_where_nothing_is_pooled() -> None:
    pooling = Pooling(task="token_embed", modes=(ALL,), maps=(), size=WIDTH)
    assert pooling.of_tokens and not pooling.takes_chunks
    model, decoder = model_of(pooling)
    np.testing.assert_allclose(results(model), hidden_of(decoder, TOKEN_T), rtol=1e-5)


def test_a_head_that_no_result_reads_is_not_held() -> None:
    model, _ = model_of(Pooling(task="embed", modes=("mean",), maps=(), size=WIDTH))
    assert model.body.head is None
    scored = Pooling(task="classify", modes=("last",), maps=(), size=1, token_logits=((2, None),))
    assert model_of(scored)[0].body.head is not None


@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_tokens_and_their_differences(tied: bool) -> None:
    pooling = Pooling(
        task="classify",
        modes=("last",),
        maps=(),
        size=3,
        token_logits=((2, None), (5, 7), (7, 0)),
    )
    model, decoder = model_of(pooling, tied)
    last = jnp.array(STARTS) + jnp.array(LENGTHS) - 1
    logits = np.asarray(decoder.logits(hidden_of(decoder, TOKEN_T)[last], DenseContext()))
    expected = np.stack(
        [logits[:, 2], logits[:, 5] - logits[:, 7], logits[:, 7] - logits[:, 0]], axis=1
    )
    np.testing.assert_allclose(results(model), expected, rtol=1e-4, atol=1e-5)


def gelu(x: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.gelu(jnp.asarray(x, jnp.float32), approximate=False), np.float64)


def standard(x: np.ndarray, eps: float) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def test_maps_follow_the_pool_in_their_order() -> None:
    maps = (
        DenseMap(name="first", inputs=WIDTH, outputs=5, bias=True, activation="tanh"),
        DenseMap(name="second", inputs=5, outputs=4, activation="gelu", norm="n", norm_eps=1e-3),
        DenseMap(name="third", inputs=4, outputs=2, bias=True),
    )
    model, decoder = model_of(Pooling(task="classify", modes=("mean",), maps=maps, size=2))
    for seed, module in enumerate(model.maps):
        module.weight[...] = random(*module.weight.shape, seed=20 + seed)
        if module.bias is not None:
            module.bias[...] = random(*module.bias.shape, seed=30 + seed)
    model.norms[1].weight[...] = random(4, seed=40)
    weights = [np.asarray(module.weight[...], np.float64) for module in model.maps]
    x = np.stack([prompt.mean(0) for prompt in prompts(hidden_of(decoder, TOKEN_T))])
    x = np.tanh(x @ weights[0].T + model.maps[0].bias[...])
    x = standard(gelu(x @ weights[1].T), 1e-3) * model.norms[1].weight[...]
    x = x @ weights[2].T + model.maps[2].bias[...]
    np.testing.assert_allclose(results(model), x, rtol=1e-4, atol=1e-5)


def test_results_of_a_16_bit_model_are_computed_in_float32() -> None:
    half = Init(nnx.Rngs(1), jnp.bfloat16)
    maps = (DenseMap(name="m", inputs=WIDTH, outputs=3),)
    pooling = Pooling(task="embed", modes=("mean",), maps=maps, size=3)
    decoder = body(Embedding(half, VOCAB, WIDTH, None))
    model = PoolingModel(half, decoder, pooling)
    assert model.maps[0].weight.dtype == jnp.float32
    assert results(model).dtype == np.float32
    hidden = hidden_of(decoder, TOKEN_T).astype(jnp.float32)
    means = np.stack([prompt.mean(0) for prompt in prompts(hidden)])
    expected = means @ np.asarray(model.maps[0].weight[...], np.float64).T
    np.testing.assert_allclose(results(model), expected, rtol=1e-4, atol=1e-6)


def test_maps_and_norms_are_filled_by_the_names_that_pooling_gives() -> None:
    maps = (
        DenseMap(name="dense", inputs=WIDTH, outputs=4, bias=True, norm="norm", norm_bias=True),
        DenseMap(name="out", inputs=4, outputs=2),
    )
    model, _ = model_of(Pooling(task="classify", modes=("cls",), maps=maps, size=2))
    names = {"embed": ("words",), "norm": ("last",)}
    found = {rule.parameter: [p.name for p in rule.pieces] for rule in model.rules(names)}
    assert found == {
        "body.embed.weight": ["words.weight"],
        "body.norm.weight": ["last.weight"],
        "maps.0.weight": ["dense.weight"],
        "maps.0.bias": ["dense.bias"],
        "norms.0.weight": ["norm.weight"],
        "norms.0.bias": ["norm.bias"],
        "maps.1.weight": ["out.weight"],
    }


def encoder(**options: Any) -> EncoderEmbedding:
    embed = EncoderEmbedding(init(), VOCAB, WIDTH, norm=NoNorm(), **options)
    for seed, table in enumerate((embed.positions, embed.types)):
        if table is not None:
            table.weight[...] = random(*table.weight.shape, seed=50 + seed)
    return embed


SECOND_T = jnp.array([0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 1])


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("types", [0, 1, 2])
def test_an_encoders_embedding_is_the_sum_of_its_tables(first: int, types: int) -> None:
    embed = encoder(positions=20, first=first, types=types)
    expected = np.asarray(embed.weight[...][TOKEN_T], np.float64)
    expected = expected + np.asarray(embed.positions.weight[...])[first + np.arange(TOKENS)]
    if types:
        table = np.asarray(embed.types.weight[...])
        expected = expected + table[np.asarray(SECOND_T) if types == 2 else 0]
    found = embed(TOKEN_T, POSITION_T, DenseContext(), SECOND_T)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_single_text_is_of_the_first_type() -> None:
    embed = encoder(types=2)
    assert embed.positions is None
    np.testing.assert_array_equal(
        embed(TOKEN_T, POSITION_T, DenseContext()),
        embed(TOKEN_T, POSITION_T, DenseContext(), jnp.zeros_like(TOKEN_T)),
    )


def test_an_encoder_pools_what_its_layers_make_of_both_texts() -> None:
    embed = encoder(positions=20, types=2)
    pooling = Pooling(task="embed", modes=("mean",), maps=(), size=WIDTH, bidirectional=True)
    model = PoolingModel(init(), body(embed), pooling)
    found = model.encode(TOKEN_T, POSITION_T, SECOND_T, START_R, LENGTH_R, DenseContext())
    x_TD = embed(TOKEN_T, POSITION_T, DenseContext(), SECOND_T)
    carry = Carry(x_TD, facts=facts_of(TOKEN_T, POSITION_T))
    context = DenseContext()
    hidden = model.body.after_attention(model.body.through_layers(carry, context), context)
    expected = [prompt.mean(0) for prompt in prompts(hidden)]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
