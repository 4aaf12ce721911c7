"""Latent attention against float64 NumPy, which makes the keys and values of every head."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.latent import LatentAttention, LatentHeads
from jaxllm.nn.linear import Init
from jaxllm.nn.rope import StaticRope

WIDTH, TOKENS, EPS = 12, 6, 1e-5
SIZES = LatentHeads(heads=3, rank=8, plain=5, rope=4, value=7)
INV_FREQ = (1.0, 0.2)
NAMES = {
    "query": ("q_proj",),
    "query.down": ("q_a_proj",),
    "query.norm": ("q_a_layernorm",),
    "query.up": ("q_b_proj",),
    "entry": ("kv_a_proj",),
    "entry_norm": ("kv_a_layernorm",),
    "key": ("kv_b_proj",),
    "value": ("kv_b_proj",),
    "out": ("o_proj",),
}


def modules(layer: LatentAttention) -> dict[str, nnx.Module]:
    """The layer's parts with weights, by their paths."""
    return {
        ".".join(map(str, path)): module
        for path, module in nnx.iter_modules(layer)
        if hasattr(module, "weight")
    }


def filled(layer: LatentAttention, tensors: dict[str, np.ndarray]) -> LatentAttention:
    """The layer with the weights that its rules make of a checkpoint's; every tensor is used."""
    used = set()
    for path, module in modules(layer).items():
        for rule in module.rules(*NAMES[path]):
            (piece,) = rule.pieces
            assert piece.source == tensors[piece.name].shape
            value = piece.arranged(tensors[piece.name]).reshape(
                getattr(module, rule.parameter).shape
            )
            getattr(module, rule.parameter)[...] = jnp.asarray(value, jnp.float32)
            used.add(piece.name)
    assert used == set(tensors)
    return layer


def checkpoint(sizes: LatentHeads, query_rank: int | None, bias: bool) -> dict[str, np.ndarray]:
    """Random tensors under the names and in the shapes of DeepSeek's checkpoints."""
    rng = np.random.default_rng(0)
    heads, query, entry = sizes.heads, sizes.plain + sizes.rope, sizes.rank + sizes.rope
    shapes = {
        "kv_a_proj.weight": (entry, WIDTH),
        "kv_a_layernorm.weight": (sizes.rank,),
        "kv_b_proj.weight": (heads * (sizes.plain + sizes.value), sizes.rank),
        "o_proj.weight": (WIDTH, heads * sizes.value),
    }
    if query_rank is None:
        shapes["q_proj.weight"] = (heads * query, WIDTH)
    else:
        shapes["q_a_proj.weight"] = (query_rank, WIDTH)
        shapes["q_a_layernorm.weight"] = (query_rank,)
        shapes["q_b_proj.weight"] = (heads * query, query_rank)
    if bias:
        shapes |= {"kv_a_proj.bias": (entry,), "o_proj.bias": (WIDTH,)}
        shapes |= {} if query_rank is None else {"q_a_proj.bias": (query_rank,)}
    return {name: rng.normal(0.3, 0.6, shape) for name, shape in shapes.items()}


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def turned(x: np.ndarray, paired: bool) -> np.ndarray:
    """[T, …, rope] with its pairs turned by their token's angles."""
    shape = (TOKENS, *(1,) * (x.ndim - 2), 2)
    angle = (np.arange(TOKENS)[:, None] * np.array(INV_FREQ)).reshape(shape)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = (x[..., ::2], x[..., 1::2]) if paired else (x[..., :2], x[..., 2:])
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def linear(x: np.ndarray, name: str, tensors: dict[str, np.ndarray]) -> np.ndarray:
    return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)


def definition(
    x: np.ndarray, tensors: dict[str, np.ndarray], sizes: LatentHeads, scale: float
) -> np.ndarray:
    """Every head's keys and values are made of the latent, then attention is as ever."""
    if "q_proj.weight" in tensors:
        query = linear(x, "q_proj", tensors)
    else:
        low = normed(linear(x, "q_a_proj", tensors), tensors["q_a_layernorm.weight"])
        query = linear(low, "q_b_proj", tensors)
    query = query.reshape(TOKENS, sizes.heads, -1)
    entry = linear(x, "kv_a_proj", tensors)
    latent = normed(entry[:, : sizes.rank], tensors["kv_a_layernorm.weight"])
    both = linear(latent, "kv_b_proj", tensors).reshape(TOKENS, sizes.heads, -1)
    key, value = both[..., : sizes.plain], both[..., sizes.plain :]
    shared = turned(entry[:, sizes.rank :], sizes.paired)
    end = turned(query[..., sizes.plain :], sizes.paired)
    score = np.einsum("tnp,snp->nts", query[..., : sizes.plain], key)
    score = (score + np.einsum("tnr,sr->nts", end, shared)) * scale
    score = np.where(np.tri(TOKENS, dtype=bool), score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    return linear(np.einsum("nts,snv->tnv", weight, value).reshape(TOKENS, -1), "o_proj", tensors)


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("query_rank", [None, 9])
def test_latent_attention_is_its_definition(
    query_rank: int | None, bias: bool, paired: bool
) -> None:
    sizes, scale = replace(SIZES, paired=paired), 0.37
    layer = LatentAttention(
        Init(nnx.Rngs(0), jnp.float32),
        sizes,
        WIDTH,
        scale=scale,
        eps=EPS,
        query_rank=query_rank,
        bias=bias,
    )
    tensors = checkpoint(sizes, query_rank, bias)
    filled(layer, tensors)
    x = np.random.default_rng(1).normal(0, 0.5, (TOKENS, WIDTH))
    rotation = StaticRope(INV_FREQ)(jnp.arange(TOKENS), None)
    found = layer(0, jnp.asarray(x, jnp.float32), rotation, DenseContext())
    np.testing.assert_allclose(found, definition(x, tensors, sizes, scale), rtol=2e-4, atol=2e-4)


def test_numbers_that_turn_are_ordered_and_those_before_them_stay() -> None:
    assert replace(SIZES, paired=True).order(3) == (0, 1, 2, 3, 5, 4, 6)
    assert replace(SIZES, paired=False).order(2) == (0, 1, 2, 3, 4, 5)


def test_a_latent_entry_is_smaller_than_the_keys_and_values_that_it_stands_for() -> None:
    layer = LatentAttention(Init(nnx.Rngs(0), jnp.bfloat16), SIZES, WIDTH, scale=1.0, eps=EPS)
    state = jax.tree.leaves(nnx.state(layer, nnx.Param))
    assert all(leaf.dtype == jnp.bfloat16 for leaf in state)
    assert layer.entry.weight.shape == (1, 1, SIZES.rank + SIZES.rope, WIDTH)
    assert SIZES.rank + SIZES.rope < SIZES.heads * (SIZES.plain + SIZES.rope + SIZES.value)
