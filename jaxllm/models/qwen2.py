"""Qwen2: biases on query, key and value; the upper layers may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from jaxllm.models.config.parts import decoder, layer_windows, sizes, unused
from jaxllm.nn import rules as _rules
from jaxllm.nn.attention import Attention
from jaxllm.nn.decoder import Block, Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.mlp import GatedMLP
from jaxllm.nn.norm import RMSNorm

# What config.json may leave out.
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
)


def build(hf: Mapping[str, Any], shards: int, rngs: nnx.Rngs, dtype: DTypeLike) -> Decoder:
    """The model with fresh parameters, laid out for `shards` tensor shards."""
    size, init = sizes(hf, shards), Init(rngs, dtype)
    windows = layer_windows(hf, size.layers)

    def block(layer: int) -> Block:
        return Block(
            attention_norm=RMSNorm(init, size.width, size.eps),
            attention=Attention(init, size.heads, size.width, qkv_bias=True, window=windows[layer]),
            mlp_norm=RMSNorm(init, size.width, size.eps),
            mlp=GatedMLP(init, size.width, size.inner, shards, size.activation),
        )

    return decoder(hf, size, init, block)


def rules(hf: Mapping[str, Any], shards: int) -> list[_rules.Rule]:
    """Every parameter of `build` and the checkpoint tensors that fill it."""
    size = sizes(hf, shards)
    table = list(_rules.ends(size.vocab, size.width, tied=size.tied))
    for layer in range(size.layers):
        table += _rules.norms(layer, size.width)
        table += _rules.attention(layer, size.heads, size.width, qkv_bias=True)
        table += _rules.mlp(layer, shards, size.inner, size.width)
    return table


def ignored(hf: Mapping[str, Any], shards: int) -> dict[str, str | None]:
    """Tensors that a checkpoint may hold beside those of `rules`, each with the tensor that it must
    equal (None: of no concern)."""
    return unused(hf, sizes(hf, shards))
