"""Mixtral: Mistral with a mixture of experts for every feed-forward."""

from __future__ import annotations

from jaxllm.models.config.mixture import mixture, mixture_names, mixture_spec, routed
from jaxllm.models.config.read import Config
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, one_window, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init

SPELLING = {"num_experts": "num_local_experts"}  # transformers reads either
DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
NAMES = {**LLAMA_NAMES, **mixture_names("block_sparse_moe", parts=("w1", "w3", "w2"))}
SIZES = ("num_local_experts", "intermediate_size")


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return mixture_spec(transformer_spec(hf, one_window(hf)), mixture(hf, *SIZES))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)
    sizes = mixture(spec.config, *SIZES)

    def block(layer: int) -> Block:
        return parts.block(parts.attention(layer), routed(spec, shards, init, sizes))

    return parts.decoder(block)
