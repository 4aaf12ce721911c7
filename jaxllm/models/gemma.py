"""Gemma: Llama with norms that multiply by 1 + weight, embeddings that grow with the width, and a
gated GELU feed-forward."""

from __future__ import annotations

from jaxllm.config import ConfigError
from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.embedding import ScaledEmbedding
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import OffsetRMSNorm

DEFAULTS: Config = {
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "tie_word_embeddings": True,
}
NAMES = LLAMA_NAMES


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    if flag(hf, "use_bidirectional_attention"):
        raise ConfigError(
            "config.json: use_bidirectional_attention is true; Gemma runs with causal attention"
        )
    # The first files say "gelu" and mean its approximation
    if hf["hidden_act"] == "gelu":
        hf = {**hf, "hidden_act": "gelu_pytorch_tanh"}
    return transformer_spec(hf)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init, OffsetRMSNorm)
    bias = flag(spec.config, "attention_bias")

    def block(layer: int) -> Block:
        return parts.block(parts.attention(layer, qkv_bias=bias, out_bias=bias), parts.gated_mlp())

    factor = parts.rounded(spec.width**0.5)
    embed = ScaledEmbedding(init, spec.vocab_size, spec.width, parts.table_axis, factor)
    return parts.decoder(block, embed=embed)
