"""A family for tests: layers with a recurrent state, layers that attend, and layers that attend to
an earlier one's keys. A configuration's `hybrid_layers` says which layer is which."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx
from jax import Array

from jaxllm.cache.layer import LayerCache, PagedKV, RecurrentState, SharedKV
from jaxllm.cache.states import State
from jaxllm.models.config import read
from jaxllm.models.config.read import Config
from jaxllm.models.config.rope import layer_ropes
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.attention import Scoring
from jaxllm.nn.contexts.protocol import StateContext
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init, Linear
from jaxllm.nn.rope import Rotation, rotary_order
from jaxllm.nn.rules import Rows
from jaxllm.nn.shared_attention import SharedAttention

NAME = "hybrid_fake"
STATE, FULL, SLIDING, SHARED, WIDE = "state", "full", "sliding", "shared", "wide"
HEADS, NUMBERS = 4, 3  # of a state
CONFIG: dict[str, Any] = {
    "architectures": ["HybridFake"],
    "model_type": NAME,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 104,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "sliding_window": 12,
    "eos_token_id": 103,
}


def config(*layers: str) -> dict[str, Any]:
    """The configuration of a model of these layers."""
    return CONFIG | {"num_hidden_layers": len(layers), "hybrid_layers": list(layers)}


@contextmanager
def registered() -> Iterator[None]:
    """The family can be served in here."""
    module: Any = ModuleType(f"jaxllm.models.{NAME}")
    module.__dict__.update(DEFAULTS=DEFAULTS, NAMES=NAMES, spec=spec, build=build)
    names = (*read._families(), NAME)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        patch.setattr(read, "_families", lambda: names)
        patch.setattr(read, "state", lambda model_type: "generates or pools")
        yield


DEFAULTS: Config = {"hidden_act": "silu", "rms_norm_eps": 1e-6}
NAMES = LLAMA_NAMES | {
    "layers.{}.attention.query": ("model.layers.{}.self_attn.q_proj",),
    "layers.{}.attention.inward": ("model.layers.{}.mixer.inward",),
    "layers.{}.attention.outward": ("model.layers.{}.mixer.outward",),
}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration."""
    plain = transformer_spec(hf)
    caches = tuple(_cache(hf, layer, plain.layers[0]) for layer in range(len(plain.layers)))
    ropes = tuple(
        layer_ropes(hf, 16, 16, ["full_attention"])[0] if kind == WIDE else rope
        for kind, rope in zip(hf["hybrid_layers"], plain.ropes, strict=True)
    )
    return replace(plain, layers=caches, ropes=ropes)


def _cache(hf: Config, layer: int, plain: LayerCache) -> LayerCache:
    kinds = hf["hybrid_layers"]
    if kinds[layer] == STATE:
        return RecurrentState(((HEADS, NUMBERS), (HEADS,)))
    if kinds[layer] == WIDE:  # one head of twice the width
        return PagedKV(1, 16, 16, order=rotary_order(16, 16, False))
    assert isinstance(plain, PagedKV)
    if kinds[layer] == SLIDING:
        return replace(plain, window=hf["sliding_window"])
    if kinds[layer] == SHARED:
        owner = max(n for n in range(layer) if kinds[n] in (FULL, SLIDING))
        window = hf["sliding_window"] if kinds[owner] == SLIDING else None
        return SharedKV(owner, window)
    return plain


class Decay(nnx.Module):
    """What is left of each number after a token, and how many tokens there were: no token may be
    seen twice, and none left out."""

    spec = RecurrentState(((HEADS, NUMBERS), (HEADS,)))

    def __call__(self, state: State, row: Any) -> tuple[State, Any]:
        memory, count = state
        memory = 0.7 * memory + row
        count = count + 1
        return (memory, count), memory + jnp.sin(count)[:, None]


class Memory(nnx.Module):
    """A mixer of tokens with a recurrent state."""

    def __init__(self, init: Init, heads: int, shards: int, width: int):
        per_shard = heads // shards
        self.inward = Linear(
            init,
            (shards, per_shard, NUMBERS),
            (width,),
            ("shard", None, "head_dim", "embed"),
            parts=(Rows(per_shard),),
        )
        self.outward = Linear(
            init, (width,), (heads, NUMBERS), ("embed", "heads", "head_dim"), False
        )
        self.cell = Decay()

    def __call__(self, layer: int, x_TD: Array, rotation: Rotation, context: StateContext) -> Any:
        row = self.inward(x_TD, context)
        row = row.reshape(row.shape[0], -1, NUMBERS)
        output = context.scan(layer, self.cell, row)
        return self.outward.part(output.astype(x_TD.dtype), context)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters."""
    parts = Parts(spec, shards, init)

    def mixer(layer: int) -> nnx.Module:
        cache = spec.layers[layer]
        if isinstance(cache, RecurrentState):
            return Memory(init, HEADS, shards, spec.width)
        if isinstance(cache, SharedKV):
            heads = spec.heads(shards, layer)
            back = layer - cache.layer
            scoring = Scoring(cache.window)
            return SharedAttention(init, heads, spec.width, back=back, scoring=scoring)
        return parts.attention(layer)

    return parts.decoder(lambda layer: parts.block(mixer(layer), parts.gated_mlp()))
