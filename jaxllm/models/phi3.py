"""Phi-3 and Phi-4: Llama with fused tensors; long contexts by two tables of frequencies."""

from __future__ import annotations

from typing import Any

from jaxllm.models.config.read import Config
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, one_window, transformer_spec
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}
NAMES = {
    **LLAMA_NAMES,
    "layers.{}.attention.qkv": ("model.layers.{}.self_attn.qkv_proj",),
    "layers.{}.mlp.gate_up": ("model.layers.{}.mlp.gate_up_proj",),
}
REMOTE_CODE = ("modeling_phi3",)


def read(hf: Config) -> dict[str, Any]:
    """The configuration with the present name of its RoPE type; older ones say "su" or "yarn"."""
    config = dict(hf)
    for key in ("rope_scaling", "rope_parameters"):
        settings = config.get(key)
        if isinstance(settings, dict):
            name = settings.get("rope_type", settings.get("type"))
            if name in ("su", "yarn"):
                name = "longrope"
            config[key] = dict(settings)
            if name is not None:
                config[key]["rope_type"] = name
    return config


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return transformer_spec(hf, one_window(hf), partial=True)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)
    return parts.decoder(lambda layer: parts.block(parts.attention(layer), parts.gated_mlp()))
