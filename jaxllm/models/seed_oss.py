"""Seed-OSS: Llama with biases on query, key and value, and a head width of its own."""

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
    "max_position_embeddings": 524288,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
}
NAMES = LLAMA_NAMES
spec = transformer_spec


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)
    hf = spec.config
    bias = flag(hf, "attention_bias")
    out_bias = flag(hf, "attention_out_bias")
    mlp_bias = flag(hf, "mlp_bias")

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qkv_bias=bias, out_bias=out_bias)
        return parts.block(attention, parts.gated_mlp(mlp_bias))

    return parts.decoder(block)
