"""Qwen3: Qwen2 with norms on query and key heads, and a head width of its own."""

from __future__ import annotations

from jaxllm.models import qwen2
from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import Parts
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init

DEFAULTS: Config = {**qwen2.DEFAULTS, "head_dim": 128}
NAMES = qwen2.NAMES
spec = qwen2.spec


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)
    bias = flag(spec.config, "attention_bias")

    def block(layer: int) -> Block:
        norms = parts.qk_norms()
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias, qk_norms=norms)
        return parts.block(attention, parts.gated_mlp())

    return parts.decoder(block)
