"""Helium: Llama whose heads turn in pairs of neighbours."""

from __future__ import annotations

from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-8,
    "max_position_embeddings": 4096,
    "head_dim": 128,
    "rope_theta": 100000.0,
}
NAMES = LLAMA_NAMES


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return transformer_spec(hf, paired=True)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)
    bias, mlp_bias = (flag(spec.config, key) for key in ("attention_bias", "mlp_bias"))

    def block(layer: int) -> Block:
        return parts.block(parts.attention(layer, qkv_bias=bias), parts.gated_mlp(mlp_bias))

    return parts.decoder(block)
