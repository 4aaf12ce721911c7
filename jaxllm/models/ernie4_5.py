"""ERNIE 4.5 without experts: Llama whose neighbours turn together, with a head width of its own."""

from __future__ import annotations

from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
NAMES = LLAMA_NAMES
REMOTE_CODE = ("modeling_ernie4_5",)


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return transformer_spec(hf, paired=True)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)
    bias = flag(spec.config, "use_bias")

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias)
        return parts.block(attention, parts.gated_mlp(bias))

    return parts.decoder(block)
