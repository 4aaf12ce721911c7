"""Apertus: Llama with norms of query and key heads, and a feed-forward without a gate whose
activation, xIELU, learns its shape in each layer."""

from __future__ import annotations

from dataclasses import replace

from flax import nnx

from jaxllm.config import ConfigError
from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.mlp import XIELU

DEFAULTS: Config = {
    "hidden_act": "xielu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 65536,
    "rope_theta": 12000000.0,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 12000000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
NAMES = {
    **LLAMA_NAMES,
    "layers.{}.attention_norm": ("model.layers.{}.attention_layernorm",),
    "layers.{}.mlp_norm": ("model.layers.{}.feedforward_layernorm",),
    "layers.{}.mlp.up": ("model.layers.{}.mlp.up_proj",),
    "layers.{}.mlp.activation": ("model.layers.{}.mlp.act_fn",),
}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    if hf["hidden_act"] != "xielu":
        raise ConfigError(
            f"config.json: hidden_act is {hf['hidden_act']!r:.80}; apertus models have 'xielu'"
        )
    # The layers' own stands in the place of this one
    return replace(transformer_spec({**hf, "hidden_act": "relu2"}), config=hf)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)
    bias = flag(spec.config, "attention_bias")

    def block(layer: int) -> Block:
        norms = parts.qk_norms()
        mlp = parts.mlp(bias=False)
        mlp.activation = nnx.data(XIELU(init))
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias, qk_norms=norms)
        return parts.block(attention, mlp)

    return parts.decoder(block)
