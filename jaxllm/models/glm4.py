"""GLM-4 of 2025: GLM with norms after each part as well."""

from __future__ import annotations

from jaxllm.models import glm
from jaxllm.models.config.read import flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import Parts
from jaxllm.nn.blocks import Block, SandwichBlock
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init

DEFAULTS = glm.DEFAULTS
spec = glm.spec
NAMES = {
    **glm.NAMES,
    "layers.{}.attention_out_norm": ("model.layers.{}.post_self_attn_layernorm",),
    "layers.{}.mlp_out_norm": ("model.layers.{}.post_mlp_layernorm",),
}


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)
    bias = flag(spec.config, "attention_bias")

    def block(layer: int) -> Block:
        return SandwichBlock(
            attention_norm=parts.norm(),
            attention=parts.attention(layer, qkv_bias=bias),
            attention_out_norm=parts.norm(),
            mlp_norm=parts.norm(),
            mlp=parts.gated_mlp(),
            mlp_out_norm=parts.norm(),
        )

    return parts.decoder(block)
