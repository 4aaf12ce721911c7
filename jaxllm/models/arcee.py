"""Arcee: Llama with squared ReLU in place of a gate."""

from __future__ import annotations

from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init

DEFAULTS: Config = {
    "hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}
NAMES = {**LLAMA_NAMES, "layers.{}.mlp.up": ("model.layers.{}.mlp.up_proj",)}
spec = transformer_spec


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)
    bias = flag(spec.config, "attention_bias")
    mlp_bias = flag(spec.config, "mlp_bias")

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias)
        return parts.block(attention, parts.mlp(mlp_bias))

    return parts.decoder(block)
