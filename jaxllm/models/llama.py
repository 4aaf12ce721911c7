"""Llama: grouped-query attention and a gated SiLU feed-forward, both with optional biases."""

from __future__ import annotations

from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, transformer, transformer_spec
from jaxllm.nn.attention import Attention
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
}
NAMES, spec = LLAMA_NAMES, transformer_spec


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    heads, bias = spec.heads(shards), flag(spec.config, "attention_bias")

    def attention(layer: int) -> Attention:
        return Attention(init, heads, spec.width, qkv_bias=bias, out_bias=bias)

    return transformer(spec, shards, init, attention, mlp_bias=flag(spec.config, "mlp_bias"))
