"""OLMo 2: norms after each part alone; one norm over all query heads, one over all key heads."""

from __future__ import annotations

from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block, PostNormBlock
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.head_maps import NormedHeads, WholeRMSNorm
from jaxllm.nn.linear import Init

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}
NAMES = {
    **LLAMA_NAMES,
    "layers.{}.attention.head_map.q_norm": ("model.layers.{}.self_attn.q_norm",),
    "layers.{}.attention.head_map.k_norm": ("model.layers.{}.self_attn.k_norm",),
    "layers.{}.attention_norm": ("model.layers.{}.post_attention_layernorm",),
    "layers.{}.mlp_norm": ("model.layers.{}.post_feedforward_layernorm",),
}
spec = transformer_spec


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)
    bias = flag(spec.config, "attention_bias")

    def block(layer: int) -> Block:
        norms = NormedHeads(init, parts.heads, spec.norm_eps, WholeRMSNorm)
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias, head_map=norms)
        return parts.block(attention, parts.gated_mlp(), PostNormBlock)

    return parts.decoder(block)
