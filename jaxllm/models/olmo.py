"""OLMo: Llama with layer norms that have no weights, and queries, keys and values that may be
clipped."""

from __future__ import annotations

from jaxllm.models.config.read import Config, flag, optional
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.head_maps import Clipped
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import BareLayerNorm

DEFAULTS: Config = {"hidden_act": "silu", "max_position_embeddings": 2048}
NAMES = {module: names for module, names in LLAMA_NAMES.items() if "norm" not in module}
EPS = 1e-5  # no key of the configuration


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return transformer_spec({**hf, "rms_norm_eps": EPS})


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init, BareLayerNorm)
    bias = flag(spec.config, "attention_bias")
    limit = optional(spec.config, "clip_qkv")
    clip = None
    if limit is not None:
        clip = Clipped(limit)

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias, head_map=clip)
        return parts.block(attention, parts.gated_mlp())

    return parts.decoder(block)
