"""StarCoder 1 and Granite Code of 20B: GPT-2 with one key head or as many as query heads, which
lie with the queries in one tensor."""

from __future__ import annotations

from jaxllm.models import gpt2
from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import Parts
from jaxllm.models.gpt2 import IGNORED as IGNORED
from jaxllm.models.gpt2 import NAMES as NAMES
from jaxllm.models.gpt2 import SPELLING as SPELLING
from jaxllm.models.gpt2 import TOKEN_HEAD as TOKEN_HEAD
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import LayerNorm
from jaxllm.nn.rules import Layout

DEFAULTS: Config = {
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "scale_attn_weights": True,
    "multi_query": True,
    "tie_word_embeddings": True,
}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return gpt2.spec({**hf, "num_key_value_heads": 1 if flag(hf, "multi_query") else None})


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init, LayerNorm)
    hf = spec.config
    scale = None if flag(hf, "scale_attn_weights") else 1.0
    if flag(hf, "multi_query"):
        layout = Layout.OUT_IN
    else:
        layout = Layout.GROUPED

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qkv_bias=True, out_bias=True, scale=scale)
        attention.qkv.layout = layout
        return parts.block(attention, parts.mlp())

    return parts.decoder(block, embed=parts.positioned())
