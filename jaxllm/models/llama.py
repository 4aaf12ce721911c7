"""Llama: grouped-query attention and a gated SiLU feed-forward, both with optional biases."""

from __future__ import annotations

from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
}
NAMES = LLAMA_NAMES
spec = transformer_spec


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)
    bias = flag(spec.config, "attention_bias")
    mlp_bias = flag(spec.config, "mlp_bias")

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias)
        return parts.block(attention, parts.gated_mlp(mlp_bias))

    return parts.decoder(block)
