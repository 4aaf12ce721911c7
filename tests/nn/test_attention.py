"""Attention and decoder blocks against float64 NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.cache.collective import ALONE
from jaxllm.nn.attention import Attention, Scoring
from jaxllm.nn.blocks import Block
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.embedding import Embedding
from jaxllm.nn.heads import Heads
from jaxllm.nn.linear import Init, OutputHead
from jaxllm.nn.mlp import GatedMLP
from jaxllm.nn.norm import RMSNorm
from jaxllm.nn.rope import StaticRope

WIDTH, TOKENS = 16, 7
INV_FREQ = (1.0, 0.1)
EPS = 1e-5


def init() -> Init:
    return Init(nnx.Rngs(3), jnp.float32)


def grown(module: nnx.Module) -> nnx.Module:
    """The module with parameters that are neither zero, one nor tiny."""
    state = nnx.state(module, nnx.Param)
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(5), len(leaves))
    new = [
        0.5 * jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)
    ]
    nnx.update(module, jax.tree.unflatten(tree, new))
    return module


def exact(parameter: nnx.Param) -> np.ndarray:
    return np.asarray(parameter[...], np.float64)


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def rotated(x: np.ndarray) -> np.ndarray:
    """[T, heads, 4]: dimension i turns together with dimension i + 2."""
    angle = np.arange(len(x))[:, None, None] * np.array(INV_FREQ)
    left, right = x[..., :2], x[..., 2:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def attended(module: Attention, x: np.ndarray) -> np.ndarray:
    """What `module` should give for x [T, D], from the definition, head by head."""
    heads, weight = module.heads, exact(module.qkv.weight)
    rows = np.einsum("td,xrhd->xtrh", x, weight)
    if module.qkv.bias is not None:
        rows += exact(module.qkv.bias)[:, None]
    n, k = heads.query_per_shard, heads.kv_per_shard
    out = []
    for shard in rows:
        query, key, value = shard[:, :n], shard[:, n : n + k], shard[:, n + k :]
        if module.q_norm is not None and module.k_norm is not None:
            query = normed(query, exact(module.q_norm.weight))
            key = normed(key, exact(module.k_norm.weight))
        query, key = rotated(query), rotated(key)
        for head in range(n):
            own = head * k // n
            score = query[:, head] @ key[:, own].T * module.scale
            if module.softcap is not None:
                score = module.softcap * np.tanh(score / module.softcap)
            distance = np.arange(len(x))[:, None] - np.arange(len(x))
            hidden = (distance < 0) | (distance >= (module.window or len(x)))
            chance = np.exp(np.where(hidden, -np.inf, score - score.max(-1, keepdims=True)))
            total = chance.sum(-1, keepdims=True)
            if module.sinks is not None:
                sink = exact(module.sinks.weight)[len(out)]
                total += np.exp(sink - score.max(-1, keepdims=True))
            out.append(chance / total @ value[:, own])
    product = np.einsum("ntk,dnk->td", np.stack(out), exact(module.out.weight))
    return product + (0 if module.out.bias is None else exact(module.out.bias))


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qkv_bias": True, "out_bias": True},
        {"normed": True},
        {"window": 3},
        {"qkv_bias": True, "normed": True, "window": 1},
        {"sinks": True, "window": 3},
        {"scale": 0.3, "softcap": 0.5},
    ],
    ids=str,
)
def test_attention_is_its_definition(options: dict, shards: int) -> None:
    options = dict(options)
    if options.pop("normed", False):
        options["qk_norms"] = tuple(RMSNorm(init(), 4, EPS, "head_dim") for _ in "qk")
    given = {key: options.pop(key) for key in ("window", "scale", "softcap") if key in options}
    heads = Heads(8, 2, 4, shards)
    module = grown(Attention(init(), heads, WIDTH, scoring=Scoring(**given), **options))
    x = jax.random.normal(jax.random.key(1), (TOKENS, WIDTH))
    rotation = StaticRope(INV_FREQ)(jnp.arange(TOKENS), None)
    found = module(0, x, rotation, DenseContext())
    np.testing.assert_allclose(found, attended(module, np.asarray(x, np.float64)), atol=2e-5)


def decoder(layers: int, tied: bool) -> Decoder:
    heads = Heads(4, 2, 4)
    given = init()
    model = Decoder(
        embed=Embedding(given, 11, WIDTH, None),
        layers=[
            Block(
                attention_norm=RMSNorm(given, WIDTH, EPS),
                attention=Attention(given, heads, WIDTH),
                mlp_norm=RMSNorm(given, WIDTH, EPS),
                mlp=GatedMLP(given, WIDTH, 12, 1, "relu"),
            )
            for _ in range(layers)
        ],
        norm=RMSNorm(given, WIDTH, EPS),
        head=None if tied else OutputHead(given, 11, WIDTH, "vocab"),
        ropes=(StaticRope(INV_FREQ),) * layers,
    )
    return grown(model)


def read(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] from the definition of a pre-norm decoder."""
    x = exact(model.embed.weight)[tokens]
    for block in model.layers:
        x = x + attended(block.attention, normed(x, exact(block.attention_norm.weight)))
        inner = normed(x, exact(block.mlp_norm.weight))
        gate, up = np.einsum("td,gfd->gtf", inner, exact(block.mlp.gate_up.weight)[0])
        x = x + np.maximum(gate, 0) * up @ exact(block.mlp.down.weight).T
    head = model.embed if model.head is None else model.head
    return normed(x, exact(model.norm.weight)) @ exact(head.weight).T


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_decoder_adds_each_block_to_the_residual_stream(layers: int, tied: bool) -> None:
    model, tokens = decoder(layers, tied), np.array([3, 1, 4, 1, 5, 9, 2])
    context = DenseContext()
    found = model.logits(model(jnp.asarray(tokens), jnp.arange(TOKENS), context), context)
    expected = read(model, tokens)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("layers", [1, 2])
def test_any_rows_may_go_on_after_the_last_attention(layers: int) -> None:
    model, context = decoder(layers, tied=False), DenseContext()
    token, position = jnp.arange(TOKENS), jnp.arange(TOKENS)
    whole = model(token, position, context)
    carry, rows = model.through_attention(token, position, context), jnp.array([6, 0, 3])
    for picked in (carry.rows(rows), model.unpacked(carry.packed(ALONE)[rows])):
        found = model.after_attention(picked, context)
        np.testing.assert_allclose(found, whole[rows], atol=1e-5)


def test_scales_of_8_bit_pages_are_one_pair_for_each_stored_head() -> None:
    module = Attention(init(), Heads(8, 2, 4, 4), WIDTH)
    assert module.kv_scales is None
    module.take_kv_scales()
    assert module.kv_scales.shape == (4, 2)
    assert module.kv_scales.get_metadata("axes") == ("kv_heads", None)
