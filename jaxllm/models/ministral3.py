"""Ministral 3: Mistral with YaRN, and queries that grow with their position."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.config.read import Config, number
from jaxllm.models.config.rope import rope_parameters
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, one_window, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.head_maps import ScaledQueries
from jaxllm.nn.linear import Init
from jaxllm.nn.rope import QueryScaledRope

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
NAMES = LLAMA_NAMES
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    if not (hf.get("rope_parameters") or hf.get("rope_scaling")):
        hf = {**hf, "rope_parameters": ROPE}
    plain = transformer_spec(hf, one_window(hf))
    settings = rope_parameters(hf)
    beta = number(settings, "llama_4_scaling_beta")
    original = number(settings, "original_max_position_embeddings")
    ropes = (QueryScaledRope(rope, beta, original) for rope in plain.ropes)
    return replace(plain, ropes=tuple(ropes))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)

    def block(layer: int) -> Block:
        return parts.block(parts.attention(layer, head_map=ScaledQueries()), parts.gated_mlp())

    return parts.decoder(block)
