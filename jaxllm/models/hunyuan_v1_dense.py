"""Hunyuan without experts: Llama with norms of query and key heads after they turn."""

from __future__ import annotations

from jaxllm.models.config.read import Config, flag, number
from jaxllm.models.config.rope import rope_parameters
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.head_maps import TurnedNorms
from jaxllm.nn.linear import Init

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}
NAMES = {
    **LLAMA_NAMES,
    "layers.{}.attention.head_map.q_norm": ("model.layers.{}.self_attn.query_layernorm",),
    "layers.{}.attention.head_map.k_norm": ("model.layers.{}.self_attn.key_layernorm",),
}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. A "dynamic" RoPE with `alpha` has a longer base and is
    otherwise plain. Raises ConfigError."""
    settings = rope_parameters(hf)
    if settings["rope_type"] == "dynamic" and settings.get("alpha"):
        plain = transformer_spec({**hf, "rope_scaling": None, "rope_parameters": {}})
        dim = plain.heads(1).dim
        theta = number(settings, "rope_theta")
        base = theta * number(settings, "alpha") ** (dim / (dim - 2))
        longer = {"rope_type": "default", "rope_theta": base}
        hf = {**hf, "rope_scaling": None, "rope_parameters": longer}
    return transformer_spec(hf)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)
    bias = flag(spec.config, "attention_bias")

    def block(layer: int) -> Block:
        norms = TurnedNorms(parts.heads.dim, *parts.qk_norms())
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias, head_map=norms)
        return parts.block(attention, parts.gated_mlp())

    return parts.decoder(block)
