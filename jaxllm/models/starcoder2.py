"""StarCoder 2: layer norms, a feed-forward without a gate, a sliding window."""

from __future__ import annotations

from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, one_window, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import LayerNorm

SPELLING = {"norm_epsilon": "rms_norm_eps"}
DEFAULTS: Config = {
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 2,
    "use_bias": True,
    "tie_word_embeddings": True,
}
NAMES = {
    **LLAMA_NAMES,
    "layers.{}.mlp.up": ("model.layers.{}.mlp.c_fc",),
    "layers.{}.mlp.down": ("model.layers.{}.mlp.c_proj",),
}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return transformer_spec(hf, one_window(hf))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init, LayerNorm)
    bias = flag(spec.config, "use_bias")

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias)
        return parts.block(attention, parts.mlp(bias))

    return parts.decoder(block)
