"""Qwen2: biases on query, key and value; the upper layers may have a sliding window."""

from __future__ import annotations

from jaxllm.models.config.read import Config
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import (
    LLAMA_NAMES,
    Parts,
    layer_window,
    transformer_spec,
)
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
NAMES = LLAMA_NAMES


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return transformer_spec(hf, layer_window(hf))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)

    def block(layer: int) -> Block:
        return parts.block(parts.attention(layer, qkv_bias=True), parts.gated_mlp())

    return parts.decoder(block)
