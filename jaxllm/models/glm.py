"""GLM-4 of 2024: half of each head turns, in pairs of neighbours; gate and up in one tensor."""

from __future__ import annotations

from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
NAMES = {**LLAMA_NAMES, "layers.{}.mlp.gate_up": ("model.layers.{}.mlp.gate_up_proj",)}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return transformer_spec(hf, partial=True, paired=True)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)
    bias = flag(spec.config, "attention_bias")

    def block(layer: int) -> Block:
        return parts.block(parts.attention(layer, qkv_bias=bias), parts.gated_mlp())

    return parts.decoder(block)
